"""One training run from a recipe to `results.json`.

A run's folder holds `results.json`, `checkpoint/` (portable, without pickle), `lightning/last.ckpt` (optimiser and
schedule too), `metrics.csv` and TensorBoard events in `logs/`, and `train.log`.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console

from epitorch.checkpoint import CheckpointConfig, save_checkpoint
from epitorch.cost import Cost, count
from epitorch.errors import InputError, explain
from epitorch.results import Accuracy, MAdds, Parameters, PeakMemory, RunResult, Seconds, save_results
from epitorch.training.callbacks import EachEpoch, EpochLog, Meter, ProgressBar, RunStopped, StopOnSignal, latest
from epitorch.training.data import ArrayLoader, BatchAugment, Normalize, load_images
from epitorch.training.devices import choose_device
from epitorch.training.module import EpitomeModule, Evaluation, evaluate
from epitorch.training.recipe import Recipe
from epitorch.training.setup import (
    HOLDOUT_SEED,
    BuiltModel,
    TrainingData,
    build,
    environment,
    example_image,
    load_training_data,
    seeded,
)

RESULTS, CHECKPOINT, LOGS, LIGHTNING, LOG = "results.json", "checkpoint", "logs", "lightning", "train.log"
_PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(frozen=True)
class RunOptions:
    """How a recipe is run, apart from what it says.

    Args:
        seed: Of initial weights, order and augmentation; None takes the recipe's.
        accelerator: `auto`, `cpu` or `cuda`.
        max_steps: Stop early: at most so many optimiser steps, the schedule fitted to them. For trials.
        overwrite: Replace the results of an earlier run in the same folder.
        command: The command line to record; default that of the process.
        callbacks: More Lightning callbacks.
        console: Where the progress bar goes; default standard error.
    """

    seed: int | None = None
    accelerator: str = "auto"
    max_steps: int | None = None
    overwrite: bool = False
    command: Sequence[str] | None = None
    callbacks: Sequence[pl.Callback] = ()
    console: Console | None = None


def train(
    recipe: Recipe, data_path: str | Path, out_dir: str | Path, options: RunOptions | None = None
) -> RunResult:
    """Train what a recipe says and measure it.

    The held-out training images are evaluated after each epoch; the test images are read once, after the last. After
    Ctrl-C, SIGTERM or an error the folder holds a checkpoint that `epitorch eval` takes, and no `results.json`.
    Global random state is left as it was.

    Args:
        recipe: From `load_recipe` or `parse_recipe`.
        data_path: As `load_images` takes it, `digits` for example.
        out_dir: Folder of the run; made if missing.
        options: Seed, accelerator and so on.

    Returns:
        What `results.json` holds.

    Raises:
        InputError: If recipe, data and options do not go together, or the folder has results already.
        TrainingError: If the loss is not finite.
        KeyboardInterrupt: After Ctrl-C, once the checkpoint is written.
    """
    options = options or RunOptions()
    device = _device(options.accelerator, recipe)
    out = _claim(Path(out_dir), options.overwrite)
    seed = recipe.training.seed if options.seed is None else options.seed
    with _logged(out / LOG) as log, _quiet_lightning(), seeded(seed):
        log.info("recipe %s (sha256 %s), seed %d, data %s", recipe.name, recipe.sha256, seed, data_path)
        run = _Run(recipe, data_path, out, options, seed, device, log)
        return run.go()


class _Run:
    """The parts of one run, made in the order in which they are needed."""

    def __init__(
        self,
        recipe: Recipe,
        data_path: str | Path,
        out: Path,
        options: RunOptions,
        seed: int,
        device: torch.device,
        log: logging.Logger,
    ) -> None:
        self.recipe, self.data_path, self.out = recipe, data_path, out
        self.options, self.seed, self.device, self.log = options, seed, device, log
        self.started = time.perf_counter()
        self.data: TrainingData = load_training_data(recipe, data_path)
        self.built: BuiltModel = build(recipe, self.data.input)
        self.cost: Cost = count(self.built.model, example_image(self.data.input))
        self.meter, self.stop = Meter(), StopOnSignal()
        self.train_loader = self._loader(self.data.train, shuffle=True)
        batches = len(self.train_loader)
        self.epoch_steps = min(batches, options.max_steps or batches)
        wanted = recipe.training.epochs
        self.epochs = min(wanted, max(1, options.max_steps // self.epoch_steps)) if options.max_steps else wanted
        self.module = self._module()

    def go(self) -> RunResult:
        """Train, then evaluate and write everything."""
        self.log.info("%s", f"{self.cost.params:,} parameters, {self.cost.madds:,} MAdds")
        self._fit()
        test, images = self._evaluate_test()
        # again, with the trained starts: whole ones need no interpolation
        self.cost = count(self.module.model.cpu(), example_image(self.data.input))
        result = self._result(test, images)
        self._save(test)
        save_results(self.out / RESULTS, result)
        self.log.info("test accuracy %.4f, with the learner %s", test.accuracy, _shown(test.accuracy_learner))
        return result

    # ---- training ----

    def _loader(self, arrays: Any, *, shuffle: bool) -> ArrayLoader:
        return ArrayLoader(
            arrays.to(self.device),
            self.recipe.training.batch_size,
            shuffle=shuffle,
            seed=self.seed,
            drop_last=shuffle,  # a rest of a few images would give batch norm a poor estimate
        )

    def _module(self) -> EpitomeModule:
        data, epitome = self.recipe.data, self.recipe.epitome
        return EpitomeModule(
            self.built.model,
            self.recipe.training,
            augment=BatchAugment(data.crop_padding, flip=data.flip),
            normalize=Normalize(self.data.input.mean, self.data.input.std),
            steps=self.epochs * self.epoch_steps,
            epochs=self.epochs,
            freeze_last_epochs=min(epitome.freeze_last_epochs, self.epochs) if epitome else 0,
            snap=epitome.snap if epitome else False,
        )

    def _trainer(self) -> pl.Trainer:
        loggers = [CSVLogger(self.out, name=LOGS, version=""), TensorBoardLogger(self.out, name=LOGS, version="")]
        console = self.options.console or Console(stderr=True)
        keep = ModelCheckpoint(self.out / LIGHTNING, filename="last", enable_version_counter=False)
        callbacks = [
            self.meter,
            ProgressBar(self.recipe.name, console),
            EpochLog(self.log, self.meter),
            EachEpoch(self._save),
            keep,
            *self.options.callbacks,
            self.stop,
        ]
        return pl.Trainer(
            accelerator="gpu" if self.device.type == "cuda" else "cpu",
            devices=1,
            precision=_PRECISION[self.recipe.training.precision],
            max_epochs=self.epochs,
            limit_train_batches=self.epoch_steps,
            logger=loggers,
            callbacks=callbacks,
            default_root_dir=self.out,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def _fit(self) -> None:
        trainer = self._trainer()
        heldout = self._loader(self.data.heldout, shuffle=False)
        try:
            with self.stop.listening(), _known_warnings():
                trainer.fit(self.module, self.train_loader, heldout)
        except BaseException as error:
            self._save_stopped(error, trainer.global_step)
            reason = _stop_reason(error, interrupted=trainer.interrupted)
            if reason is error:
                raise
            raise reason from None

    def _save_stopped(self, error: BaseException, step: int) -> None:
        self.log.error("stopped at step %d: %s", step, f"{type(error).__name__}: {error}")
        if not all(torch.isfinite(value).all() for value in self.module.model.state_dict().values()):
            self.log.error("the weights are not finite any more: no checkpoint of this moment")
        elif step > 0 or not isinstance(error, Exception):
            self._save(stopped_at=step)
            self.log.info("checkpoint written to %s", self.out / CHECKPOINT)

    # ---- measuring ----

    def _evaluate_test(self) -> tuple[Evaluation, int]:
        arrays = load_images(self.data_path, "test")
        model, normalize = self.module.model.to(self.device), self.module.normalize.to(self.device)
        channels_last = self.recipe.training.channels_last
        loader = self._loader(arrays, shuffle=False)
        test = evaluate(model, loader, normalize, channels_last=channels_last)
        self.meter.look(self.device)
        return test, len(arrays)

    def _save(self, test: Evaluation | None = None, stopped_at: int | None = None) -> None:
        metrics: dict[str, Any] = {"seed": self.seed, **latest(self.module)}
        if test is not None:
            metrics.update(test_accuracy=test.accuracy, test_accuracy_learner=test.accuracy_learner)
        if stopped_at is not None:
            metrics["stopped_at_step"] = stopped_at
        config = CheckpointConfig(
            self.recipe.model.name,
            self.recipe.model.arguments,
            self.built.plan,
            self.data.input,
            self.recipe.training.batch_size,
            {key: value if _usable(value) else None for key, value in metrics.items()},
            self.recipe.content(),
        )
        save_checkpoint(self.out / CHECKPOINT, self.module.model, config)

    def _result(self, test: Evaluation, images: int) -> RunResult:
        history = self.module.history
        learner = history.heldout_accuracy_learner
        gap = None if test.accuracy_learner is None else test.accuracy_learner - test.accuracy
        return RunResult(
            name=self.recipe.name,
            accuracy=Accuracy(
                test.accuracy,
                test.accuracy_learner,
                gap,
                history.heldout_accuracy,
                learner or None,
                history.train_accuracy,
                test_images=images,
                heldout_images=len(self.data.heldout),
                classes=len(self.data.input.classes),
            ),
            parameters=_parameters(self.cost),
            madds=_madds(self.cost),
            seconds=Seconds(
                time.perf_counter() - self.started, self.meter.epochs, self.meter.epochs_training
            ),
            peak_memory_bytes=PeakMemory(self.meter.rss, self.meter.cuda),
            seed=self.seed,
            loss={
                "train": _finite(history.train_loss),
                "heldout": _finite(history.heldout_loss),
                "test": _finite([test.loss]),
            },
            environment=environment(self.device),
            command=list(self.options.command or sys.argv),
            recipe=self.recipe.content(),
            recipe_text=self.recipe.text,
            recipe_sha256=self.recipe.sha256,
            data={
                "path": str(self.data_path),
                "train": self.data.train.source,
                "train_images": len(self.data.train),
                "holdout_seed": HOLDOUT_SEED,
                "epochs_run": self.epochs,
                "steps_run": self.epochs * self.epoch_steps,
            },
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _parameters(cost: Cost) -> Parameters:
    return Parameters(cost.params_epitome, cost.params_routing, cost.params_other, cost.params)


def _madds(cost: Cost) -> MAdds:
    return MAdds(cost.madds, cost.madds_paper, cost.madds_interpolation)


def _usable(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)


def _finite(values: list[float]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values]


def _shown(value: float | None) -> str:
    return "not in use" if value is None else f"{value:.4f}"


def _stop_reason(error: BaseException, *, interrupted: bool) -> BaseException:
    """What the caller sees: KeyboardInterrupt after Ctrl-C, exit code 143 after SIGTERM, errors as they are."""
    if isinstance(error, RunStopped):
        return KeyboardInterrupt() if error.signum == signal.SIGINT else SystemExit(128 + error.signum)
    if isinstance(error, SystemExit) and interrupted:  # Lightning's answer to KeyboardInterrupt is exit(1)
        return KeyboardInterrupt()
    return error


def _device(accelerator: str, recipe: Recipe) -> torch.device:
    device = choose_device(accelerator)
    if recipe.training.precision == "fp16" and device.type != "cuda":
        raise InputError(
            explain(
                "fp16 training needs CUDA",
                expected="a CUDA device",
                got=device.type,
                where=recipe.source,
                fix="set training.precision to bf16 or fp32",
            )
        )
    return device


def _claim(out: Path, overwrite: bool) -> Path:
    """Make the folder, and remove what an earlier run left in it, if that was allowed."""
    if out.exists() and not out.is_dir():
        raise InputError(explain("the output is not a folder", expected="a folder", got="a file", where=str(out)))
    if (out / RESULTS).exists() and not overwrite:
        raise InputError(
            explain(
                "this folder has results already",
                expected=f"a folder without {RESULTS}",
                got=str(out / RESULTS),
                fix="choose another folder, or pass --overwrite (overwrite=True)",
            )
        )
    # results.json goes first: no moment shows it beside files of the new run
    for name in (RESULTS, LOG, CHECKPOINT, LOGS, LIGHTNING):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    return out


@contextmanager
def _logged(path: Path) -> Iterator[logging.Logger]:
    """Give a logger that writes to the run's file, and to standard error where that is no terminal."""
    log = logging.Logger(f"epitorch.run.{path.parent.name}", logging.INFO)
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    if not sys.stderr.isatty():  # a terminal has the progress bar
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
    try:
        yield log
    finally:
        for handler in handlers:
            handler.close()


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence Lightning's remarks about hardware and tips; warnings still come."""
    names = ("pytorch_lightning", "lightning.fabric", "lightning_fabric", "pytorch_lightning.utilities.rank_zero")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Hide the warnings of Lightning that do not apply here."""
    with warnings.catch_warnings():
        # There are no worker processes: the images are on the device already.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        # Lightning's use of torch's tree utilities.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated.*", category=FutureWarning)
        # Few steps in a trial run.
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        # The CPU was asked for.
        warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
        # fp16: the scaler skips the first steps, and with them the optimiser.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
        yield
