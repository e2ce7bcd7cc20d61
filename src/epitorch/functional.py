"""tau of the paper: generate a weight from an epitome and start indices. Pure tensor functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from epitorch.errors import ShapeError, StartsError, explain
from epitorch.spec import Axis, EpitomeSpec


def sample_weight(epitome: Tensor, starts: Mapping[Axis, Tensor], spec: EpitomeSpec) -> Tensor:
    """Generate the weight: multilinear interpolation of shifted patches on the circle (the paper's tau).

    For output block r, input block s, offsets a, b and kernel position k:

        weight[r*block_out + a, s*block_in + b, k] =
            lerp over every axis of  epitome[(c_out[r] + a) mod O, (c_in[s] + b) mod I, (p + k) mod L]

    Gradients reach the epitome and the starts; at a whole start the start's gradient is the right derivative.

    Args:
        epitome: Shape `(O, I, *L)`, semantic order.
        starts: One tensor for each axis of `spec.start_shapes`, of that shape, in positions. float32 or wider.
        spec: The shapes.

    Returns:
        Weight of shape `spec.weight_shape` in the epitome's dtype.

    Raises:
        ShapeError: If the epitome has another shape than the spec says.
        StartsError: If starts are missing, superfluous or of another shape.

    Example:
        >>> spec = EpitomeSpec.create((4, 2), (2, 2))
        >>> sample_weight(torch.eye(2), {"out": torch.tensor([0.0, 0.5])}, spec)
        tensor([[1.0000, 0.0000],
                [0.0000, 1.0000],
                [0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    _check(epitome, starts, spec)
    if spec.channel_starts != "separable" or "spatial" in starts:
        return _sample_blocks(epitome, starts, spec)
    weight = epitome
    for dim, (axis, block, _) in enumerate(_channel_axes(spec)):
        length = spec.weight_shape[dim]
        if axis in starts:
            shift = split_starts(starts[axis], weight.shape[dim], spec.group_length)
            weight = _sample_axis(weight, shift, dim, block, length)
        elif weight.shape[dim] == 1:
            weight = weight.expand(*weight.shape[:dim], length, *weight.shape[dim + 1 :])
        elif weight.shape[dim] > length:
            weight = weight.narrow(dim, 0, length)
    return weight.expand(spec.weight_shape)


@dataclass(frozen=True)
class Shift:
    """A start index split at its lower neighbour on the grid of multiples of `group`."""

    base: Tensor  # int64, shape of the starts: the lower neighbour, in [0, size]
    fraction: Tensor  # shape of the starts: share of the upper neighbour, in [0, 1)
    size: int
    group: int

    def window(self, length: int) -> Tensor:
        """Positions `base .. base + length - 1` on the circle, shape (*starts.shape, length)."""
        offsets = torch.arange(length, device=self.base.device)
        return (self.base.unsqueeze(-1) + offsets).remainder(self.size)


def split_starts(starts: Tensor, size: int, group: int = 1) -> Shift:
    """Take starts modulo the axis and split them into whole shift and fraction (G((n - x)/g) of the method)."""
    position = torch.remainder(starts, size)
    if group == 1:  # the common case, in fewer operations
        lower = torch.floor(position.detach())
        return Shift(lower.long(), position - lower, size, group)
    lower = torch.floor(position.detach() / group)
    return Shift(lower.long() * group, position / group - lower, size, group)


def _sample_axis(source: Tensor, shift: Shift, dim: int, block: int, length: int) -> Tensor:
    """Interpolated patches side by side along `dim`, one per start, up to `length` positions.

    Every position reads its lower and its upper neighbour: few operations, whose number decides the time of small ones.
    """
    position = torch.arange(length, device=source.device)
    # Not a division of whole numbers: at the end of a vector, torch 2.14 compiles it to nonsense for a CPU.
    owner = ((position + 0.5) / block).long()
    lower = (shift.base.index_select(0, owner) + position.remainder(block)).remainder(shift.size)
    upper = (lower + shift.group).remainder(shift.size)
    rest = source.shape[dim + 1 :]
    flat = source.reshape(*source.shape[: dim + 1], *([rest.numel()] if rest.numel() > 1 else []))
    fraction = shift.fraction.to(source.dtype).index_select(0, owner)
    fraction = fraction.unsqueeze(-1) if flat.dim() > dim + 1 else fraction
    mixed = torch.lerp(flat.index_select(dim, lower), flat.index_select(dim, upper), fraction)
    return mixed.reshape(*source.shape[:dim], length, *rest)


def _sample_blocks(epitome: Tensor, starts: Mapping[Axis, Tensor], spec: EpitomeSpec) -> Tensor:
    """The general case: one gather of slightly enlarged windows for all pairs of blocks, then a lerp per axis."""
    axes = _axes(starts, spec)
    dims = len(axes)
    strides = [prod(spec.epitome_shape[d + 1 :]) for d in range(dims)]
    flat: Tensor | int = 0
    for d, (index, _) in enumerate(axes):
        view = [1] * dims
        view[d] = index.shape[-1]
        flat = flat + index.reshape(*index.shape[:2], *view) * strides[d]
    assert isinstance(flat, Tensor)
    flat = flat.expand(spec.num_out_blocks, spec.num_in_blocks, *flat.shape[2:])
    patches = epitome.reshape(-1).index_select(0, flat.reshape(-1)).view(flat.shape)
    for d, (index, shift) in enumerate(axes):
        if shift is not None:
            fraction = shift.fraction.to(epitome.dtype).reshape(*index.shape[:2], *[1] * dims)
            length = index.shape[-1] - shift.group
            low, high = patches.narrow(2 + d, 0, length), patches.narrow(2 + d, shift.group, length)
            patches = torch.lerp(low, high, fraction)
    return _join_blocks(patches, spec)  # (R_out, R_in, block_out, block_in, *K) -> (C_out, C_in, *K)


def _join_blocks(patches: Tensor, spec: EpitomeSpec) -> Tensor:
    joined = patches.transpose(1, 2).flatten(0, 1).flatten(1, 2)
    return joined[: spec.weight_shape[0], : spec.weight_shape[1]]


def _axes(starts: Mapping[Axis, Tensor], spec: EpitomeSpec) -> list[tuple[Tensor, Shift | None]]:
    """For each axis of the weight: positions to read, shape (R_out | 1, R_in | 1, length), and their shift."""
    device = next(iter(starts.values())).device if starts else None
    found: list[tuple[Tensor, Shift | None]] = []
    for dim, (axis, block, blocks) in enumerate(_channel_axes(spec)):
        if axis in starts:
            shift = split_starts(by_pair(starts[axis], spec.owners(axis)), spec.epitome_shape[dim], spec.group_length)
            found.append((shift.window(block + shift.group), shift))
        else:
            index = torch.arange(blocks * block, device=device).remainder(spec.epitome_shape[dim])
            found.append((by_pair(index.view(blocks, block), axis), None))
    for k, (kernel, size) in enumerate(zip(spec.kernel, spec.window, strict=True)):
        if k in spec.spatial_axes:
            column = starts["spatial"][..., spec.spatial_axes.index(k)]
            shift = split_starts(by_pair(column, spec.spatial_starts), size)
            found.append((shift.window(kernel + 1), shift))
        else:
            index = torch.arange(kernel, device=device).remainder(size)
            found.append((index.view(1, 1, kernel), None))
    return found


def _channel_axes(spec: EpitomeSpec) -> tuple[tuple[Axis, int, int], ...]:
    """Axis, block length and number of blocks, filters first."""
    return ("out", spec.block_out, spec.num_out_blocks), ("in", spec.block_in, spec.num_in_blocks)


def by_pair(tensor: Tensor, owners: str) -> Tensor:
    """Put blocks on the first two axes: "out" -> (R_out, 1, ...), "in" -> (1, R_in, ...), "grid" as it is."""
    if owners == "grid":
        return tensor
    return tensor.unsqueeze(1) if owners == "out" else tensor.unsqueeze(0)


def _check(epitome: Tensor, starts: Mapping[Axis, Tensor], spec: EpitomeSpec) -> None:
    if tuple(epitome.shape) != spec.epitome_shape:
        raise ShapeError(
            explain("the epitome does not fit its spec", expected=spec.epitome_shape, got=tuple(epitome.shape))
        )
    check_start_shapes(starts, spec)


def check_start_shapes(starts: Mapping[Axis, Tensor], spec: EpitomeSpec, where: str | None = None) -> None:
    """Raise StartsError unless `starts` has exactly the axes and shapes of `spec.start_shapes`."""
    got = {axis: tuple(tensor.shape) for axis, tensor in starts.items()}
    if got != spec.start_shapes:
        raise StartsError(explain("the starts do not fit the layer", expected=spec.start_shapes, got=got, where=where))
