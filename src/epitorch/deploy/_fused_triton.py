"""Fused stages on a CUDA GPU: two matrix products by cuBLAS, what is between them by a Triton kernel.

A stage is three launches: the product map, the kernel (`_fused_triton_kernel`), the last 1x1. The widest tensors that
reach the memory have the product map's and the wrapped sums' channels. Both are rounded up to a multiple of 8, which
the tensor cores' matrix products need; the first of the extra columns of the sums is a one, so that the bias is a
column of the last matrix and costs no pass of its own.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epitorch.deploy._fused_block import ACTIVATIONS, Stage, Taps, check_input, check_stage, output_size
from epitorch.deploy._fused_native import holds_its_numbers, watched
from epitorch.deploy._fused_reference import activate

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ALIGNED = 8  # channels, 16 bytes of half precision
_LARGEST_BLOCK = 1024  # sums that move between the lanes of one program must all be there
_OLDEST = (8, 0)  # compute capability: bfloat16, and minimum and maximum that keep not-a-number


@dataclass(frozen=True)
class Tile:
    """How the kernel is cut up.

    Args:
        rows: Output pixels of a lane.
        columns: Likewise.
    """

    rows: int
    columns: int


# Larger tiles compute fewer expanded values twice, smaller ones need fewer registers: 93, 142 and 219 a lane (sm_90,
# 3x3, stride 1). A lane is a thread: with two lanes a thread the registers double and the gain is gone.
TILES = (Tile(2, 4), Tile(4, 4), Tile(4, 7))
_WARP = 32


@cache
def triton_available() -> bool:
    """Whether Triton is installed, for a build of torch with CUDA."""
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


def usable_triton(x: Tensor) -> bool:
    """Whether the kernel can read this input: on a CUDA GPU, no gradient, no autocast, no tracing."""
    plain = type(x) is Tensor and x.device.type == "cuda" and x.dtype in DTYPES and x.numel() > 0
    if not plain or (x.requires_grad and torch.is_grad_enabled()) or torch.is_autocast_enabled("cuda"):
        return False
    if watched() or not holds_its_numbers(x):
        return False
    return triton_available() and torch.cuda.get_device_capability(x.device) >= _OLDEST


def why_not_triton(stage: Stage) -> str:
    """Why the kernel cannot run a stage; empty if it can."""
    if stage.settings.kind != "block":
        return "a plain convolution"
    if stage.squeeze is not None:
        return "squeeze-excitation"
    assert stage.taps_out is not None
    if stage.project.dtype not in DTYPES:
        return f"dtype {stage.project.dtype}"
    if _upper(stage.taps_out) and stage.taps_out.size > _LARGEST_BLOCK:
        return f"{stage.taps_out.size} wrapped channels with fractional starts: the kernel has up to {_LARGEST_BLOCK}"
    return ""


def pack_triton(stage: Stage) -> list[Tensor]:
    """Lay a stage out for the kernel.

    Expanded channels are sorted into layers: layer j holds, for every wrapped channel, the j-th expanded channel
    whose lower tap it is.

    Args:
        stage: It has no obstacle (`why_not_triton`).

    Returns:
        The first matrix with rows of zeros up to a multiple of 8, shape (P, in_channels), or nothing, shape (0,).
        The last matrix with the bias as a further column, shape (out_channels, Z).
        Indices, int32, shape (layers, 2 or 1, O2): lower tap of the product map, -1 without a channel; how much
        further the upper one is. The second is left out where all starts are whole.
        Constants, float32, shape (layers, 5 + k * k or one more, O2): share and batch-norm scale of both taps
        multiplied, batch-norm shift, depthwise bias, share of the lower wrapped channel, depthwise weights, share of
        the upper wrapped channel unless all starts are whole.
    """
    check_stage(stage)
    a, b = stage.taps_in, stage.taps_out
    assert a is not None
    assert b is not None
    channel = _layers(b)
    indices = torch.stack([a.lower, a.upper - a.lower][: 1 + _upper(a)]).cpu()[:, channel]  # shape: (2, layers, O2)
    indices[0][channel < 0] = -1
    constants = torch.where(channel < 0, 0.0, _constants(stage)[:, channel])
    device = stage.project.device
    expand = stage.project.new_zeros(0) if stage.expand is None else _padded(stage.expand, 0, _aligned(a.size))
    project = torch.cat([stage.project, stage.bias[:, None]], 1)
    return [
        expand.contiguous(),
        _padded(project, 1, _aligned(b.size + 1)).contiguous(),
        indices.transpose(0, 1).to(device, torch.int32).contiguous(),
        constants.transpose(0, 1).to(device, torch.float32).contiguous(),
    ]


def run_triton(stage: Stage, packed: list[Tensor], x: Tensor, tile: Tile | None = None) -> Tensor:
    """Compute one stage.

    Args:
        stage: Its tensors have the dtype and device of `x`.
        packed: `pack_triton(stage)`.
        x: Shape (N, in_channels, H, W); what is not channels last is copied.
        tile: How the kernel is cut up. Default: the fastest, timed the first time that these sizes come.

    Returns:
        Shape (N, out_channels, H', W'), channels last.

    Raises:
        ShapeError: If the input does not fit.
    """
    check_input(stage.settings, stage.kernel, stage.in_channels, x)
    expand, project, indices, constants = packed
    pixels = x.permute(0, 2, 3, 1).contiguous()  # shape: (N, H, W, in_channels)
    product_map = F.linear(pixels, expand) if expand.numel() else pixels
    sums = wrapped_sums(stage, product_map, indices, constants, tile)
    last = stage.settings.activations[2]
    if stage.settings.residual and last == "identity":
        flat = torch.addmm(pixels.flatten(0, 2), sums.flatten(0, 2), project.t())
        return flat.view(pixels.shape).permute(0, 3, 1, 2)
    y = activate(F.linear(sums, project), last)
    return (y + pixels if stage.settings.residual else y).permute(0, 3, 1, 2)


def wrapped_sums(
    stage: Stage, product_map: Tensor, indices: Tensor, constants: Tensor, tile: Tile | None = None
) -> Tensor:
    """Interpolation, batch norm, activation, depthwise, batch norm, activation, wrapping: the kernel alone.

    Args:
        stage: For its sizes.
        product_map: Shape (N, H, W, P), contiguous.
        indices: From `pack_triton`.
        constants: Likewise.
        tile: As in `run_triton`.

    Returns:
        Shape (N, H', W', Z): the sums, a one, zeros.
    """
    batch, height, width, _ = product_map.shape
    rows, columns = output_size(stage.settings, stage.kernel, height, width)
    size = indices.shape[2]
    sums = product_map.new_empty(batch, rows, columns, _aligned(size + 1))
    if sums.numel():
        _launch(stage, product_map, sums, indices, constants, tile)
    return sums


def block_size(size: int, moves: bool) -> int:
    """Lanes of a program: tiles stay whole where sums move between lanes, and as few lanes as may be idle."""
    if not moves:
        return 128
    fitting = [block for block in (128, 256, 512, _LARGEST_BLOCK) if block >= size]
    used = {block: block // size * size / block for block in fitting[:2]}
    first = fitting[0]
    return next((block for block in used if used[block] > used[first] + 0.1), first)


def kernel_arguments(stage: Stage, product_map: Tensor, sums: Tensor, packed: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Everything that the kernel takes but the pointers and the tile."""
    settings, taps, (indices, constants) = stage.settings, stage.taps_out, packed
    assert taps is not None
    upper = constants.shape[1] - 5 - stage.kernel**2
    return {
        "layers": len(indices),
        "batch": len(product_map),
        "height": product_map.shape[1],
        "width": product_map.shape[2],
        "out_height": sums.shape[1],
        "out_width": sums.shape[2],
        "P_CHANNELS": product_map.shape[3],
        "Z_CHANNELS": sums.shape[3],
        "SIZE": indices.shape[2],
        "GROUP": taps.group,
        "KERNEL": stage.kernel,
        "STRIDE": settings.stride,
        "PADDING": settings.padding,
        "FIRST": ACTIVATIONS.index(settings.activations[0]),
        "SECOND": ACTIVATIONS.index(settings.activations[1]),
        "UPPER_IN": indices.shape[1] - 1,
        "UPPER_OUT": upper,
        "BLOCK": block_size(indices.shape[2], bool(upper)),
    }


