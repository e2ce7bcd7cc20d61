"""Initial starts, and the epitome's initial scale."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt

import torch
from torch import Tensor

from epitorch.functional import by_pair, split_starts
from epitorch.spec import Axis, EpitomeSpec


def evenly_spread(
    spec: EpitomeSpec,
    *,
    within_reach: bool = False,
    whole: bool = False,
    device: torch.device | str | None = None,
) -> dict[Axis, Tensor]:
    """Starts `(r + 1/2) * size / R`, not all equal.

    With one start per pair of blocks the pairs are numbered row by row for the filters and column by column for the
    input channels, so that the two shifts of a pair are not tied to each other.

    Args:
        spec: The shapes.
        within_reach: Spread over what a learner with a group length can reach, `[0, size - g]`, instead of the circle.
        whole: Round them down to whole positions, to multiples of the group length where there is one. Blocks that
            outnumber the positions of their axis then share some. Pairs of blocks that outnumber those of an axis are
            dealt out over both axes, no two alike: rounded down, each axis would follow one block number only, and
            the weight would lose rank.
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
        if whole:  # in whole numbers: a product a rounding below 3.0 must not become 2
            steps = [(2 * order + 1) * size // (2 * prod(blocks) * group) for size in sizes]
            columns = [step * group for step in steps]
        starts[axis] = torch.stack(columns, -1) if axis == "spatial" else columns[0].contiguous()
    if whole and spec.channel_starts == "grid" and {"out", "in"} <= set(starts):
        starts |= _dealt_out(spec, device)
    return starts


def _dealt_out(spec: EpitomeSpec, device: torch.device | str | None) -> dict[Axis, Tensor]:
    """Whole starts of pairs of blocks in an order without rule, if they outnumber the positions of an axis."""
    pairs = spec.num_out_blocks * spec.num_in_blocks
    rows, columns = (spec.epitome_shape[dim] // spec.group_length for dim in (0, 1))
    if pairs <= min(rows, columns):
        return {}
    cells = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0))
    cells = cells[torch.arange(pairs) % len(cells)].view(spec.num_out_blocks, spec.num_in_blocks)
    places: dict[Axis, Tensor] = {"out": cells // columns, "in": cells % columns}
    return {axis: (place * spec.group_length).to(device, torch.float32) for axis, place in places.items()}


def interpolation_gain(starts: Mapping[Axis, Tensor], spec: EpitomeSpec) -> float:
    """Standard deviation of a generated weight over that of its epitome, for independent epitome elements.

    Averaging two neighbours with fractions 1-f and f multiplies the variance by (1-f)^2 + f^2 on each axis. The
    product is taken in every pair of blocks before the mean, since the fractions of two axes need not be independent,
    and a block that is cut counts with what is left of it.
    """
    variance = torch.ones(spec.num_out_blocks, spec.num_in_blocks, dtype=torch.float64)
    for axis, value in starts.items():
        grid = axis != "spatial" and spec.channel_starts == "grid"
        owners = "grid" if grid else spec.spatial_starts if axis == "spatial" else axis
        columns = value.unbind(-1) if axis == "spatial" else (value,)
        for column, size in zip(columns, spec.start_sizes[axis], strict=True):
            if spec.group(axis) == size:
                continue  # both neighbours are the same element
            fraction = split_starts(column.detach().double().cpu(), size, spec.group(axis)).fraction
            variance = variance * by_pair((1 - fraction) ** 2 + fraction**2, owners)
    rows = _block_lengths(spec.weight_shape[0], spec.block_out)
    columns_in = _block_lengths(spec.weight_shape[1], spec.block_in)
    return sqrt(float(rows @ variance @ columns_in) / (spec.weight_shape[0] * spec.weight_shape[1]))


def _block_lengths(total: int, block: int) -> Tensor:
    """How many positions of an axis each block fills; the last may be cut."""
    return torch.tensor([min(block, total - first) for first in range(0, total, block)], dtype=torch.float64)
