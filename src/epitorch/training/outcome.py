"""From what a run measured to `results.json` and the checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import torch

from epitorch.checkpoint import CheckpointConfig
from epitorch.cost import Cost
from epitorch.results import Accuracy, MAdds, Parameters, PeakMemory, RunResult, Seconds
from epitorch.training.callbacks import Meter
from epitorch.training.data_images import HOLDOUT_SEED
from epitorch.training.measuring import Evaluation, History
from epitorch.training.recipe import Recipe
from epitorch.training.setup import TrainingData, environment
from epitorch.training.starting import BuiltModel


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run beside its numbers.

    Args:
        recipe: What was trained.
        data: Training and held-out images.
        path: Where they were read from.
        seed: Of the run.
        epochs: That were run.
        steps: Optimiser steps that were run.
        device: Where.
        processes: How many trained together.
        workers: That read images for each of them.
        command: The command line.
    """

    recipe: Recipe
    data: TrainingData
    path: str
    seed: int
    epochs: int
    steps: int
    device: torch.device
    processes: int
    workers: int
    command: Sequence[str]


def run_result(
    facts: RunFacts, cost: Cost, meter: Meter, seconds: float, history: History, test: Evaluation | None, images: int
) -> RunResult:
    """Return what `results.json` holds; without a test, no number stands in its place."""
    learner = history.heldout_accuracy_learner
    recipe = facts.recipe
    with_learner = None if test is None else test.accuracy_learner
    gap = None if test is None or with_learner is None else with_learner - test.accuracy
    untested = {} if facts.data.tested else {"test": "no split to test on: the held-out images stand in"}
    return RunResult(
        name=recipe.name,
        accuracy=Accuracy(
            None if test is None else test.accuracy,
            with_learner,
            gap,
            history.heldout_accuracy,
            learner or None,
            history.train_accuracy,
            test_images=images,
            heldout_images=len(facts.data.heldout),
            classes=len(facts.data.input.classes),
        ),
        parameters=Parameters(cost.params_epitome, cost.params_routing, cost.params_other, cost.params),
        madds=MAdds(cost.madds, cost.madds_paper, cost.madds_interpolation),
        seconds=Seconds(seconds, meter.epochs, meter.epochs_training),
        peak_memory_bytes=PeakMemory(meter.rss, meter.cuda),
        seed=facts.seed,
        loss={
            "train": _finite(history.train_loss),
            "heldout": _finite(history.heldout_loss),
            "test": [] if test is None else _finite([test.loss]),
        },
        environment={**environment(facts.device), "processes": facts.processes, "workers": facts.workers},
        command=list(facts.command),
        recipe=recipe.content(),
        recipe_text=recipe.text,
        recipe_sha256=recipe.sha256,
        data={
            "path": facts.path,
            "train": facts.data.train.source,
            "train_images": len(facts.data.train),
            "holdout_seed": HOLDOUT_SEED,
            "epochs_run": facts.epochs,
            "steps_run": facts.steps,
            **untested,
        },
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def checkpoint_config(
    recipe: Recipe, built: BuiltModel, data: TrainingData, metrics: dict[str, Any]
) -> CheckpointConfig:
    """Return the configuration of the run's checkpoint; numbers that are not finite become null."""
    return CheckpointConfig(
        recipe.model.name,
        recipe.model.arguments,
        built.plan,
        data.input,
        recipe.training.batch_size,
        {key: value if _usable(value) else None for key, value in metrics.items()},
        recipe.content(),
    )


def _usable(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)


def _finite(values: list[float]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values]
