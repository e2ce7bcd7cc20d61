"""What a fit works on: the weight in blocks, its importance per input channel, and where every block reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from epitorch.functional import Shift, by_pair, sample_weight, split_starts
from epitorch.spec import Axis, EpitomeSpec

Starts = Mapping[Axis, Tensor]


@dataclass(frozen=True)
class Target:
    """Minimise the sum over elements of `importance[input channel] * (weight - tau(E, starts))^2`.

    Args:
        weight: Shape `(C_out, C_in/groups, *K)`, float64.
        importance: Shape `(C_in/groups,)`, float64, not negative: the squared input weights.
        spec: The shapes.
    """

    weight: Tensor
    importance: Tensor
    spec: EpitomeSpec

    @cached_property
    def weighted(self) -> Tensor:
        """The weight times its importance, shape of the weight."""
        return self.weight * self.importance.view(-1, *[1] * (self.weight.dim() - 2))

    @cached_property
    def size(self) -> float:
        """The loss of an epitome of zeros."""
        return float((self.weighted * self.weight).sum())

    @cached_property
    def blocks(self) -> Tensor:
        """`weighted` cut into blocks, zeros past its end; shape (R_out, R_in, block_out, block_in, *K)."""
        return self.cut(self.weighted)

    def cut(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape, in blocks, zeros past its end."""
        spec = self.spec
        rows, columns = self._missing
        padded = F.pad(weight, [0, 0] * len(spec.kernel) + [0, columns, 0, rows])
        shape = (spec.num_out_blocks, spec.block_out, spec.num_in_blocks, spec.block_in, *spec.kernel)
        return padded.reshape(shape).transpose(1, 2)

    @property
    def _missing(self) -> tuple[int, int]:
        spec = self.spec
        rows = spec.num_out_blocks * spec.block_out - spec.weight_shape[0]
        return rows, spec.num_in_blocks * spec.block_in - spec.weight_shape[1]

    @cached_property
    def rows(self) -> Tensor:
        """1 for every filter, 0 past the end, shape (R_out, block_out)."""
        full = F.pad(self.importance.new_ones(self.spec.weight_shape[0]), [0, self._missing[0]])
        return full.view(self.spec.num_out_blocks, self.spec.block_out)

    @cached_property
    def columns(self) -> Tensor:
        """Importance of every input channel, 0 past the end, shape (R_in, block_in)."""
        return F.pad(self.importance, [0, self._missing[1]]).view(self.spec.num_in_blocks, self.spec.block_in)

    def loss(self, epitome: Tensor, starts: Starts) -> float:
        """The weighted sum of squares."""
        difference = self.weight - sample_weight(epitome, starts, self.spec)
        return float(difference.square().movedim(1, 0).flatten(1).sum(1) @ self.importance)

    def relative(self, loss: float) -> float:
        """The relative Frobenius error that belongs to a loss; 0 where there is nothing to fit."""
        return (max(loss, 0.0) / self.size) ** 0.5 if self.size > 0 else 0.0


@dataclass(frozen=True)
class Window:
    """Where blocks read one axis of the epitome: `length` positions from a start on, on the circle.

    Args:
        shift: Base and fraction by pair of blocks, shape (R_out | 1, R_in | 1).
        length: Positions per block.
    """

    shift: Shift
    length: int

    @cached_property
    def mixes(self) -> bool:
        """Some start lies between two positions."""
        return bool((self.shift.fraction != 0).any())

    def row(self, r: int, axis: int) -> Window:
        """The window of one block of an axis (0 filters, 1 inputs) only."""
        shift = self.shift
        if shift.base.shape[axis] == 1:
            return self
        base, fraction = (t.narrow(axis, r, 1) for t in (shift.base, shift.fraction))
        return Window(Shift(base, fraction, shift.size, shift.group), self.length)

    @classmethod
    def whole_axis(cls, size: int, step: int, like: Tensor) -> Window:
        """All positions of an axis, the same for all blocks."""
        return cls(split_starts(like.new_zeros(1, 1), size, step), size)


def windows(starts: Starts, spec: EpitomeSpec, like: Tensor) -> list[Window]:
    """One window per axis of the epitome, filters first; axes without starts are read in place."""
    found = []
    channels: tuple[tuple[Axis, int, int], ...] = (
        ("out", spec.block_out, spec.num_out_blocks),
        ("in", spec.block_in, spec.num_in_blocks),
    )
    for dim, (axis, block, count) in enumerate(channels):
        size = spec.epitome_shape[dim]
        if axis in starts:
            shift = split_starts(by_pair(starts[axis].to(like), spec.owners(axis)), size, spec.group_length)
        else:
            place = torch.arange(count, device=like.device).to(like) * block
            shift = split_starts(by_pair(place, axis), size)
        found.append(Window(shift, block))
    for k, (kernel, size) in enumerate(zip(spec.kernel, spec.window, strict=True)):
        column = like.new_zeros(1, 1)
        if k in spec.spatial_axes:
            column = by_pair(starts["spatial"][..., spec.spatial_axes.index(k)].to(like), spec.spatial_starts)
        found.append(Window(split_starts(column, size), kernel))
    return found


def patches(epitome: Tensor, places: Sequence[Window]) -> Tensor:
    """What the blocks read, interpolated; shape (R_out | 1, R_in | 1, *lengths), 1 where blocks read the same."""
    flat = _positions(places, epitome.shape)
    read = epitome.reshape(-1).index_select(0, flat.reshape(-1)).view(flat.shape)
    for d, place in enumerate(places):
        if place.mixes:
            low = read.narrow(2 + d, 0, place.length)
            high = read.narrow(2 + d, place.shift.group, place.length)
            read = torch.lerp(low, high, _broadcast(place.shift.fraction, read))
    return read


def gathered(blocks: Tensor, places: Sequence[Window], shape: Sequence[int]) -> Tensor:
    """The transpose of `patches`: every epitome position gets the sum of what reads it, times its share."""
    flat = _positions(places, shape)
    for d, place in enumerate(places):
        if place.mixes:
            fraction, step = _broadcast(place.shift.fraction, blocks), place.shift.group
            wider = blocks.new_zeros(*blocks.shape[: 2 + d], place.length + step, *blocks.shape[3 + d :])
            wider.narrow(2 + d, 0, place.length).add_((1 - fraction) * blocks)
            wider.narrow(2 + d, step, place.length).add_(fraction * blocks)
            blocks = wider
    total = blocks.new_zeros(prod(shape))
    return total.index_add_(0, flat.expand(blocks.shape).reshape(-1), blocks.reshape(-1)).view(tuple(shape))


def _broadcast(fraction: Tensor, blocks: Tensor) -> Tensor:
    return fraction.reshape(*fraction.shape, *[1] * (blocks.dim() - 2))


def _positions(places: Sequence[Window], shape: Sequence[int]) -> Tensor:
    """Flat epitome positions that blocks read, with a margin where they mix; shape (R_out | 1, R_in | 1, *reach)."""
    flat = torch.zeros(1, dtype=torch.int64, device=places[0].shift.base.device)
    for d, place in enumerate(places):
        reach = place.length + (place.shift.group if place.mixes else 0)
        index = place.shift.window(reach)
        view = [1] * len(places)
        view[d] = reach
        flat = flat + index.reshape(*index.shape[:2], *view) * prod(shape[d + 1 :])
    return flat
