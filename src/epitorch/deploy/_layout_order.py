"""Choose the order of the channels of a space, and in how many tensors they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from epitorch.deploy._layout_graph import Space, Traced
from epitorch.deploy.reuse_layers import ReuseConv
from epitorch.functional import sample_weight
from epitorch.spec import EpitomeSpec


@dataclass(frozen=True, eq=False)
class Order:
    """Where the channels of a space lie.

    Args:
        channels: Stored channel j is the network's channel `channels[j]`; shape (C,).
        parts: Number of tensors, each with C / parts consecutive stored channels.
    """

    channels: Tensor
    parts: int

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Bring a tensor with one row per channel into the stored order, cut into the parts."""
        return rows.index_select(0, self.channels).chunk(self.parts)


def mixing_matrix(layer: Any, axis: Literal["out", "in"]) -> Tensor | None:
    """A_out `(C_out, O)` or A_in `(C_in, I)` of method section 5, in float64; None if the layer does not reuse it."""
    strategies = ("product_map", "both") if axis == "out" else ("wrapping", "both")
    if not isinstance(layer, ReuseConv) or layer.strategy not in strategies:
        return None
    dim, block = (0, layer.spec.block_out) if axis == "out" else (1, layer.spec.block_in)
    length, size = layer.spec.weight_shape[dim], layer.spec.epitome_shape[dim]
    spec = EpitomeSpec.create((length, size), (size, size), block_out=block, group_length=layer.spec.group_length)
    starts = {name: layer.starts()[axis] for name in spec.start_shapes}
    return sample_weight(torch.eye(size, dtype=torch.float64), starts, spec)


def copied(matrix: Tensor) -> Tensor | None:
    """Which column each row copies, shape (C,); None unless every row is a copy."""
    whole = ((matrix == 0) | (matrix == 1)).all() and (matrix.sum(1) == 1).all()
    return matrix.argmax(1) if bool(whole) else None


def tiling(matrix: Tensor) -> Tensor | None:
    """The permutation of which the rows of a matrix are plain repetitions, shape (O,); None if they are not."""
    index, size = copied(matrix), matrix.shape[1]
    if index is None or len(index) % size:
        return None
    rows = index.view(-1, size)
    permutes = bool((rows[0].sort().values == torch.arange(size)).all())
    return rows[0] if permutes and bool((rows == rows[0]).all()) else None


def rotation(matrix: Tensor) -> int | None:
    """By how many channels a square matrix rotates: row n copies column n + shift; None if it does not."""
    index = copied(matrix)
    if index is None or matrix.shape[0] != matrix.shape[1]:
        return None
    shift = int(index[0])
    rotates = torch.equal(index, (torch.arange(len(index)) + shift).remainder(len(index)))
    return shift if rotates else None


def choose_order(space: Space, traced: Traced, *, permute: bool, split: bool) -> Order:
    """Parts as the wrapping layers cut the space; the order that makes most mixing matrices plain repetitions.

    Args:
        space: What to lay out.
        traced: The network.
        permute: Allow another order than the network's.
        split: Allow more than one tensor.
    """
    plain = Order(torch.arange(space.size), 1)
    if space.fixed:
        return plain
    wrapped = [m for node in space.consumers if (m := mixing_matrix(traced.layer(node), "in")) is not None]
    expanded = [m for node in space.producers if (m := mixing_matrix(traced.layer(node), "out")) is not None]
    parts = _parts(space.size, wrapped) if split else 1
    matrices = wrapped + expanded
    candidates = [o for m in matrices if (o := _order_for(m)) is not None] if permute else []
    best = max([plain.channels, *candidates], key=lambda channels: _score(channels, matrices))
    return Order(best, parts)


def _parts(size: int, wrapped: list[Tensor]) -> int:
    sizes = {matrix.shape[1] for matrix in wrapped}
    if len(sizes) != 1:
        return 1
    (width,) = sizes
    return size // width if size % width == 0 else 1


def _order_for(matrix: Tensor) -> Tensor | None:
    """First the first copy of every column, then the second, and so on; None if the columns differ in number."""
    index, size = copied(matrix), matrix.shape[1]
    if index is None or len(index) % size:
        return None
    counts = index.bincount(minlength=size)
    if not bool((counts == len(index) // size).all()):
        return None
    return index.argsort(stable=True).view(size, -1).t().reshape(-1)


def _score(channels: Tensor, matrices: list[Tensor]) -> int:
    """How many blocks of rows repeat the first one."""
    score = 0
    for matrix in matrices:
        index, size = copied(matrix), matrix.shape[1]
        if index is not None and len(index) % size == 0:
            rows = index[channels].view(-1, size)
            score += int((rows[1:] == rows[0]).all(1).sum())
    return score
