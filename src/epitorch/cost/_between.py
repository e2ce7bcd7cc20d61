"""Which starts lie between two positions: what a deployed layer has to interpolate."""

from __future__ import annotations

from torch import Tensor

from epitorch.cost.formulas import Interpolated, interpolated_channels
from epitorch.functional import split_starts
from epitorch.nn import EpitomeLayer
from epitorch.spec import Axis, EpitomeSpec


def interpolated_of(layer: EpitomeLayer) -> Interpolated:
    """What lies between two positions, from the routing map."""
    spec = layer.spec
    if spec.channel_starts == "grid":
        return Interpolated(0, 0)  # always folded
    return interpolated_by(spec, layer.starts())


def interpolated_by(spec: EpitomeSpec, starts: dict[Axis, Tensor]) -> Interpolated:
    """What lies between two positions, for the given starts."""
    out_blocks = _blocks_between(spec, starts) if spec.owners("out") == "out" else ()
    return Interpolated(_between(spec, starts, "out"), _between(spec, starts, "in"), out_blocks, _axes(spec, starts))


def _between(spec: EpitomeSpec, starts: dict[Axis, Tensor], axis: Axis) -> int:
    dim, block = (0, spec.block_out) if axis == "out" else (1, spec.block_in)
    if axis not in starts:
        return 0
    pairs = starts[axis] if starts[axis].dim() == 1 else starts[axis].movedim(dim, -1)  # blocks of the axis last
    if pairs.is_meta:
        return spec.weight_shape[dim] * pairs[..., 0].numel()
    between = split_starts(pairs.detach(), spec.epitome_shape[dim], spec.group_length).fraction != 0
    rows = between.reshape(-1, between.shape[-1]).tolist()
    return sum(interpolated_channels(spec.weight_shape[dim], block, row) for row in rows)


def _blocks_between(spec: EpitomeSpec, starts: dict[Axis, Tensor]) -> tuple[bool, ...]:
    if "out" not in starts or starts["out"].is_meta:
        return ()
    fraction = split_starts(starts["out"].detach(), spec.epitome_shape[0], spec.group_length).fraction
    return tuple((fraction != 0).tolist())


def _axes(spec: EpitomeSpec, starts: dict[Axis, Tensor]) -> int | None:
    if "spatial" not in starts or starts["spatial"].is_meta:
        return None
    columns = starts["spatial"].detach().flatten(0, -2).unbind(-1)
    shifts = [split_starts(column, spec.window[k]) for k, column in zip(spec.spatial_axes, columns, strict=True)]
    return sum(bool(shift.fraction.any()) for shift in shifts)