def _launch(
    stage: Stage, product_map: Tensor, sums: Tensor, indices: Tensor, constants: Tensor, tile: Tile | None
) -> None:
    arguments = kernel_arguments(stage, product_map, sums, (indices, constants))
    block, size = arguments["BLOCK"], arguments["SIZE"]

    def grid(meta: dict[str, Any]) -> tuple[int]:
        batch, rows, columns, _ = sums.shape
        tiles = batch * -(-rows // meta["TILE_Y"]) * -(-columns // meta["TILE_X"])
        return (-(-tiles // (block // size)) if arguments["UPPER_OUT"] else -(-tiles * size // block),)

    warps = block // _WARP
    kernel = _tuned(warps) if tile is None else _kernel()
    if tile is not None:
        arguments |= {"TILE_Y": tile.rows, "TILE_X": tile.columns, "num_warps": warps}
    kernel[grid](product_map, sums, indices, constants, **arguments)


def _kernel() -> Any:
    from epitorch.deploy._fused_triton_kernel import middle

    return middle


@cache
def _tuned(warps: int) -> Any:
    """The kernel that times `TILES` when new sizes come and keeps the fastest."""
    import triton

    tiles = TILES[:1] if triton.knobs.runtime.interpret else TILES  # the interpreter has nothing to time
    configs = [triton.Config({"TILE_Y": t.rows, "TILE_X": t.columns}, num_warps=warps) for t in tiles]
    key = ["height", "width", "layers", "SIZE", "P_CHANNELS", "KERNEL", "STRIDE", "UPPER_IN", "UPPER_OUT"]
    return triton.autotune(configs, key=key)(_kernel())


def _layers(taps: Taps) -> Tensor:
    """Expanded channels by layer and wrapped channel, -1 where there is none; shape (layers, O2)."""
    met: list[list[int]] = [[] for _ in range(taps.size)]
    for channel, position in enumerate(taps.lower.tolist()):
        met[position].append(channel)
    table = torch.full((max(map(len, met)), taps.size), -1, dtype=torch.int64, device="cpu")
    for position, channels in enumerate(met):
        table[: len(channels), position] = torch.tensor(channels, dtype=torch.int64, device="cpu")
    return table


def _constants(stage: Stage) -> Tensor:
    """By expanded channel, float64 on the CPU, shape (5 + k * k or one more, C)."""
    stage = stage.map(lambda value: value.detach().cpu())
    a, b = stage.taps_in, stage.taps_out
    assert a is not None
    assert b is not None
    assert stage.scale is not None
    assert stage.shift is not None
    assert stage.depthwise is not None
    assert stage.depthwise_bias is not None
    share, high, scale = a.fraction.double().cpu(), b.fraction.double().cpu(), stage.scale.double()
    rows = [scale * (1 - share), scale * share, stage.shift, stage.depthwise_bias, 1 - high]
    rows += [*stage.depthwise.flatten(1).T, *([high] if _upper(b) else [])]
    return torch.stack([row.double() for row in rows])


def _upper(taps: Taps) -> int:
    """1 if any channel meets two, else 0."""
    return int(bool((taps.fraction != 0).any()))


def _aligned(channels: int) -> int:
    return -(-channels // ALIGNED) * ALIGNED


def _padded(matrix: Tensor, axis: int, size: int) -> Tensor:
    missing = size - matrix.shape[axis]
    return F.pad(matrix, (0, missing) if axis else (0, 0, 0, missing))
