"""What is measured while a network trains and afterwards: losses and accuracies, on one process or several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epitorch.errors import TrainingError, explain
from epitorch.nn import EpitomeLayer, learner_starts
from epitorch.progress import Say, say_nothing
from epitorch.training.ranks import ALONE, Ranks, total

Batch = tuple[Tensor, Tensor]  # images uint8 (N, C, H, W), labels int64 (N,)


@dataclass
class Tally:
    """Sums over batches, kept on the device so that adding a batch does not wait for it."""

    loss: Tensor
    correct: Tensor
    count: int = 0

    @classmethod
    def empty(cls, device: torch.device | str) -> Tally:
        """Return sums of nothing."""
        return cls(torch.zeros((), device=device), torch.zeros((), device=device, dtype=torch.int64))

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor, loss: Tensor | None = None) -> None:
        """Add a batch; its loss is the plain cross-entropy unless given.

        logits: (N, classes), labels: (N,), or (N, classes) where images are mixed: the heavier label counts.
        """
        loss = F.cross_entropy(logits.float(), labels) if loss is None else loss
        self.loss += loss.detach().float() * len(labels)
        labels = labels.argmax(1) if labels.ndim == 2 else labels
        self.correct += (logits.argmax(1) == labels).sum()
        self.count += len(labels)

    def to(self, device: torch.device | str) -> Tally:
        """Return the same sums on another device."""
        return Tally(self.loss.to(device), self.correct.to(device), self.count)

    def over(self, ranks: Ranks) -> Tally:
        """Return the sums over all ranks, which must all ask; itself where there is one."""
        if ranks.world == 1:
            return self
        count = torch.tensor(self.count, device=self.loss.device)
        sums = total(torch.stack([value.double() for value in (self.loss, self.correct, count)]), ranks)
        return Tally(sums[0].float(), sums[1].long(), int(sums[2]))

    @property
    def accuracy(self) -> float:
        """Part of the images that were classified right."""
        return int(self.correct) / max(self.count, 1)

    @property
    def mean_loss(self) -> float:
        """Loss per image."""
        return float(self.loss) / max(self.count, 1)


@dataclass
class History:
    """One number per epoch for each quantity."""

    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    heldout_loss: list[float] = field(default_factory=list)
    heldout_accuracy: list[float] = field(default_factory=list)
    heldout_accuracy_learner: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """Top-1 accuracy and loss with the routing map; accuracy with the learner on the same batches, if one is in use."""

    accuracy: float
    loss: float
    images: int
    accuracy_learner: float | None = None


class Evaluator:
    """Counts what a model in eval mode gets right, with its routing map and with its learner on the same batches."""

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        self.model = model
        self.with_map = Tally.empty(device)
        self.with_learner = Tally.empty(device) if uses_learner(model) else None

    @torch.no_grad()
    def add(self, images: Tensor, labels: Tensor) -> None:
        """Add a batch of normalised images, shape (N, C, H, W)."""
        self.with_map.add(self.model(images), labels)
        if self.with_learner is not None:
            with learner_starts(self.model):
                self.with_learner.add(self.model(images), labels)

    def result(self, ranks: Ranks = ALONE) -> Evaluation:
        """Return what was counted, over all ranks (which must all ask)."""
        learner = None if self.with_learner is None else self.with_learner.over(ranks).accuracy
        seen = self.with_map.over(ranks)
        return Evaluation(seen.accuracy, seen.mean_loss, seen.count, learner)


def uses_learner(model: nn.Module) -> bool:
    """Say whether any layer takes its starts from an index learner in training: it has one and is not frozen."""
    layers = (layer for layer in model.modules() if isinstance(layer, EpitomeLayer))
    return any(layer.learner is not None and not layer.routing_map.is_frozen for layer in layers)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    normalize: nn.Module,
    *,
    channels_last: bool = False,
    ranks: Ranks = ALONE,
    say: Say = say_nothing,
) -> Evaluation:
    """Measure a model on batches, in float32 and eval mode; its mode is put back afterwards.

    Args:
        model: The model, on its device.
        batches: Pairs of uint8 images (N, C, H, W) and labels (N,), there or in the processor's memory.
        normalize: Turns the images into the model's input.
        channels_last: Memory layout of that input.
        ranks: The processes that share the batches.
        say: Takes how many images are done, after every batch.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    evaluator, training, seen = Evaluator(model, device), model.training, 0
    model.eval()
    try:
        for raw, labels in batches:
            images = raw.to(device, non_blocking=True)
            evaluator.add(laid_out(normalize(images), channels_last), labels.to(device, non_blocking=True))
            seen += len(labels)
            say(f"{seen:,} images")
    finally:
        model.train(training)
    return evaluator.result(ranks)


def laid_out(images: Tensor, channels_last: bool) -> Tensor:
    """Return the images in the memory layout asked for, shape: (N, C, H, W); sounds have only one."""
    return images.contiguous(memory_format=torch.channels_last) if channels_last and images.ndim == 4 else images


class LossWatch:
    """Stops at a loss that is not finite.

    Args:
        every: Steps between looks on an accelerator, where looking waits for the device, and among several processes,
            which stop together; one process on the CPU looks each step.
        ranks: The processes.
    """

    def __init__(self, every: int, ranks: Ranks = ALONE) -> None:
        self.every, self.ranks = every, ranks
        self.first_bad: Tensor | None = None

    @torch.no_grad()
    def see(self, loss: Tensor, step: int, epoch: int) -> None:
        """Take in one loss.

        Raises:
            TrainingError: If this loss, or one since the last look, is not finite.
        """
        if self.first_bad is None:
            self.first_bad = torch.full((), -1, dtype=torch.int64, device=loss.device)
        is_first = ~torch.isfinite(loss) & (self.first_bad < 0)
        self.first_bad = torch.where(is_first, step, self.first_bad)
        if (loss.device.type == "cpu" and self.ranks.world == 1) or step % self.every == 0:
            self.look(epoch)

    def look(self, epoch: int) -> None:
        """Raise TrainingError if a loss seen so far was not finite."""
        step = -1 if self.first_bad is None else self._first_of_all(self.first_bad)
        if step < 0:
            return
        raise TrainingError(
            explain(
                "the training loss is not finite",
                expected="a finite loss",
                got=f"NaN or infinity at step {step} of epoch {epoch} (both counted from 0)",
                fix="lower training.peak_lr (or start_lr), or train in fp32",
            )
        )

    def _first_of_all(self, first_bad: Tensor) -> int:
        """The first bad step of any rank, below 0 if there is none."""
        if self.ranks.world == 1:
            return int(first_bad)
        never = torch.iinfo(torch.int64).max
        first = torch.where(first_bad < 0, never, first_bad)
        torch.distributed.all_reduce(first, op=torch.distributed.ReduceOp.MIN)
        return -1 if int(first) == never else int(first)
