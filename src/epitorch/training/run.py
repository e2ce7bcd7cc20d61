"""One training run from a recipe to `results.json`.

A run's folder holds `results.json`, `checkpoint/` (portable, without pickle), `lightning/last.ckpt` (the state of
training), `run.json` (what a run that goes on with it must have in common), `starts.json` (how the starts moved),
`metrics.csv` and TensorBoard events in `logs/`, and `train.log`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from rich.console import Console

from epitorch.checkpoint import cost_numbers, save_checkpoint
from epitorch.cost import Cost, count
from epitorch.results import RunResult, save_results
from epitorch.training.callbacks import EachEpoch, EpochLog, Meter, ProgressBar, StopOnSignal, latest, stop_reason
from epitorch.training.data_kinds import (
    AnyImages,
    AnyLoader,
    augmentation,
    kind_of,
    load_split,
    make_loader,
    normalization,
)
from epitorch.training.data_workers import StreamLoader
from epitorch.training.distillation import load_teacher
from epitorch.training.evaluation import check_images
from epitorch.training.folder import (
    CHECKPOINT,
    LOG,
    RESULTS,
    STARTS,
    STATE,
    Identity,
    begin,
    claimed,
    clear,
    unfinished,
)
from epitorch.training.loggers import DEFAULT, check_loggers, make_loggers
from epitorch.training.messages import known_warnings, logged, quiet_lightning
from epitorch.training.mixing import make_mix
from epitorch.training.module import EpitomeModule, Evaluation, evaluate
from epitorch.training.options import Options, device_for, run_lengths, within, workers_for
from epitorch.training.outcome import RunFacts, checkpoint_config, run_result
from epitorch.training.processes import find_ranks, group_ended, launched, strategy
from epitorch.training.ranks import ALONE
from epitorch.training.recipe import MAX_SEED, Recipe
from epitorch.training.setup import TrainingData, build, example_image, load_training_data, seeded
from epitorch.training.starting import BuiltModel
from epitorch.training.starts import StartsLog
from epitorch.training.state import AtomicCheckpointIO, StateSaver, reported

_PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


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
    devices: int | None = None,
    nodes: int | None = None,
    loggers: Sequence[str] = DEFAULT,
    checkpoint_steps: int | None = None,
    workers: int | None = None,
) -> RunResult:
    """Train what a recipe says and measure it.

    The held-out training images are evaluated after each epoch; the test images are read once, after the last (large
    images without a split to test on: the held-out ones stand in, and `accuracy.test` is None). After
    Ctrl-C, SIGTERM or an error the folder holds a checkpoint that `epitorch eval` takes, and no `results.json`. Called
    again with the same recipe, seed, data and `max_steps`, an unfinished run goes on where its last saved state was.
    Global random state is left as it was.

    Args:
        recipe: From `load_recipe` or `parse_recipe`.
        data_path: As `load_images` takes it, `digits` for example; with a section `images`, as `load_image_training`.
        out_dir: Folder of the run; made if missing, left alone if recipe, data and options do not go together.
        seed: Of initial weights, order and augmentation; None takes the recipe's.
        accelerator: `auto`, `cpu` or `cuda`.
        max_steps: At most so many optimiser steps, the schedule fitted to them: for trials.
        overwrite: Replace the results, or the unfinished run, in the same folder.
        command: The command line to record; default that of the process.
        callbacks: More Lightning callbacks.
        console: Where the progress bar goes; default standard error.
        devices: Processes on each machine that share every batch; None is one, or as many as `torchrun` started.
        nodes: Machines; likewise.
        loggers: `csv`, `tensorboard`, `wandb`, `mlflow`, `comet`.
        checkpoint_steps: Steps between saved states within an epoch; None is every 10 minutes.
        workers: Processes that read large images, for each process that trains; None chooses by the cores.

    Returns:
        What `results.json` holds; only the first of several processes writes it.

    Raises:
        InputError: If recipe, data and options do not go together, or the folder has results already.
        TrainingError: If the loss is not finite, or the folder cannot be written any more.
        CheckpointError: If the saved state of an unfinished run cannot be read.
        KeyboardInterrupt: After Ctrl-C, once the checkpoint is written.
    """
    out = Path(out_dir)
    options = _options(
        recipe,
        seed,
        accelerator,
        max_steps,
        command,
        callbacks,
        console,
        devices,
        nodes,
        loggers,
        checkpoint_steps,
        workers,
    )
    fold = None if recipe.sound is None else recipe.sound.fold
    identity = Identity(recipe.sha256, options.seed, max_steps, str(data_path), fold)
    if options.ranks.first:
        unfinished(out, identity, overwrite)
    with quiet_lightning(), group_ended(), seeded(options.seed):
        run = _Run(recipe, data_path, out, options)
        if not options.ranks.first:  # decided alike: the first one changes no state before all have joined it
            return run.go(logging.Logger("epitorch.run.other"), resume=not overwrite and (out / STATE).is_file())
        with _folder(out, identity, overwrite) as resume, logged(out / LOG) as log:
            return run.go(log, resume=resume)


def _options(
    recipe: Recipe,
    seed: int | None,
    accelerator: str,
    max_steps: int | None,
    command: Sequence[str] | None,
    callbacks: Sequence[pl.Callback],
    console: Console | None,
    devices: int | None,
    nodes: int | None,
    loggers: Sequence[str],
    checkpoint_steps: int | None,
    workers: int | None,
) -> Options:
    """The arguments of `train`, checked and with their defaults filled in."""
    local, machines = launched(devices, nodes)
    local, machines = within(1, inf, "devices", local), within(1, inf, "nodes", machines)
    device = device_for(accelerator, recipe, ALONE)
    with quiet_lightning():
        ranks = find_ranks("gpu" if device.type == "cuda" else "cpu", local, machines)
    return Options(
        within(0, MAX_SEED, "seed", recipe.training.seed if seed is None else seed),
        device_for(accelerator, recipe, ranks),
        None if max_steps is None else within(1, inf, "max_steps", max_steps),
        sys.argv if command is None else command,
        callbacks,
        console or Console(stderr=True),
        local,
        machines,
        ranks,
        check_loggers(loggers),
        None if checkpoint_steps is None else within(1, inf, "checkpoint_steps", checkpoint_steps),
        workers_for(recipe.images, workers, local, recipe.source),
    )


@contextmanager
def _folder(out: Path, identity: Identity, overwrite: bool) -> Iterator[bool]:
    """Claim the folder, empty it unless the run in it goes on, and say whether it does."""
    with claimed(out):
        # again: another run may have ended there meanwhile
        resume = unfinished(out, identity, overwrite) and (out / STATE).is_file()
        if not resume:
            clear(out)
            begin(out, identity)
        yield resume


class _Run:
    """The parts of one run, made in the order in which they are needed."""

    def __init__(self, recipe: Recipe, data_path: str | Path, out: Path, options: Options) -> None:
        self.recipe, self.data_path, self.out, self.options = recipe, data_path, out, options
        self.log = logging.Logger("epitorch.run")
        self.data: TrainingData = load_training_data(recipe, data_path)
        self.built: BuiltModel = build(recipe, self.data.input)
        self.cost: Cost = count(self.built.model, example_image(self.data.input))
        self.meter, self.stop = Meter(), StopOnSignal()
        self.saver = StateSaver(out / STATE, options.checkpoint_steps)
        self.train_loader = self._loader(self.data.train, shuffle=True)
        training = recipe.training
        self.epochs, self.epoch_steps = run_lengths(
            training.epochs, len(self.train_loader), training.accumulate, options.max_steps
        )
        self.module = self._module()

    def go(self, log: logging.Logger, *, resume: bool) -> RunResult:
        """Train, then evaluate and write everything."""
        self.log = log
        recipe = self.recipe
        for note in self.data.notes:
            self._say(note)
        if resume:
            self._say(f"goes on with the unfinished run in {self.out}; --overwrite would begin anew")
            if isinstance(self.train_loader, StreamLoader):
                self._say(StreamLoader.RESUMES)
        log.info("recipe %s (sha256 %s), seed %d", recipe.name, recipe.sha256, self.options.seed)
        log.info("data %s, %d epochs of %d steps", self.data.train.source, self.epochs, self.epoch_steps)
        if recipe.model.checkpoint is not None:
            log.info("starts from %s; drawn: %s", recipe.model.checkpoint, ", ".join(self.built.fresh) or "nothing")
        log.info("%s parameters, %s MAdds before training", f"{self.cost.params:,}", f"{self.cost.madds:,}")
        self._fit(resume)
        test, images = self._evaluate_test()
        # again, with the trained starts: whole ones need no interpolation
        self.cost = count(self.module.kept.cpu(), example_image(self.data.input))
        seconds = time.perf_counter() - self.meter.began
        result = run_result(self._facts(), self.cost, self.meter, seconds, self.module.history, test, images)
        if self.options.ranks.first:
            with reported(self.out / CHECKPOINT, self.saver.step or 0, self.saver.step):
                self._save(test)
                save_results(self.out / RESULTS, result)
        if test is None:
            log.info("no test; held-out accuracy %s", _shown(latest(self.module).get("heldout_accuracy")))
        else:
            log.info("test accuracy %.4f, with the learner %s", test.accuracy, _shown(test.accuracy_learner))
        return result

    def _say(self, words: str) -> None:
        self.log.info("%s", words)
        if self.options.console.is_terminal:  # elsewhere the log goes to standard error
            self.options.console.print(words)

    # ---- training ----

    def _loader(self, images: AnyImages, *, shuffle: bool) -> AnyLoader:
        return make_loader(
            images,
            self.recipe.training.batch_size,
            self.options.device,
            shuffle=shuffle,
            seed=self.options.seed,
            ranks=self.options.ranks,
            workers=self.options.workers,
        )

    def _module(self) -> EpitomeModule:
        epitome, training = self.recipe.epitome, self.recipe.training
        seen, ranks = self.data.input, self.options.ranks
        return EpitomeModule(
            self.built.model,
            training,
            augment=augmentation(self.recipe),
            normalize=normalization(seen),
            steps=self.epochs * self.epoch_steps,
            epochs=self.epochs,
            freeze_last_epochs=min(epitome.freeze_last_epochs, self.epochs) if epitome else 0,
            snap=epitome.snap if epitome else False,
            teacher=load_teacher(training.teacher, seen) if training.teacher else None,
            mix=make_mix(training, len(seen.classes), training.batch_size // ranks.world),
            seed=self.options.seed,
            ranks=ranks,
        )

    def _callbacks(self) -> list[pl.Callback]:
        written: list[pl.Callback] = [
            ProgressBar(self.recipe.name, self.options.console),
            EpochLog(self.log, self.meter),
            StartsLog(self.out / STARTS),
            EachEpoch(self._save),
        ]
        shown = written if self.options.ranks.first else []
        return [self.meter, *shown, self.saver, *self.options.callbacks, self.stop]

    def _trainer(self, resume: bool) -> pl.Trainer:
        training, options = self.recipe.training, self.options
        freezes = self.module.freeze_epoch is not None
        return pl.Trainer(
            accelerator="gpu" if options.device.type == "cuda" else "cpu",
            devices=options.devices,
            num_nodes=options.nodes,
            strategy=strategy(options.ranks, some_unused=freezes),
            precision=_PRECISION[training.precision],
            sync_batchnorm=training.sync_batchnorm and options.ranks.world > 1,
            max_epochs=self.epochs,
            limit_train_batches=self.epoch_steps * training.accumulate,
            accumulate_grad_batches=training.accumulate,
            gradient_clip_val=training.clip_norm,
            logger=make_loggers(options.loggers, self.out, self.recipe.name, resume=resume)
            if options.ranks.first
            else False,
            callbacks=self._callbacks(),
            plugins=[AtomicCheckpointIO()],
            use_distributed_sampler=False,  # the loader gives each process its part
            default_root_dir=self.out,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def _fit(self, resume: bool) -> None:
        heldout = self._loader(self.data.heldout, shuffle=False)
        state = self.out / STATE if resume else None
        with self.stop.listening(), known_warnings():
            trainer = self._trainer(resume)
            try:
                trainer.fit(self.module, self.train_loader, heldout, ckpt_path=state)
                self.stop.check()  # a signal after the last step
            except BaseException as error:
                self.stop.saving = True  # an impatient second Ctrl-C must not cost the checkpoint
                if self.options.ranks.first:
                    self._save_stopped(error, trainer.global_step)
                reason = stop_reason(error, self.stop.received, interrupted=trainer.interrupted)
                if reason is error:
                    raise
                raise reason from None

    def _save_stopped(self, error: BaseException, step: int) -> None:
        self.log.error("stopped at step %d: %s", step, f"{type(error).__name__}: {error}")
        if not all(torch.isfinite(value).all() for value in self.module.kept.state_dict().values()):
            self.log.error("the weights are not finite any more: no checkpoint of this moment")
        elif step > 0 or not isinstance(error, Exception):
            try:
                self._save(stopped_at=step)
            except OSError as second:
                self.log.error("no checkpoint of this moment: %s", second)
            else:
                self.log.info("checkpoint written to %s", self.out / CHECKPOINT)
        if self.saver.step is not None:
            self.log.info("the same command goes on from the state of step %d", self.saver.step)

    # ---- measuring ----

    def _evaluate_test(self) -> tuple[Evaluation | None, int]:
        if not self.data.tested:
            return None, 0
        images = load_split(self.data_path, "test", kind_of(self.recipe))
        check_images(images, self.data.input)
        device = self.options.device
        test = evaluate(
            self.module.kept.to(device),
            self._loader(images, shuffle=False),
            self.module.normalize.to(device),
            channels_last=self.recipe.training.channels_last,
            ranks=self.options.ranks,
        )
        self.meter.look(device)
        return test, len(images)

    def _save(self, test: Evaluation | None = None, stopped_at: int | None = None) -> None:
        metrics: dict[str, Any] = {"seed": self.options.seed, **latest(self.module)}
        if test is not None:
            metrics.update(test_accuracy=test.accuracy, test_accuracy_learner=test.accuracy_learner)
        if stopped_at is not None:
            metrics["stopped_at_step"] = stopped_at
        config = checkpoint_config(self.recipe, self.built, self.data, metrics)
        save_checkpoint(self.out / CHECKPOINT, self.module.kept, replace(config, cost=cost_numbers(self.cost)))

    def _facts(self) -> RunFacts:
        options, epochs = self.options, self.epochs
        return RunFacts(
            self.recipe,
            self.data,
            str(self.data_path),
            options.seed,
            epochs,
            epochs * self.epoch_steps,
            options.device,
            options.ranks.world,
            options.workers,
            options.command,
        )


def _shown(value: float | None) -> str:
    return "not in use" if value is None else f"{value:.4f}"
