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
            shuffled: rounded down, each axis would follow one block number only, and the weight would lose rank. No
            two blocks of filters then meet the input channels in the same way as long as there are different ways,
            nor two blocks of input channels the filters.
        device: Where to make them.

    Returns:
        float32 tensors of `spec.start_shapes`.
    """
    device = torch.get_default_device() if device is None else device
    starts: dict[Axis, Tensor] = {}
    for axis, shape in spec.start_shapes.items():
        blocks = shape[:-1] if axis == "spatial" else shape
        order = torch.arange(prod(blocks), device=device, dtype=torch.int64).reshape(blocks)
        if axis == "in" and len(blocks) == 2:
            order = order.reshape(-1).reshape(blocks[1], blocks[0]).t()
        group = spec.group(axis)
        columns: list[Tensor] = []
        for size in spec.start_sizes[axis]:
            if whole:  # in whole numbers: a product a rounding below 3.0 must not become 2
                span = size - size % group if within_reach else size
                columns.append((2 * order + 1) * span // (2 * prod(blocks) * group) * group)
            else:
                span = size - group if within_reach and group > 1 else size
                columns.append((order.float() + 0.5) / prod(blocks) * span)
        starts[axis] = torch.stack(columns, -1) if axis == "spatial" else columns[0].contiguous()
    if whole and spec.channel_starts == "grid":
        starts |= _shuffled_pairs(spec, within_reach, device)
    return {axis: value.to(torch.float32) for axis, value in starts.items()}


def _shuffled_pairs(spec: EpitomeSpec, within_reach: bool, device: torch.device | str) -> dict[Axis, Tensor]:
    """Whole starts on the channel axes of pairs of blocks, if they outnumber the positions of an axis that has starts.

    Filters shift differently from one block of input channels to the next, input channels from one block of filters to
    the next: those are what tells two columns, or two rows, of blocks apart.
    """
    group = spec.group_length
    count: dict[Axis, int] = {"out": 1, "in": 1}
    for axis in count:
        if axis in spec.start_sizes:
            size = spec.start_sizes[axis][0]
            count[axis] = size // group if within_reach else -(-size // group)
    blocks = (spec.num_out_blocks, spec.num_in_blocks)
    if prod(blocks) <= min([count[axis] for axis in count if axis in spec.start_sizes], default=prod(blocks)):
        return {}
    generator = torch.Generator().manual_seed(0)
    out = _different_rows(*blocks[::-1], count["out"], count["in"], generator).t()
    in_ = _different_rows(*blocks, count["in"], count["out"], generator)
    shuffled: dict[Axis, Tensor] = {"out": out, "in": in_}
    return {axis: (shuffled[axis] * group).contiguous().to(device) for axis in count if axis in spec.start_sizes}


def _different_rows(rows: int, columns: int, count: int, across: int, generator: torch.Generator) -> Tensor:
    """Places 0 to count - 1, shape (rows, columns): no two rows alike where `rows <= count^columns`.

    Row r with the digits d_k to the base `count` has, in column c, the place `sum_k d_k * binomial(c, k)` modulo
    `count`: binomials are a triangle of ones on the diagonal, so that all digits can be told from the first columns.
    A column takes all places before it takes one again. Each is turned by a number of its own, and the places are
    renamed, both shuffled. Of columns that the other axis, with `across` places, cannot tell apart each is turned by
    one more than the one before.
    """
    names = torch.randperm(count, generator=generator, device="cpu")
    rounds = [torch.randperm(count, generator=generator, device="cpu") for _ in range(-(-columns // count))]
    column = torch.arange(columns, device="cpu")
    told = min(across**rows, columns)
    places = (torch.cat(rounds)[column % told] + column // told).expand(rows, columns)
    left = torch.arange(rows, device="cpu").unsqueeze(1)
    binomial = torch.ones(columns, dtype=torch.int64, device="cpu")
    while count > 1 and left.any() and binomial.any():
        places = places + left % count * binomial
        left = left // count
        binomial = (binomial.cumsum(0) - binomial) % count  # of c over k + 1: the sum of those above it
    return names[places % count]


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
