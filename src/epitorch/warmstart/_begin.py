"""Where the search for starts begins."""

from __future__ import annotations

import torch
from torch import Tensor

from epitorch.spec import Axis
from epitorch.warmstart._problem import Target

_WORK = 4_000_000_000  # multiply-adds that picking blocks may take


def whole(target: Target, starts: dict[Axis, Tensor], within_reach: bool) -> dict[Axis, Tensor]:
    """The nearest whole positions (multiples of the group length)."""
    rounded: dict[Axis, Tensor] = {}
    for axis, value in starts.items():
        step = target.spec.group(axis)
        sizes = value.new_tensor(target.spec.start_sizes[axis])
        place = torch.round(value / step) * step
        last = sizes - step if within_reach and step > 1 else sizes - 1
        rounded[axis] = torch.minimum(place, last) if within_reach else place.remainder(sizes)
    return rounded


def distinct_blocks(target: Target, background: Tensor) -> Tensor | None:
    """An epitome tiled with blocks of the weight that differ most from each other; the rest is `background`.

    Where every pair of blocks has its own starts the tiles are picked one by one; otherwise rows of blocks and columns
    of blocks are picked, since their starts are shared.

    Returns:
        Shape `(O, I, *L)`, or None where a kernel does not fit the epitome's window one to one.
    """
    spec = target.spec
    if spec.kernel != spec.window or "spatial" in spec.start_shapes:
        return None
    tiles = (spec.epitome_shape[0] // spec.block_out, spec.epitome_shape[1] // spec.block_in)
    root = target.importance.sqrt().view(-1, *[1] * (target.weight.dim() - 2))
    seen, blocks = target.cut(target.weight * root), target.cut(target.weight)
    if spec.channel_starts == "grid":
        picks = farthest_first(seen.flatten(0, 1).flatten(1), tiles[0] * tiles[1])
        chosen = blocks.flatten(0, 1)[picks]
        chosen = chosen.reshape(*tiles, *chosen.shape[1:])
    else:
        rows = farthest_first(seen.flatten(1), tiles[0])
        columns = farthest_first(seen.transpose(0, 1).flatten(1), tiles[1])
        chosen = blocks[rows][:, columns]
    tiled = chosen.transpose(1, 2).flatten(0, 1).flatten(1, 2)
    epitome = background.clone()
    epitome[: tiled.shape[0], : tiled.shape[1]] = tiled
    return epitome


def farthest_first(points: Tensor, count: int) -> Tensor:
    """Indices of `count` rows: the longest, then each time the one farthest from all picked ones. (n, d) -> (count,).

    With more picks than rows the rows repeat; where the distances would cost too much, the longest rows are taken.
    """
    n = points.shape[0]
    lengths = points.square().sum(1)
    if count >= n or count * points.numel() > _WORK:
        return lengths.argsort(descending=True, stable=True)[torch.arange(count, device=points.device) % n]
    picks = [int(lengths.argmax())]
    nearest = torch.full_like(lengths, float("inf"))
    for _ in range(count - 1):
        last = picks[-1]
        distance = lengths - 2 * (points @ points[last]) + lengths[last]
        nearest = torch.minimum(nearest, distance)
        nearest[last] = float("-inf")  # also where rows are equal, no row twice
        picks.append(int(nearest.argmax()))
    return torch.tensor(picks, device=points.device)
