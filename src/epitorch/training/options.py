"""How a recipe is run, apart from what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import pytorch_lightning as pl
import torch
from rich.console import Console

from epitorch.errors import InputError, explain
from epitorch.training.data_workers import default_workers
from epitorch.training.devices import choose_device
from epitorch.training.ranks import Ranks
from epitorch.training.recipe import Recipe
from epitorch.training.recipe_images import ImagesSection


@dataclass(frozen=True)
class Options:
    """See `train`."""

    seed: int
    device: torch.device
    max_steps: int | None
    command: Sequence[str]
    callbacks: Sequence[pl.Callback]
    console: Console
    devices: int
    nodes: int
    ranks: Ranks
    loggers: Sequence[str]
    checkpoint_steps: int | None
    workers: int


def device_for(accelerator: str, recipe: Recipe, ranks: Ranks) -> torch.device:
    """Return the device of this process.

    Raises:
        InputError: If there is no such device, or it does not do what the recipe asks for.
    """
    device = choose_device(accelerator)
    if device.type == "cuda":
        return torch.device("cuda", ranks.local)
    for asked, what in (
        (recipe.training.precision == "fp16", "fp16 training"),
        (recipe.training.sync_batchnorm, "sync_batchnorm"),
    ):
        if asked:
            raise InputError(
                explain(
                    f"{what} needs CUDA",
                    expected="a CUDA device",
                    got=device.type,
                    where=recipe.source,
                    fix="set training.precision to bf16 or fp32, and sync_batchnorm to false",
                )
            )
    return device


def workers_for(images: ImagesSection | None, workers: int | None, processes: int, where: str) -> int:
    """Return how many worker processes read for each of `processes` on this machine.

    Raises:
        InputError: If the number is not valid, or nothing would be read by them.
    """
    if images is None:
        if workers is None:
            return 0
        raise InputError(
            explain(
                "there is nothing for workers to do",
                expected="workers with recipes that have a section 'images'",
                got=workers,
                where=where,
                fix="leave out --workers: these data lie in memory",
            )
        )
    return default_workers(processes) if workers is None else within(0, inf, "workers", workers)


def within(low: int, high: float, name: str, value: int) -> int:
    """Return a whole number of a range.

    Raises:
        InputError: If it is out of it.
    """
    if not low <= value <= high:
        end = "" if high == inf else f" to {high}"
        raise InputError(explain(f"{name} is not valid", expected=f"a whole number from {low}{end}", got=value))
    return value


def run_lengths(epochs: int, batches: int, accumulate: int, max_steps: int | None) -> tuple[int, int]:
    """Return epochs, and optimiser steps per epoch: whole ones, so that each epoch ends with the held-out images.

    Raises:
        InputError: If an epoch has too few batches for one step.
    """
    steps = batches // accumulate
    if not steps:
        raise InputError(
            explain(
                "training.accumulate is too large",
                expected=f"at most the {batches} batches of an epoch",
                got=accumulate,
                fix="lower training.accumulate or training.batch_size",
            )
        )
    if max_steps is None:
        return epochs, steps
    steps = min(steps, max_steps)
    return min(epochs, max_steps // steps), steps
