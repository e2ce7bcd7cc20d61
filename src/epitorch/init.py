"""Initial starts, and the epitome's initial scale."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd, pi, prod, sqrt

import torch
from torch import Tensor

from epitorch.functional import by_pair, split_starts
from epitorch.spec import Axis, EpitomeSpec

_FEW_PLACES = 64  # up to which draws of turns are compared; with more, draws hardly lose rank


def evenly_spread(
    spec: EpitomeSpec,
    *,
    within_reach: bool = False,
    whole: bool = False,
    device: torch.device | str | None = None,
) -> dict[Axis, Tensor]:
    """Starts `(r + 1/2) * size / R`, not all equal.

    With one start per pair of blocks the pairs are numbered row by row for the filters and column by column for the
    input channels, so that the two shifts of a pair are not tied to each other. With pairs on one channel axis only,
    starts are turned against those of the first block of the other axis instead (`_turned_pairs`).

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
        if spec.channel_starts == f"grid_{axis}" and min(blocks) > 1:
            starts[axis] = _turned_pairs(spec, axis, within_reach, whole, device)
            continue
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


def first_starts(
    spec: EpitomeSpec, *, learned: bool, by_learner: bool = False, device: torch.device | str | None = None
) -> dict[Axis, Tensor]:
    """Where the starts of a fresh layer begin: evenly spread over whole positions.

    Between two positions every filter is a mean of two, and learned starts hardly leave where they began. For the same
    reason learned ones may not begin alike: where blocks, or pairs of blocks, outnumber the whole places that tell them
    apart they begin between positions. Whole ones of an index learner begin a quarter of a position (of a group) off
    the ends of what it reaches: its sigmoid is flat there, and they would never move.

    Args:
        spec: The shapes.
        learned: They will move.
        by_learner: They are what an index learner returns.
        device: Where to make them.

    Returns:
        float32 tensors of `spec.start_shapes`.
    """
    starts = evenly_spread(spec, within_reach=by_learner, whole=True, device=device)
    if by_learner:
        starts = _off_the_ends(spec, starts)
    if learned and (crowded := [axis for axis in starts if _crowded(spec, axis)]):
        between = evenly_spread(spec, within_reach=by_learner, device=device)
        starts |= {axis: between[axis] for axis in crowded}
    return starts


def _crowded(spec: EpitomeSpec, axis: Axis) -> bool:
    """There are fewer whole places than what has to be told apart by them."""
    places = max(spec.start_sizes[axis]) // spec.group(axis)
    if places == 1:  # nothing to choose
        return False
    if axis == "spatial":
        return prod(spec.start_shapes[axis][:-1]) > places
    if spec.owners(axis) == axis:
        return spec.start_shapes[axis][0] > places
    blocks = (spec.num_out_blocks, spec.num_in_blocks)
    return any(own > _ways(spec, other) for own, other in (blocks, blocks[::-1]))


