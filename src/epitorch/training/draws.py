"""Random numbers that depend on the place in training only, so that a run goes on as if it had never stopped."""

from __future__ import annotations

import random

import numpy as np
import torch

_SHARED = 0  # in place of a rank: the same numbers on every rank


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
    low, high, small = np.random.SeedSequence((seed, epoch, batch, part)).generate_state(3).tolist()
    random.seed(low)
    np.random.seed(small)  # noqa: NPY002
    torch.manual_seed(high << 31 ^ low)
