"""Specs, starts and layers that the warm start's tests share."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

import reference
from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLinear
from epitorch.spec import Axis, EpitomeSpec

create = EpitomeSpec.create
SPECS = {
    "filters": create((7, 4), (3, 4)),
    "both": create((7, 5, 3), (4, 3, 3)),
    "blocks": create((7, 6, 2), (4, 4, 2), block_out=2, block_in=3),
    "group_length": create((9, 8), (6, 4), group_length=2),
    "kernel_of_one": create((6, 4, 3), (3, 2, 1)),
    "one_spatial_start": create((6, 3, 3), (4, 3, 5)),
    "grid": create((7, 6), (4, 3), channel_starts="grid"),
    "grid_3x3": create((5, 5, 3, 3), (3, 4, 3, 3), channel_starts="grid"),
    "grid_group": create((8, 6), (4, 4), channel_starts="grid", group_length=2),
    "grid_one_group": create((6, 5), (3, 3), channel_starts="grid", group_length=3),
    "grid_out": create((8, 6), (4, 6), channel_starts="grid_out", block_in=3),
    "grid_in": create((6, 8), (6, 4), channel_starts="grid_in", block_out=3),
    "grid_rows": create((7, 4), (4, 4), channel_starts="grid", block_out=1),
    "spatial_in": create((5, 6, 3), (3, 3, 4)),
    "spatial_out": create((5, 4, 3, 2), (2, 4, 4, 3), spatial_starts="out"),
    "spatial_grid": create((5, 4, 3), (3, 2, 5), channel_starts="grid", spatial_starts="grid"),
    "shift_only": create((4, 4, 3), (4, 4, 3), block_in=2, spatial_shift=True),
    "expansion": create((4, 3), (6, 5)),
}
SEARCHED = [name for name, spec in SPECS.items() if spec.start_shapes]
SENSITIVE = [name for name in SEARCHED if name != "grid_one_group"]  # one group: every start means the same


def layout_of(spec: EpitomeSpec) -> reference.Layout:
    return reference.Layout(**{f.name: getattr(spec, f.name) for f in fields(reference.Layout)})


def random_starts(spec: EpitomeSpec, *, whole: bool = False) -> dict[Axis, Tensor]:
    starts: dict[Axis, Tensor] = {}
    for axis, shape in spec.start_shapes.items():
        value = torch.rand(shape, dtype=torch.float64) * torch.tensor(spec.start_sizes[axis], dtype=torch.float64)
        starts[axis] = (value / spec.group(axis)).floor() * spec.group(axis) if whole else value
    return starts


def as_numpy(starts: Any) -> dict[str, Any]:
    return {axis: value.double().numpy() for axis, value in starts.items()}


LAYERS: dict[str, Any] = {
    "conv": partial(EpitomeConv2d, 6, 8, 3, epitome_shape=(4, 3, 3, 3)),
    "grouped": partial(EpitomeConv2d, 12, 8, 3, groups=2, epitome_shape=(4, 3, 3, 3)),
    "flattened": partial(EpitomeConv1d, 6, 8, 3, flatten_kernel=True, epitome_shape=(4, 9)),
    "transposed": partial(EpitomeConvTranspose2d, 6, 8, 3, epitome_shape=(3, 4, 3, 3)),
    "transposed_grouped": partial(EpitomeConvTranspose2d, 6, 8, 3, groups=2, epitome_shape=(3, 2, 3, 3)),
    "transposed_flattened": partial(EpitomeConvTranspose2d, 6, 8, 3, flatten_kernel=True, epitome_shape=(9, 4)),
    "linear": partial(EpitomeLinear, 6, 8, epitome_shape=(4, 3)),
    "grid": partial(EpitomeConv2d, 6, 8, 3, epitome_shape=(4, 3, 3, 3), channel_starts="grid", index="fixed"),
    "direct": partial(EpitomeConv2d, 6, 8, 3, epitome_shape=(4, 6, 3, 3), index="direct"),
    "float64": partial(EpitomeConv2d, 6, 8, 3, epitome_shape=(4, 3, 3, 3), dtype=torch.float64),
}
