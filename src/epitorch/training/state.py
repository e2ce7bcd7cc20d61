"""The state of training on disk: when it is written, that it is there whole, and what goes wrong with it."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins import CheckpointIO

from epitorch._files import write_atomic
from epitorch.errors import CheckpointError, TrainingError, explain
from epitorch.training.callbacks import RunStopped

_MINUTES = 10
_TOGETHER = 50  # steps between the looks at the clock that several processes take together


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's checkpoints, each there whole or not at all: written beside its place, then renamed.

    Lightning's own writer moves a file out of the system's temporary folder, which copies between file systems.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_atomic(Path(path), content.getvalue())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read one, as plain data and tensors only.

        Raises:
            CheckpointError: If it cannot be read.
        """
        try:
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                explain(
                    "the state of training cannot be read",
                    expected="a file that this run wrote",
                    got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                    where=str(path),
                    fix="pass --overwrite (overwrite=True) to begin anew",
                )
            ) from error

    def remove_checkpoint(self, path: Any) -> None:
        """Remove one."""
        Path(path).unlink(missing_ok=True)


class StateSaver(Checkpoint):
    """Writes the state of training after each epoch, every few steps, and where a signal stops the run.

    Within an epoch it is written between two optimiser steps, never in the middle of accumulated gradients.

    Args:
        path: The file; each state replaces the one before.
        every: Optimiser steps between states within an epoch; None is every 10 minutes.
    """

    def __init__(self, path: Path, every: int | None) -> None:
        self.path, self.every = path, every
        self.step: int | None = None  # of the last state on disk
        self._last = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; see that all processes begin at the same step."""
        self._last = time.monotonic()
        self.step = trainer.global_step or None
        first = trainer.strategy.broadcast(trainer.global_step)
        if first != trainer.global_step:
            raise TrainingError(
                explain(
                    "the processes do not go on from the same step",
                    expected=f"step {first} on every machine",
                    got=f"step {trainer.global_step} on rank {trainer.global_rank}",
                    where=str(self.path),
                    fix="give --out a folder that all machines share",
                )
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write it if it is time; not after the last batch, where the end of the epoch follows."""
        if between_steps(trainer, batch_idx) and self._is_time(trainer):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it."""
        self._save(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write it where a signal stopped a single process between two steps."""
        if isinstance(exception, RunStopped) and exception.between_steps and trainer.world_size == 1:
            self._save(trainer)

    def _is_time(self, trainer: pl.Trainer) -> bool:
        if self.every is not None:
            return trainer.global_step % self.every == 0
        late = time.monotonic() - self._last > 60 * _MINUTES
        if trainer.world_size == 1:
            return late
        if trainer.global_step % _TOGETHER:
            return False
        return trainer.strategy.reduce_boolean_decision(late, all=False)

    def _save(self, trainer: pl.Trainer) -> None:
        _refuse_spoilt(trainer)
        with reported(self.path, trainer.global_step, self.step):
            trainer.save_checkpoint(self.path)
        self.step, self._last = trainer.global_step, time.monotonic()


def _refuse_spoilt(trainer: pl.Trainer) -> None:
    """A step may spoil the weights before a loss shows it: the state before must not be replaced then."""
    if all(torch.isfinite(value).all() for value in trainer.lightning_module.parameters()):
        return
    raise TrainingError(
        explain(
            "the weights are not finite",
            expected="finite weights",
            got=f"NaN or infinity after step {trainer.global_step - 1} of epoch {trainer.current_epoch} (from 0)",
            fix="lower training.peak_lr (or start_lr), or train in fp32",
        )
    )


def between_steps(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether this batch completed an optimiser step, and is not the epoch's last."""
    done = batch_idx + 1
    return done % trainer.accumulate_grad_batches == 0 and done != trainer.num_training_batches


@contextmanager
def reported(path: Path, step: int, kept: int | None) -> Iterator[None]:
    """Turn a refusal of the system to write (a full disk, say) into an error that says what is left.

    Raises:
        TrainingError: In place of OSError.
    """
    try:
        yield
    except OSError as error:
        left = "nothing was saved before" if kept is None else f"the state of step {kept} is still there"
        raise TrainingError(
            explain(
                f"what was trained could not be written at step {step}",
                expected="a folder that can be written, on a disk with room",
                got=f"{error.strerror or error}; {left}",
                where=str(path),
                fix="make room and run the same command again: it goes on from the last state",
            )
        ) from error
