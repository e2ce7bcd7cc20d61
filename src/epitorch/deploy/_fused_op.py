"""The fused stage as an operator that torch.compile and torch.export keep as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from epitorch.deploy._fused_block import Stage, check_input, output_size
from epitorch.deploy._fused_native import NativeChain, runs_here, usable
from epitorch.deploy._fused_reference import run_reference
from epitorch.deploy._fused_triton import run_triton, usable_triton


def packed_for(x: Tensor, packed: list[Tensor]) -> bool:
    """Whether there is a packing, on the device of `x` and for its kernel: a traced graph may have moved one."""
    if not packed or packed[0].device != x.device:
        return False
    return (packed[0].dtype == torch.uint8) == x.is_cpu  # the native kernel's begins with bytes


@torch.library.custom_op("epitorch::fused_stage", mutates_args=())
def fused_stage(x: Tensor, tensors: list[Tensor], packed: list[Tensor], settings: list[int]) -> Tensor:
    """Run one stage: by the kernel of the device where that is possible, else by torch's operators.

    Args:
        x: Shape (N, C, H, W).
        tensors: `Stage.tensors()`, in the dtype and on the device of `x`.
        packed: The same for the kernel (`pack_native`, `pack_triton`), or nothing.
        settings: `Settings.encode()`.

    Returns:
        Shape (N, K, H', W'), channels last.
    """
    stage = Stage.of(tensors, settings)
    ready = packed_for(x, packed)
    if ready and usable(x) and runs_here(packed):
        return NativeChain([stage], [packed])(x)
    if ready and usable_triton(x):
        return run_triton(stage, packed, x)
    return run_reference(stage, x).contiguous(memory_format=torch.channels_last)


@fused_stage.register_fake
def _(x: Tensor, tensors: list[Tensor], packed: list[Tensor], settings: list[int]) -> Tensor:
    stage = Stage.of(tensors, settings)
    check_input(stage.settings, stage.kernel, stage.in_channels, x)
    rows, columns = output_size(stage.settings, stage.kernel, x.shape[2], x.shape[3])
    return x.new_empty(x.shape[0], rows, columns, stage.out_channels).permute(0, 3, 1, 2)
