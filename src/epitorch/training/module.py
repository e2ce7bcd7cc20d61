"""The module handed to the trainer: a model, its loss, the work done on each batch, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from epitorch.errors import StartsError, TrainingError, explain
from epitorch.nn import EpitomeLayer, learner_starts
from epitorch.optim import param_groups
from epitorch.training.distillation import Teacher, distillation_loss
from epitorch.training.recipe import TrainingSection

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
        """Add a batch; its loss is the plain cross-entropy unless given. logits: (N, classes), labels: (N,)."""
        loss = F.cross_entropy(logits.float(), labels) if loss is None else loss
        self.loss += loss.detach().float() * len(labels)
        self.correct += (logits.argmax(1) == labels).sum()
        self.count += len(labels)

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

    def result(self) -> Evaluation:
        """Return what was counted."""
        learner = None if self.with_learner is None else self.with_learner.accuracy
        return Evaluation(self.with_map.accuracy, self.with_map.mean_loss, self.with_map.count, learner)


def uses_learner(model: nn.Module) -> bool:
    """Say whether any layer takes its starts from an index learner in training: it has one and is not frozen."""
    layers = (layer for layer in model.modules() if isinstance(layer, EpitomeLayer))
    return any(layer.learner is not None and not layer.routing_map.is_frozen for layer in layers)


def evaluate(
    model: nn.Module, batches: Iterable[Batch], normalize: nn.Module, *, channels_last: bool = False
) -> Evaluation:
    """Measure a model on batches, in float32 and eval mode; its mode is put back afterwards.

    Args:
        model: The model, on the device of the batches.
        batches: Pairs of uint8 images (N, C, H, W) and labels (N,).
        normalize: Turns the images into the model's input.
        channels_last: Memory layout of that input.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    evaluator, training = Evaluator(model, device), model.training
    model.eval()
    try:
        for images, labels in batches:
            evaluator.add(laid_out(normalize(images), channels_last), labels)
    finally:
        model.train(training)
    return evaluator.result()


def laid_out(images: Tensor, channels_last: bool) -> Tensor:
    """Return the images in the memory layout asked for, shape: (N, C, H, W); sounds have only one."""
    return images.contiguous(memory_format=torch.channels_last) if channels_last and images.ndim == 4 else images


class LossWatch:
    """Stops at a loss that is not finite.

    Args:
        every: Steps between looks on an accelerator, where looking waits for the device; on the CPU it looks each step.
    """

    def __init__(self, every: int) -> None:
        self.every = every
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
        if loss.device.type == "cpu" or step % self.every == 0:
            self.look(epoch)

    def look(self, epoch: int) -> None:
        """Raise TrainingError if a loss seen so far was not finite."""
        step = -1 if self.first_bad is None else int(self.first_bad)
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


class EpitomeModule(pl.LightningModule):
    """Trains a classifier, dense or with epitome layers, on batches of uint8 images.

    Args:
        model: The network, shape (N, C, H, W) -> (N, classes).
        training: The recipe's section.
        augment: Applied to uint8 training batches.
        normalize: Applied to all batches; gives floating point.
        steps: Optimiser steps of the whole training: the length of the schedule.
        freeze_last_epochs: In so many last epochs the routing map is fixed and used in training as well.
        snap: Move the map to whole positions when it is fixed.
        epochs: Epochs of the whole training.
        teacher: Gives logits for the same images; its share of the loss is in `training`.
    """

    def __init__(
        self,
        model: nn.Module,
        training: TrainingSection,
        *,
        augment: nn.Module,
        normalize: nn.Module,
        steps: int,
        epochs: int,
        freeze_last_epochs: int = 0,
        snap: bool = False,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        self._teacher = (teacher,)  # in a tuple: its tensors are no part of the module's state
        self.model = model.to(memory_format=torch.channels_last) if training.channels_last else model
        self.training_section = training
        self.augment, self.normalize = augment, normalize
        self.steps = steps
        self.freeze_epoch = epochs - freeze_last_epochs if freeze_last_epochs else None
        self.snap = snap
        self.history = History()
        self.watch = LossWatch(every=20)
        self.tally = Tally.empty("cpu")
        self.evaluator: Evaluator | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for normalised images. shape: (N, C, H, W) -> (N, classes)."""
        return self.model(images)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augment (training only) and normalise a batch where it lies."""
        images, labels = batch
        if self.trainer.training:
            images = self.augment(images)
        return laid_out(self.normalize(images), self.training_section.channels_last), labels

    # ---- training ----

    def on_fit_start(self) -> None:
        """Bring the teacher to the device."""
        for teacher in self._teacher:
            if teacher is not None:
                teacher.to(self.device)

    def on_train_epoch_start(self) -> None:
        """Start the epoch's sums; fix the routing map when its time has come."""
        self.tally = Tally.empty(self.device)
        if self.current_epoch == self.freeze_epoch:
            for layer in self.model.modules():
                if isinstance(layer, EpitomeLayer):
                    layer.snap_routing() if self.snap else layer.freeze_routing()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        try:
            logits = self(images)
        except StartsError as error:
            raise TrainingError(f"step {self.global_step} of epoch {self.current_epoch}: {error}") from error
        loss = self._loss(images, logits, labels)
        self.watch.see(loss, self.global_step, self.current_epoch)
        self.tally.add(logits, labels, loss)
        return loss

    def _loss(self, images: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        section = self.training_section
        loss = F.cross_entropy(logits, labels, label_smoothing=section.label_smoothing)
        (teacher,) = self._teacher
        if teacher is None:
            return loss
        taught = distillation_loss(logits, teacher(images), section.temperature)
        return torch.lerp(loss, taught, section.teacher_weight)

    def on_train_batch_end(self, outputs: object, batch: Batch, batch_idx: int) -> None:
        """Write down what the epoch gave, after its last step and before the held-out images."""
        if batch_idx + 1 != self.trainer.num_training_batches:
            return
        self.watch.look(self.current_epoch)
        self.history.train_loss.append(self.tally.mean_loss)
        self.history.train_accuracy.append(self.tally.accuracy)

    # ---- held-out images ----

    def on_validation_epoch_start(self) -> None:
        """Start counting."""
        self.evaluator = Evaluator(self.model, self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch of held-out images."""
        if self.evaluator is not None:
            self.evaluator.add(*batch)

    def on_validation_epoch_end(self) -> None:
        """Write down the held-out accuracy."""
        if self.evaluator is None:
            return
        result, self.evaluator = self.evaluator.result(), None
        self.history.heldout_accuracy.append(result.accuracy)
        self.history.heldout_loss.append(result.loss)
        if result.accuracy_learner is not None:
            self.history.heldout_accuracy_learner.append(result.accuracy_learner)

    # ---- optimiser ----

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """SGD over `epitorch.param_groups`, each group on its own one-cycle schedule, stepped every batch."""
        section = self.training_section
        groups = param_groups(
            self.model, lr=section.peak_lr, weight_decay=section.weight_decay, start_lr=section.start_lr
        )
        optimizer = torch.optim.SGD(groups, lr=section.peak_lr, momentum=section.momentum, nesterov=section.nesterov)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in groups],
            total_steps=self.steps,
            pct_start=rising_part(section.warmup, self.steps),
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rising_part(warmup: float, steps: int) -> float:
    """Return the part of the schedule that rises: `warmup`, or a little less where OneCycleLR would divide by zero.

    It does where the rise is exactly one step long, and, after the last step, where it takes up all steps.
    """
    return warmup * 0.999 if warmup == 1 or abs(warmup * steps - 1) < 1e-6 else warmup
