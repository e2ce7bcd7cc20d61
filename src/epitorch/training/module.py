"""The module handed to the trainer: a model, its loss, and the work done on each batch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from epitorch.errors import StartsError, TrainingError
from epitorch.nn import EpitomeLayer
from epitorch.training.averaging import WeightAverage
from epitorch.training.distillation import Teacher, distillation_loss
from epitorch.training.draws import seed_batch
from epitorch.training.measuring import (
    Batch,
    Evaluation,
    Evaluator,
    History,
    LossWatch,
    Tally,
    evaluate,
    laid_out,
    uses_learner,
)
from epitorch.training.mixing import Mix
from epitorch.training.optimisers import make_groups, make_optimizer, make_scheduler, rising_part
from epitorch.training.ranks import ALONE, Ranks, share_buffers
from epitorch.training.recipe_training import TrainingSection

__all__ = [
    "Batch",
    "EpitomeModule",
    "Evaluation",
    "Evaluator",
    "History",
    "LossWatch",
    "Tally",
    "evaluate",
    "laid_out",
    "rising_part",
    "uses_learner",
]

_STATE = "epitorch"  # our key in Lightning's checkpoints


class EpitomeModule(pl.LightningModule):
    """Trains a classifier, dense or with epitome layers, on batches of uint8 images.

    Args:
        model: The network, shape (N, C, H, W) -> (N, classes).
        training: The recipe's section.
        augment: Applied to raw training batches.
        normalize: Applied to all batches; gives floating point.
        steps: Optimiser steps of the whole training: the length of the schedule.
        freeze_last_epochs: In so many last epochs the routing map is fixed and used in training as well.
        snap: Move the map to whole positions when it is fixed.
        epochs: Epochs of the whole training.
        teacher: Gives logits for the same images; its share of the loss is in `training`.
        mix: Mixes normalised training batches.
        seed: Of augmentation, mixing and dropout.
        ranks: The processes that share every batch.
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
        mix: Mix | None = None,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self._teacher = (teacher,)  # in a tuple: its tensors are no part of the module's state
        self.model = model.to(memory_format=torch.channels_last) if training.channels_last else model
        self.training_section = training
        self.augment, self.normalize, self.mix = augment, normalize, mix
        self.steps, self.epochs = steps, epochs
        self.freeze_epoch = epochs - freeze_last_epochs if freeze_last_epochs else None
        self.snap = snap
        self.seed, self.ranks = seed, ranks
        self.history = History()
        self.watch = LossWatch(every=20, ranks=ranks)
        self.tally = Tally.empty("cpu")
        self.evaluator: Evaluator | None = None
        self.average = None if training.ema_decay is None else WeightAverage(self.model, training.ema_decay)
        # Evaluation stays eager: other modes and shapes would be compiled again.
        self._compiled = (torch.compile(self.model) if training.compile else self.model,)
        # Now, not when the optimiser is made: a run that goes on with frozen starts has the same groups as it had.
        self._groups = make_groups(self.model, training)
        self._epoch = self._batch = 0  # place in training of the next batch

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for normalised images. shape: (N, C, H, W) -> (N, classes)."""
        (model,) = self._compiled
        return model(images)

    @property
    def kept(self) -> nn.Module:
        """The model to evaluate and keep: the averaged one where there is one."""
        return self.model if self.average is None else self.average.model

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augment (training only) and normalise a batch where it lies."""
        images, labels = batch
        training = self.trainer.training
        if training:
            seed_batch(self.seed, self._epoch, self._batch)
            images = self.augment(images, ranks=self.ranks)
        images = laid_out(self.normalize(images), self.training_section.channels_last)
        if training and self.mix is not None:
            images, labels = self.mix(images, labels)
        if training and self.ranks.world > 1:
            seed_batch(self.seed, self._epoch, self._batch, self.ranks.rank)  # dropout differs between ranks
        self._batch += training
        return images, labels

    # ---- training ----

    def on_fit_start(self) -> None:
        """Bring teacher, averaged weights and sums to the device."""
        self.tally = self.tally.to(self.device)
        for other in (*self._teacher, self.average):
            if other is not None:
                other.to(self.device)

    def on_train_epoch_start(self) -> None:
        """Start the epoch's sums; fix the routing map when its time has come."""
        self.tally = Tally.empty(self.device)
        self._epoch, self._batch = self.current_epoch, 0
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
        smoothing = 0.0 if labels.ndim == 2 else section.label_smoothing  # mixed labels are smooth already
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
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
        seen = self.tally.over(self.ranks)
        self.history.train_loss.append(seen.mean_loss)
        self.history.train_accuracy.append(seen.accuracy)

    # ---- held-out images ----

    def on_validation_epoch_start(self) -> None:
        """Start counting."""
        share_buffers(self.kept, self.ranks)
        self.evaluator = Evaluator(self.kept.eval(), self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch of held-out images."""
        if self.evaluator is not None:
            self.evaluator.add(*batch)

    def on_validation_epoch_end(self) -> None:
        """Write down the held-out accuracy."""
        if self.evaluator is None:
            return
        result, self.evaluator = self.evaluator.result(self.ranks), None
        self.history.heldout_accuracy.append(result.accuracy)
        self.history.heldout_loss.append(result.loss)
        if result.accuracy_learner is not None:
            self.history.heldout_accuracy_learner.append(result.accuracy_learner)

    # ---- optimiser ----

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The recipe's optimiser over `epitorch.param_groups` and its schedule, stepped after every optimiser step."""
        optimizer = make_optimizer(self._groups, self.training_section)
        scheduler = make_scheduler(optimizer, self.training_section, self.steps, self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Step, then bring the averaged weights up to date."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.average is not None:
            self.average.update(self.model)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Schedulers of torch count their steps themselves, those of timm are told."""
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            super().lr_scheduler_step(scheduler, metric)
        else:
            scheduler.step_update(self.global_step)

    # ---- state ----

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know of: the place in training, sums, history and averaged weights."""
        for model in (self.model, self.kept):
            share_buffers(model, self.ranks)
        seen = self.tally.over(self.ranks)
        checkpoint[_STATE] = {
            "place": [self._epoch, self._batch],
            "tally": [seen.loss, seen.correct, seen.count],
            "history": asdict(self.history),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back; the sums so far go to rank 0, so that they are counted once."""
        state = checkpoint[_STATE]
        self._epoch, self._batch = state["place"]
        loss, correct, count = state["tally"]
        if self.ranks.first:
            self.tally = Tally(loss, correct, count)
        self.history = History(**state["history"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
