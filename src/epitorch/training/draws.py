"""Random numbers that depend on the place in training only, so that a run goes on as if it had never stopped."""

from __future__ import annotations

import random

import numpy as np
import torch

_SHARED = 0  # in place of a rank: the same numbers on every rank
_IMAGE = 2**32 - 1  # in place of a rank: no process has this number


def seed_batch(seed: int, epoch: int, batch: int, rank: int | None = None) -> None:
    """Seed Python, NumPy and torch (all devices) for one training batch.

    No state has to be saved: whatever else has drawn numbers before, the batch gets the same ones.

    Args:
        seed: Of the run.
        epoch: From 0.
        batch: Of the epoch, from 0.
        rank: Of the process; None gives the same numbers on every rank.
    """
    part = _SHARED if rank is None else rank + 1
    torch.manual_seed(_seed_others(seed, epoch, batch, part))


def seed_image(seed: int, epoch: int, number: int) -> None:
    """Seed Python, NumPy and torch (the CPU alone) for the augmentation of one image.

    It depends neither on the process nor on the batch that the image comes in.

    Args:
        seed: Of the run.
        epoch: From 0.
        number: Of the image in its set, from 0.
    """
    torch.default_generator.manual_seed(_seed_others(seed, epoch, number, _IMAGE))


def _seed_others(*place: int) -> int:
    """Seed Python and NumPy, and return a seed for torch."""
    low, high, small = np.random.SeedSequence(place).generate_state(3).tolist()
    random.seed(low)
    np.random.seed(small)  # noqa: NPY002
    return high << 31 ^ low
