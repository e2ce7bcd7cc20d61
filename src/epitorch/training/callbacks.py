"""What happens around the training steps: progress, times and memory, log lines, signals, checkpoints."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from epitorch.training.module import EpitomeModule


class RunStopped(BaseException):
    """A signal asked the run to stop. Not an Exception, so that no handler on the way takes it for a failure.

    Args:
        signum: The signal.
        between_steps: It was heard between two training steps, where the state of training is whole.
    """

    def __init__(self, signum: int, between_steps: bool = False) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum, self.between_steps = signum, between_steps


def stop_reason(error: BaseException, received: int | None, *, interrupted: bool) -> BaseException:
    """What the caller sees: KeyboardInterrupt after Ctrl-C, exit code 143 after SIGTERM, errors as they are."""
    # Lightning answers KeyboardInterrupt by exit(1) and may meet SIGTERM with an exit of its own.
    if not isinstance(error, RunStopped) and not (isinstance(error, SystemExit) and interrupted):
        return error
    return SystemExit(128 + received) if received not in (None, signal.SIGINT) else KeyboardInterrupt()


class StopOnSignal(pl.Callback):
    """Ends training between two steps once a signal has come, so that no step is cut in half."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.saving = False
        self._listens = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM inside; the former handlers come back afterwards.

        The second SIGINT raises KeyboardInterrupt at once, but never while `saving` is set. Only the main thread can
        set handlers; elsewhere nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, self._receive)
        self._listens = True
        try:
            yield
        finally:
            self._listens = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.received is not None and not self.saving:
            raise KeyboardInterrupt
        self.received = signum

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take SIGTERM back from Lightning, which ends a run in the middle of accumulated gradients too."""
        if self._listens and trainer.world_size == 1:
            signal.signal(signal.SIGTERM, self._receive)

    def check(self, between_steps: bool = False) -> None:
        """Raise RunStopped if a signal has come."""
        if self.received is not None:
            raise RunStopped(self.received, between_steps)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop here if asked to, unless gradients are being accumulated or the held-out images are next."""
        done = batch_idx + 1
        if done % trainer.accumulate_grad_batches == 0 and done != trainer.num_training_batches:
            self.check(between_steps=True)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop here if asked to."""
        self.check()


class Meter(pl.Callback):
    """Wall times of the epochs and the largest memory seen."""

    def __init__(self) -> None:
        self.began = time.perf_counter()  # earlier, where the run goes on: what it took before counts
        self.epochs: list[float] = []
        self.epochs_training: list[float] = []
        self.rss = 0
        self.cuda: int | None = None
        self._process = psutil.Process()
        self._start = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the times so far, for a run that goes on."""
        now = time.perf_counter()
        return {
            "seconds": now - self.began,
            "in_epoch": now - self._start,
            "epochs": self.epochs,
            "epochs_training": self.epochs_training,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from these times."""
        now = time.perf_counter()
        self.began, self._start = self.began - state_dict["seconds"], now - state_dict["in_epoch"]
        self.epochs, self.epochs_training = list(state_dict["epochs"]), list(state_dict["epochs_training"])

    def look(self, device: torch.device) -> None:
        """Take in the present memory use."""
        self.rss = max(self.rss, self._process.memory_info().rss)
        if device.type == "cuda":
            self.cuda = max(self.cuda or 0, torch.cuda.max_memory_allocated(device))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the device's former peak."""
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        self.look(pl_module.device)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the memory; after the last batch, take the time of the steps."""
        last = batch_idx + 1 == trainer.num_training_batches
        if last or batch_idx % 10 == 0:
            self.look(pl_module.device)
        if last:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)  # the queue is still running
            self.epochs_training.append(time.perf_counter() - self._start)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the time of the whole epoch."""
        self.look(pl_module.device)
        self.epochs.append(time.perf_counter() - self._start)


class EpochLog(pl.Callback):
    """One line per epoch (and per minute) to a logger, and the numbers to Lightning's loggers (CSV, TensorBoard)."""

    def __init__(self, log: logging.Logger, meter: Meter, *, every: int = 50, line_seconds: float = 60.0) -> None:
        self.lines, self.meter, self.every, self.line_seconds = log, meter, every, line_seconds
        self._last_line = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write loss and learning rate every few steps: reading the loss waits for the device."""
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and trainer.global_step % self.every == 0:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            write(trainer, {"train_loss_step": float(outputs["loss"]), "lr": rate}, trainer.global_step)
        if time.perf_counter() - self._last_line > self.line_seconds:
            self._last_line = time.perf_counter()
            total = all_steps(trainer)
            self.lines.info("step %d of %d  loss %.4f", trainer.global_step, total, float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the epoch's numbers."""
        numbers = latest(pl_module)
        write(trainer, {"epoch": trainer.current_epoch + 1, **numbers}, trainer.global_step)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        self._last_line = time.perf_counter()
        self.lines.info("epoch %d  %s  %.1f s", trainer.current_epoch + 1, shown, self.meter.epochs[-1])


def all_steps(trainer: pl.Trainer) -> int:
    """Optimiser steps of the whole training."""
    batches = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
    return batches * int(trainer.max_epochs or 1)


def write(trainer: pl.Trainer, numbers: dict[str, float], step: int) -> None:
    """Send numbers to every logger of the trainer."""
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=step)


def latest(module: pl.LightningModule) -> dict[str, float]:
    """Return the numbers of the last epoch in the module's history; a frozen map ends those with the learner."""
    if not isinstance(module, EpitomeModule):
        return {}
    lists: dict[str, list[float]] = vars(module.history)
    epochs = max(map(len, lists.values()))
    return {name: values[-1] for name, values in lists.items() if values and len(values) == epochs}


class EachEpoch(pl.Callback):
    """Calls a function when an epoch has ended."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call it."""
        self.call()


class ProgressBar(pl.Callback):
    """One bar over all steps of the run, with epoch, remaining time, last loss and held-out accuracy.

    On something that is not a terminal it stays silent: there the log has a line per epoch.
    """

    def __init__(self, name: str, console: Console, *, every: int = 10) -> None:
        self.name, self.every = name, every
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the bar."""
        if self.progress.disable:
            return
        self.progress.start()
        self.task = self.progress.add_task(self.name, total=all_steps(trainer), completed=trainer.global_step, state="")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar."""
        if self.task is not None and trainer.global_step % self.every == 0:
            self.progress.update(self.task, completed=trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show what the epoch gave."""
        if self.task is None:
            return
        numbers = latest(pl_module)
        state = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  loss {numbers.get('train_loss', 0):.3f}"
        if "heldout_accuracy" in numbers:
            state += f"  held-out {100 * numbers['heldout_accuracy']:.1f}%"
        self.progress.update(self.task, completed=trainer.global_step, state=state)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same after an error: the terminal's cursor comes back."""
        self._stop()

    def _stop(self) -> None:
        if self.task is not None:
            self.progress.stop()
