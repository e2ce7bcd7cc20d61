"""Initial starts, and the epitome's initial scale."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt

import torch
from torch import Tensor

from epitorch.functional import split_starts
from epitorch.spec import Axis, EpitomeSpec


def evenly_spread(
    spec: EpitomeSpec, *, within_reach: bool = False, device: torch.device | str | None = None
) -> dict[Axis, Tensor]:
    """Starts `(r + 1/2) * size / R`, never all equal.

    With one start per pair of blocks the pairs are numbered row by row for the filters and column by column for the
    input channels, so that the two shifts of a pair are not tied to each other.

    Args:
        spec: The shapes.
        within_reach: Spread over what a learner with a group length can reach, `[0, size - g]`, instead of the circle.
        device: Where to make them.

    Returns:
        float32 tensors of `spec.start_shapes`.
    """
    starts: dict[Axis, Tensor] = {}
    for axis, shape in spec.start_shapes.items():
        blocks = shape[:-1] if axis == "spatial" else shape
        order = torch.arange(prod(blocks), device=device, dtype=torch.float32).reshape(blocks)
        if axis == "in" and len(blocks) == 2:
            order = order.reshape(-1).reshape(blocks[1], blocks[0]).t()
        even = (order + 0.5) / prod(blocks)
        group = spec.group(axis)
        sizes = [size - group if within_reach and group > 1 else size for size in spec.start_sizes[axis]]
        columns = [even * size for size in sizes]
        starts[axis] = torch.stack(columns, -1) if axis == "spatial" else columns[0].contiguous()
    return starts


def interpolation_gain(starts: Mapping[Axis, Tensor], spec: EpitomeSpec) -> float:
    """Standard deviation of a generated weight over that of its epitome, for independent epitome elements.

    Averaging two neighbours with fractions 1-f and f multiplies the variance by (1-f)^2 + f^2 on each axis.
    """
    variance = 1.0
    for axis, value in starts.items():
        columns = value.unbind(-1) if axis == "spatial" else (value,)
        for column, size in zip(columns, spec.start_sizes[axis], strict=True):
            fraction = split_starts(column.double(), size, spec.group(axis)).fraction
            variance *= float(((1 - fraction) ** 2 + fraction**2).mean())
    return sqrt(variance)
