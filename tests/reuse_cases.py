"""Random epitome layers over all options, for comparing reuse with the trained layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import epitorch.nn as epi
from epitorch.cost.formulas import Geometry
from epitorch.nn import EpitomeLayer
from epitorch.spec import EpitomeSpec

KINDS = (
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Linear",
)


@dataclass(frozen=True)
class Case:
    """Constructor arguments of one layer, its input's shape and where its starts lie."""

    kind: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    shape: tuple[int, ...]
    starts: str  # "fractional", "whole" or "mixed"
    seed: int

    def layer(self, dtype: torch.dtype = torch.float64) -> Any:
        layer = getattr(epi, f"Epitome{self.kind}")(*self.args, **self.options, index="direct", dtype=dtype)
        layer.set_starts(random_starts(layer.spec, self.starts, self.seed))
        with torch.no_grad():
            layer.epitome.normal_(generator=torch.Generator().manual_seed(self.seed + 1))
        return layer.eval()

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64).to(dtype)


def random_starts(spec: EpitomeSpec, where: str, seed: int) -> dict[Any, Tensor]:
    """Starts all over the circle, and past it; between positions, on them, or some of each."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[Any, Tensor] = {}
    for axis, shape in spec.start_shapes.items():
        size, group = max(spec.start_sizes[axis]), spec.group(axis)
        value = torch.rand(shape, generator=generator, dtype=torch.float64) * 1.5 * size
        whole = torch.round(value / group) * group
        mixed = torch.where(torch.rand(shape, generator=generator) < 0.5, value, whole)
        found[axis] = {"fractional": value, "whole": whole, "mixed": mixed}[where]
    return found


def geometry(layer: EpitomeLayer, shape: tuple[int, ...], output: tuple[int, ...]) -> Geometry:
    """Positions of one sample; `shape` and `output` begin with the batch."""
    if isinstance(layer, epi.EpitomeLinear):
        rows = torch.Size(shape[1:-1]).numel()
        return Geometry(rows, rows)
    conv: Any = layer
    return Geometry(
        torch.Size(shape[2:]).numel(),
        torch.Size(output[2:]).numel(),
        conv.groups,
        conv.transposed,
        conv.flatten_kernel,
        positions_read(conv, output[2:]),
        max(conv.stride) > 1,
    )


def positions_read(conv: Any, sizes: tuple[int, ...]) -> int:
    """Positions from the first tap of the first output to the last tap of the last one, over all axes."""
    found = 1
    for size, stride, dilation, kernel in zip(sizes, conv.stride, conv.dilation, conv.kernel_size, strict=True):
        step = 1 if conv.transposed else stride
        found *= len(range(1 + (size - 1) * step + (kernel - 1) * dilation))
    return found


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    seed = draw(st.integers(0, 10_000))
    starts = draw(st.sampled_from(["fractional", "fractional", "mixed", "whole"]))
    if kind == "Linear":
        sizes = (draw(st.integers(2, 14)), draw(st.integers(2, 14)))
        options = draw(epitome_options((sizes[1], sizes[0]), False)) | {"bias": draw(st.booleans())}
        lead = draw(st.sampled_from([(2,), (2, 3), (1,), (0, 3)]))
        return Case(kind, sizes, options, (*lead, sizes[0]), starts, seed)
    return draw(convolutions(kind, starts, seed))


@st.composite
def convolutions(draw: st.DrawFn, kind: str, starts: str, seed: int) -> Case:
    dims, transposed = int(kind[-2]), "Transpose" in kind
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    per_group_in, per_group_out = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    options: dict[str, Any] = {
        "groups": groups,
        "bias": draw(st.booleans()),
        "dilation": draw(per_axis(dims, 1, 2)),
        "stride": draw(st.sampled_from([1, 1, 1, 2]) if transposed else per_axis(dims, 1, 3)),
        "padding": draw(per_axis(dims, 0, 2)),
    }
    if not transposed:
        options |= draw(padding_options(kernel, options["stride"]))
    elif max(options["dilation"]) > 1 and options["stride"] == 1:
        options["output_padding"] = tuple(draw(st.integers(0, d - 1)) for d in options["dilation"])
    storage = (per_group_out if transposed else groups * per_group_out, per_group_in, *kernel)
    semantic = (storage[0], groups * per_group_in, *kernel) if transposed else storage
    options |= draw(epitome_options(semantic, transposed))
    args = (groups * per_group_in, groups * per_group_out, kernel)
    space = tuple(draw(st.integers(5, 7)) for _ in range(dims))
    batch = draw(st.sampled_from([2, 2, 2, 1, 0]))
    return Case(kind, args, options, (batch, groups * per_group_in, *space), starts, seed)


@st.composite
def per_axis(draw: st.DrawFn, dims: int, least: int, most: int) -> tuple[int, ...]:
    if draw(st.booleans()):
        return (draw(st.integers(least, most)),) * dims
    return tuple(draw(st.integers(least, most)) for _ in range(dims))


@st.composite
def padding_options(draw: st.DrawFn, kernel: tuple[int, ...], stride: tuple[int, ...]) -> dict[str, Any]:
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    odd = all(k % 2 for k in kernel)  # torch warns of "same" with even kernels
    if max(stride) == 1 and odd and draw(st.booleans()):
        return {"padding": draw(st.sampled_from(["same", "valid"])), "padding_mode": mode}
    return {"padding_mode": mode}


@st.composite
def epitome_options(draw: st.DrawFn, weight: tuple[int, ...], transposed: bool) -> dict[str, Any]:
    """Keyword-only arguments; `weight` is semantic, `epitome_shape` in storage order."""
    flat = len(weight) > 2 and draw(st.sampled_from([False] * 5 + [True]))
    group = draw(st.sampled_from([1, 1, 2]))
    if flat:
        weight = (weight[0], torch.Size(weight[1:]).numel())
    shares = (draw(st.sampled_from([1, 2, 2, 3, 4, 0.7])) for _ in range(2))
    out, in_ = (group * max(1, int(size / share) // group) for size, share in zip(weight[:2], shares, strict=True))
    window = [draw(st.sampled_from([k, k, k, 1, 2, 4, 5])) for k in weight[2:]]
    shape = (in_, out, *window) if transposed else (out, in_, *window)
    return {
        "epitome_shape": shape,
        "block_out": draw(st.sampled_from([None, None, max(1, out // 2), max(1, out - 1)])),
        "block_in": draw(st.sampled_from([None, None, max(1, in_ // 2), max(1, in_ - 1)])),
        "spatial_starts": draw(st.sampled_from(["in", "in", "out", "grid"])),
        "spatial_shift": draw(st.sampled_from([False] * 3 + [True])),
        "channel_starts": draw(
            st.sampled_from(["separable"] * 7 + ["grid", "grid_out", "grid_out", "grid_in", "grid_in"])
        ),
        "group_length": group,
        "flatten_kernel": flat,
    }