def _ways(spec: EpitomeSpec, other: int) -> int:
    """In how many ways a block can be shifted against `other` blocks of the other axis, by the starts of pairs."""
    pairs = [axis for axis in spec.start_sizes if axis != "spatial" and spec.owners(axis) == "grid"]
    places = prod(spec.start_sizes[axis][0] // spec.group_length for axis in pairs)
    turned = spec.channel_starts != "grid" and other > 1  # the first of them is where shifts are counted from
    return places ** (other - 1 if turned else other)


def _off_the_ends(spec: EpitomeSpec, starts: Mapping[Axis, Tensor]) -> dict[Axis, Tensor]:
    kept: dict[Axis, Tensor] = {}
    for axis, value in starts.items():
        group = spec.group(axis)
        reach = value.new_tensor([size - group if group > 1 else size for size in spec.start_sizes[axis]])
        kept[axis] = value.clamp(min=group / 4).minimum(reach - group / 4).clamp(min=0)
    return kept


def _turned_pairs(spec: EpitomeSpec, axis: Axis, within_reach: bool, whole: bool, device: torch.device | str) -> Tensor:
    """Starts of pairs of blocks on one channel axis, shape `(R_out, R_in)`.

    Spread row by row, the differences within a row would be those of every other: the blocks of such an axis would be
    turned copies of each other. Here no two are, as long as there are other ways. If not `whole`, each block lies
    another part of a position further along, between a quarter and three.
    """
    size, group = spec.start_sizes[axis][0], spec.group_length
    pairs = (spec.num_out_blocks, spec.num_in_blocks)
    own, other = pairs if axis == "out" else pairs[::-1]
    turned = torch.tensor(_turns(own, other, size // group), device="cpu") * group
    turned = (turned if axis == "out" else turned.t()).contiguous().to(device)
    if whole or group == size:
        return turned
    share = 0.25 + 0.5 * (torch.arange(own, device=device) + 0.5) / own
    between = turned + group * (share.unsqueeze(1) if axis == "out" else share)
    return between * ((size - group) / size) if within_reach and group > 1 else between


@cache
def _turns(own: int, other: int, places: int) -> list[list[int]]:
    """Places 0 to places - 1, own rows of other columns, the first column 0 and the others never alike in two rows.

    With two columns the second has places a step apart; with more, draws are made, and the one taken that loses least
    rank: turns by places act on each frequency of the epitome's axis by itself, as the matrix of their phases.
    """
    if other == 2 and own <= places:
        step = next((n for n in range(3, places) if gcd(n, places) == 1), 1)
        return [[0, step * row % places] for row in range(own)]
    generator = torch.Generator().manual_seed(0)
    first = torch.zeros(own, 1, dtype=torch.int64, device="cpu")
    count = 8 if places <= _FEW_PLACES else 1
    draws = [torch.cat([first, _drawn_rows(own, other - 1, places, generator)], 1) for _ in range(count)]
    best = int(_directions(torch.stack(draws), places).argmax()) if count > 1 else 0
    return list(draws[best].tolist())


def _directions(turns: Tensor, places: int) -> Tensor:
    """Rank that turned and added parts can have, over the frequencies of an axis of `places`, for each draw."""
    frequency = torch.arange(places, device="cpu").view(-1, 1, 1)
    angle = frequency * turns.double().unsqueeze(1) * (2 * pi / places)  # shape: (draw, frequency, own, other)
    return torch.linalg.matrix_rank(torch.polar(torch.ones_like(angle), angle), rtol=1e-6).sum(1)


def _shuffled_pairs(spec: EpitomeSpec, within_reach: bool, device: torch.device | str) -> dict[Axis, Tensor]:
    """Whole starts on the channel axes of pairs of blocks, if they outnumber the positions of an axis that has starts.

    Filters shift differently from one block of input channels to the next, input channels from one block of filters to
    the next: those are what tells two columns, or two rows, of blocks apart.
    """
    axes: tuple[Axis, ...] = ("out", "in")
    group, sizes = spec.group_length, {axis: spec.start_sizes[axis][0] for axis in axes if axis in spec.start_sizes}
    count = {axis: size // group if within_reach else -(-size // group) for axis, size in sizes.items()}
    blocks = (spec.num_out_blocks, spec.num_in_blocks)
    if not count or prod(blocks) <= min(count.values()):
        return {}
    rows, columns = count.get("out", 1), count.get("in", 1)
    generator = torch.Generator().manual_seed(0)
    out = _different_rows(*blocks[::-1], rows, columns == 1, generator)
    in_ = _different_rows(*blocks, columns, rows == 1, generator)
    if rows > 1 and columns > 1:
        out, in_ = _parted(out, in_, rows), _parted(in_, out, columns)
    shuffled: dict[Axis, Tensor] = {"out": out.t(), "in": in_}
    return {axis: (shuffled[axis] * group).contiguous().to(device) for axis in count}


def _different_rows(rows: int, columns: int, count: int, alone: bool, generator: torch.Generator) -> Tensor:
    """Places 0 to count - 1, shape (rows, columns): no two rows alike where `rows <= count^columns`.

    If `alone`, no shifts of the other axis tell columns apart: two of them may then not be alike but for a turn.
    """
    if rows == 1 and columns <= count:
        return (2 * torch.arange(columns, device="cpu") + 1).unsqueeze(0) * count // (2 * columns)
    if alone:
        draws = (_drawn_rows(rows, columns, count, generator) for _ in range(16))
        return max(draws, key=lambda drawn: len(((drawn - drawn[:1]) % count).unique(dim=1).t()))
    return (_drawn_rows if rows > 2 * count else _turned_rows)(rows, columns, count, generator)


def _turned_rows(rows: int, columns: int, count: int, generator: torch.Generator) -> Tensor:
    """A column has all places before it has one again, in one shuffled order, from a place of its own.

    In the second round column c is c places further.
    """
    names = torch.randperm(count, generator=generator, device="cpu")
    row, column = (torch.arange(n, device="cpu") for n in (rows, columns))
    begins = _rounds(columns, count, generator)
    return names[(row.unsqueeze(1) + row.unsqueeze(1) // count * column + begins) % count]


def _parted(places: Tensor, across: Tensor, count: int) -> Tensor:
    """Columns of `places` whose rows in `across` are alike: the first, then it again, turned on in equal steps."""
    kinds, kind, counts = across.unique(dim=0, return_inverse=True, return_counts=True)
    if len(kinds) == len(across):
        return places
    order = kind.argsort(stable=True)
    first = counts.cumsum(0) - counts  # in `order`, of each kind
    turns = torch.empty_like(kind)
    turns[order] = torch.arange(len(kind), device="cpu") - first.repeat_interleave(counts)
    step = (count // counts).clamp(min=1)
    return (places[:, order[first][kind]] + turns * step[kind]) % count


def _drawn_rows(rows: int, columns: int, count: int, generator: torch.Generator) -> Tensor:
    """Rows drawn without replacement: in more than two rounds balanced columns would cost rank."""
    ways = count**columns
    if ways <= max(2 * rows, 1024):
        left = _rounds(rows, ways, generator).unsqueeze(1)
        return left // torch.tensor([count**k for k in range(columns)], device="cpu") % count
    drawn = torch.randint(count, (rows, columns), generator=generator, device="cpu")
    while len(kept := drawn.unique(dim=0)) < rows:
        more = torch.randint(count, (rows - len(kept), columns), generator=generator, device="cpu")
        drawn = torch.cat([kept, more])
    return drawn[torch.randperm(rows, generator=generator, device="cpu")]


def _rounds(length: int, count: int, generator: torch.Generator) -> Tensor:
    """Numbers below `count`, all of them in shuffled order before one comes again, shape (length,)."""
    rounds = [torch.randperm(count, generator=generator, device="cpu") for _ in range(-(-length // count))]
    return torch.cat(rounds)[:length]


def interpolation_gain(starts: Mapping[Axis, Tensor], spec: EpitomeSpec) -> float:
    """Standard deviation of a generated weight over that of its epitome, for independent epitome elements.

    Averaging two neighbours with fractions 1-f and f multiplies the variance by (1-f)^2 + f^2 on each axis. The
    product is taken in every pair of blocks before the mean, since the fractions of two axes need not be independent,
    and a block that is cut counts with what is left of it.
    """
    variance = torch.ones(spec.num_out_blocks, spec.num_in_blocks, dtype=torch.float64)
    for axis, value in starts.items():
        columns = value.unbind(-1) if axis == "spatial" else (value,)
        for column, size in zip(columns, spec.start_sizes[axis], strict=True):
            if spec.group(axis) == size:
                continue  # both neighbours are the same element
            fraction = split_starts(column.detach().double().cpu(), size, spec.group(axis)).fraction
            variance = variance * by_pair((1 - fraction) ** 2 + fraction**2, spec.owners(axis))
    rows = _block_lengths(spec.weight_shape[0], spec.block_out)
    columns_in = _block_lengths(spec.weight_shape[1], spec.block_in)
    return sqrt(float(rows @ variance @ columns_in) / (spec.weight_shape[0] * spec.weight_shape[1]))


def _block_lengths(total: int, block: int) -> Tensor:
    """How many positions of an axis each block fills; the last may be cut."""
    return torch.tensor([min(block, total - first) for first in range(0, total, block)], dtype=torch.float64)
