"""One training run from a recipe to `results.json`.

A run's folder holds `results.json`, `checkpoint/` (portable, without pickle), `lightning/last.ckpt` (optimiser and
schedule too), `metrics.csv` and TensorBoard events in `logs/`, and `train.log`.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf, isfinite
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
from epitorch.training.data import ArrayLoader
from epitorch.training.data_kinds import augmentation, load_split, normalization
from epitorch.training.devices import choose_device
from epitorch.training.distillation import load_teacher
from epitorch.training.evaluation import check_images
from epitorch.training.folder import CHECKPOINT, LIGHTNING, LOG, LOGS, RESULTS, claimed, clear, refuse_used
from epitorch.training.messages import known_warnings, logged, quiet_lightning
from epitorch.training.module import EpitomeModule, Evaluation, evaluate
from epitorch.training.recipe import MAX_SEED, Recipe
from epitorch.training.setup import (
    HOLDOUT_SEED,
    TrainingData,
    build,
    environment,
    example_image,
    load_training_data,
    seeded,
)
from epitorch.training.starting import BuiltModel

_PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(frozen=True)
class _Options:
    """How a recipe is run, apart from what it says: see `train`."""

    seed: int
    device: torch.device
    max_steps: int | None
    command: Sequence[str]
    callbacks: Sequence[pl.Callback]
    console: Console


def train(
    recipe: Recipe,
    data_path: str | Path,
    out_dir: str | Path,
    *,
    seed: int | None = None,
    accelerator: str = "auto",
    max_steps: int | None = None,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
    callbacks: Sequence[pl.Callback] = (),
    console: Console | None = None,
) -> RunResult:
    """Train what a recipe says and measure it.

    The held-out training images are evaluated after each epoch; the test images are read once, after the last. After
    Ctrl-C, SIGTERM or an error the folder holds a checkpoint that `epitorch eval` takes, and no `results.json`.
    Global random state is left as it was.

    Args:
        recipe: From `load_recipe` or `parse_recipe`.
        data_path: As `load_images` takes it, `digits` for example.
        out_dir: Folder of the run; made if missing, left alone if recipe, data and options do not go together.
        seed: Of initial weights, order and augmentation; None takes the recipe's.
        accelerator: `auto`, `cpu` or `cuda`.
        max_steps: At most so many optimiser steps, the schedule fitted to them: for trials.
        overwrite: Replace the results of an earlier run in the same folder.
        command: The command line to record; default that of the process.
        callbacks: More Lightning callbacks.
        console: Where the progress bar goes; default standard error.

    Returns:
        What `results.json` holds.

    Raises:
        InputError: If recipe, data and options do not go together, or the folder has results already.
        TrainingError: If the loss is not finite.
        KeyboardInterrupt: After Ctrl-C, once the checkpoint is written.
    """
    out = Path(out_dir)
    refuse_used(out, overwrite)
    options = _Options(
        _within(0, MAX_SEED, "seed", recipe.training.seed if seed is None else seed),
        _device(accelerator, recipe),
        None if max_steps is None else _within(1, inf, "max_steps", max_steps),
        sys.argv if command is None else command,
        callbacks,
        console or Console(stderr=True),
    )
    with quiet_lightning(), seeded(options.seed):
        run = _Run(recipe, data_path, out, options)
        with claimed(out):
            refuse_used(out, overwrite)  # again: another run may have ended there meanwhile
            clear(out)
            with logged(out / LOG) as log:
                return run.go(log)


class _Run:
    """The parts of one run, made in the order in which they are needed."""

    def __init__(self, recipe: Recipe, data_path: str | Path, out: Path, options: _Options) -> None:
        self.recipe, self.data_path, self.out, self.options = recipe, data_path, out, options
        self.log = logging.Logger("epitorch.run")
        self.started = time.perf_counter()
        self.data: TrainingData = load_training_data(recipe, data_path)
        self.built: BuiltModel = build(recipe, self.data.input)
        self.cost: Cost = count(self.built.model, example_image(self.data.input))
        self.meter, self.stop = Meter(), StopOnSignal()
        self.train_loader = self._loader(self.data.train, shuffle=True)
        self.epochs, self.epoch_steps = _lengths(recipe.training.epochs, len(self.train_loader), options.max_steps)
        self.module = self._module()

    def go(self, log: logging.Logger) -> RunResult:
        """Train, then evaluate and write everything."""
        self.log = log
        recipe = self.recipe
        log.info("recipe %s (sha256 %s), seed %d", recipe.name, recipe.sha256, self.options.seed)
        log.info("data %s, %d epochs of %d steps", self.data.train.source, self.epochs, self.epoch_steps)
        if recipe.model.checkpoint is not None:
            log.info("starts from %s; drawn: %s", recipe.model.checkpoint, ", ".join(self.built.fresh) or "nothing")
        log.info("%s parameters, %s MAdds before training", f"{self.cost.params:,}", f"{self.cost.madds:,}")
        self._fit()
        test, images = self._evaluate_test()
        # again, with the trained starts: whole ones need no interpolation
        self.cost = count(self.module.model.cpu(), example_image(self.data.input))
        result = self._result(test, images)
        self._save(test)
        save_results(self.out / RESULTS, result)
        log.info("test accuracy %.4f, with the learner %s", test.accuracy, _shown(test.accuracy_learner))
        return result

    # ---- training ----

    def _loader(self, arrays: Any, *, shuffle: bool) -> ArrayLoader:
        return ArrayLoader(
            arrays.to(self.options.device),
            self.recipe.training.batch_size,
            shuffle=shuffle,
            seed=self.options.seed,
            drop_last=shuffle,  # a rest of a few images would give batch norm a poor estimate
        )

    def _module(self) -> EpitomeModule:
        epitome = self.recipe.epitome
        return EpitomeModule(
            self.built.model,
            self.recipe.training,
            augment=augmentation(self.recipe),
            normalize=normalization(self.data.input),
            steps=self.epochs * self.epoch_steps,
            epochs=self.epochs,
            freeze_last_epochs=min(epitome.freeze_last_epochs, self.epochs) if epitome else 0,
            snap=epitome.snap if epitome else False,
            teacher=load_teacher(teacher, self.data.input) if (teacher := self.recipe.training.teacher) else None,
        )

    def _trainer(self) -> pl.Trainer:
        loggers = [CSVLogger(self.out, name=LOGS, version=""), TensorBoardLogger(self.out, name=LOGS, version="")]
        keep = ModelCheckpoint(self.out / LIGHTNING, filename="last", enable_version_counter=False)
        callbacks = [
            self.meter,
            ProgressBar(self.recipe.name, self.options.console),
            EpochLog(self.log, self.meter),
            EachEpoch(self._save),
            keep,
            *self.options.callbacks,
            self.stop,
        ]
        return pl.Trainer(
            accelerator="gpu" if self.options.device.type == "cuda" else "cpu",
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
        with self.stop.listening(), known_warnings():
            try:
                trainer.fit(self.module, self.train_loader, heldout)
                self.stop.check()  # a signal after the last step
            except BaseException as error:
                self.stop.saving = True  # an impatient second Ctrl-C must not cost the checkpoint
                self._save_stopped(error, trainer.global_step)
                reason = _stop_reason(error, self.stop.received, interrupted=trainer.interrupted)
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
        arrays = load_split(self.data_path, "test", self.recipe.sound)
        check_images(arrays, self.data.input)
        model, normalize = self.module.model.to(self.options.device), self.module.normalize.to(self.options.device)
        channels_last = self.recipe.training.channels_last
        loader = self._loader(arrays, shuffle=False)
        test = evaluate(model, loader, normalize, channels_last=channels_last)
        self.meter.look(self.options.device)
        return test, len(arrays)

    def _save(self, test: Evaluation | None = None, stopped_at: int | None = None) -> None:
        metrics: dict[str, Any] = {"seed": self.options.seed, **latest(self.module)}
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
            seconds=Seconds(time.perf_counter() - self.started, self.meter.epochs, self.meter.epochs_training),
            peak_memory_bytes=PeakMemory(self.meter.rss, self.meter.cuda),
            seed=self.options.seed,
            loss={
                "train": _finite(history.train_loss),
                "heldout": _finite(history.heldout_loss),
                "test": _finite([test.loss]),
            },
            environment=environment(self.options.device),
            command=list(self.options.command),
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


def _stop_reason(error: BaseException, received: int | None, *, interrupted: bool) -> BaseException:
    """What the caller sees: KeyboardInterrupt after Ctrl-C, exit code 143 after SIGTERM, errors as they are."""
    # Lightning answers KeyboardInterrupt by exit(1) and may meet SIGTERM with an exit of its own.
    if not isinstance(error, RunStopped) and not (isinstance(error, SystemExit) and interrupted):
        return error
    return SystemExit(128 + received) if received not in (None, signal.SIGINT) else KeyboardInterrupt()


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


def _within(low: int, high: float, name: str, value: int) -> int:
    if not low <= value <= high:
        end = "" if high == inf else f" to {high}"
        raise InputError(explain(f"{name} is not valid", expected=f"a whole number from {low}{end}", got=value))
    return value


def _lengths(epochs: int, batches: int, max_steps: int | None) -> tuple[int, int]:
    """Epochs and steps per epoch; whole epochs, so that each ends with the held-out images."""
    if max_steps is None:
        return epochs, batches
    steps = min(batches, max_steps)
    return min(epochs, max_steps // steps), steps
