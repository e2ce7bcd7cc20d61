"""The fused inverted residual: expand, depthwise and project without ever storing the expanded channels.

Between the two 1x1 convolutions the expanded channels are interpolated copies of a few product-map channels, and
after the depthwise convolution only their wrapped sums are read (method section 5). `fuse` finds such blocks in a
deployed network; a native kernel runs them tile by tile on the CPU, a Triton kernel on a CUDA GPU, torch's operators
everywhere else.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from epitorch.deploy._fused_block import Stage
from epitorch.deploy._fused_match import own_code
from epitorch.deploy._fused_native import (
    NativeChain,
    instruction_set,
    native_available,
    native_problem,
    pack_native,
    runs_here,
    usable,
    why_not_native,
)
from epitorch.deploy._fused_op import fused_stage, packed_for
from epitorch.deploy._fused_reference import run_reference
from epitorch.deploy._fused_triton import pack_triton, run_triton, triton_available, usable_triton, why_not_triton

__all__ = [
    "FusedChain",
    "FusedConv",
    "FusedInvertedResidual",
    "FusedStage",
    "instruction_set",
    "native_available",
    "native_problem",
    "triton_available",
]


class FusedStage(nn.Module):
    """One stage of a network as a single operator, for inference; its tensors are buffers.

    Args:
        stage: What it computes; batch norms folded.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.settings = stage.settings
        self._count = len(stage.tensors())
        for number, value in enumerate(stage.tensors()):
            self.register_buffer(f"tensor_{number}", value.detach().clone(memory_format=torch.contiguous_format))
        self.refresh()

    @property
    def stage(self) -> Stage:
        """What it computes, with the tensors as they are now."""
        return Stage.of(self._tensors(), self.settings.encode())

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack for the kernel anew; loading a state and moving do it, changing a buffer in place does not."""
        self._native: NativeChain | None = None
        self._packed: list[Tensor] = _pack(self.stage)

    def forward(self, input: Tensor) -> Tensor:
        """Run the stage.

        Args:
            input: Shape (N, C, H, W).

        Returns:
            Shape (N, K, H', W'), channels last where a kernel ran.
        """
        if torch.onnx.is_in_onnx_export():
            return run_reference(self.stage, input)
        if isinstance(input, torch.fx.Proxy):  # torch.fx.symbolic_trace
            return fused_stage(input, self._tensors(), self._packed, self.settings.encode())
        if torch.compiler.is_compiling():
            if input.device.type == "cuda" and not self._packed:
                return run_reference(self.stage, input)  # the compiler fuses what follows a plain convolution
            return fused_stage(input, self._tensors(), self._packed, self.settings.encode())
        ready = packed_for(input, self._packed)
        if ready and usable(input):
            self._native = self._native or NativeChain([self.stage], [self._packed])
            return self._native(input)
        if ready and usable_triton(input):
            return run_triton(self.stage, self._packed, input)
        return run_reference(self.stage, input)

    def extra_repr(self) -> str:
        """Sizes."""
        stage = self.stage
        return f"{stage.in_channels}, {stage.out_channels}, kernel_size={stage.kernel}, stride={self.settings.stride}"

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, f"tensor_{number}") for number in range(self._count)]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.refresh()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_native": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not runs_here(self._packed):
            self.refresh()


def _pack(stage: Stage) -> list[Tensor]:
    """For the kernel of the device that the stage is on; nothing without one."""
    if stage.project.device.type == "cuda":
        return pack_triton(stage) if triton_available() and not why_not_triton(stage) else []
    if stage.project.device.type != "cpu":
        return []
    return pack_native(stage) if native_available() and not why_not_native(stage) else []


class FusedInvertedResidual(FusedStage):
    """An inverted residual, with or without its first 1x1, on the epitomes of its 1x1 convolutions."""


class FusedConv(FusedStage):
    """A convolution with its batch norm and activation: the stem, or a 1x1 at the end."""


class FusedChain(nn.Sequential):
    """An `nn.Sequential` that runs stages that follow each other, also those of chains in it, in one kernel call.

    Its children stay what they are: each works alone, and a slice is a chain of its own.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Run the children in order; shapes as in `FusedStage`.

        Args:
            input: What the first child takes.

        Returns:
            What the last child gives.
        """
        if torch.compiler.is_compiling() or not usable(input) or _has_any_global_hook():
            return super().forward(input)
        for number, run in enumerate(_runs(self)):
            input = self._call_together(number, run, input)
        return input

    def _call_together(self, number: int, run: list[Any], input: Tensor) -> Tensor:
        native = self._chain(number, run, input) if len(run) > 1 and usable(input) else None
        if native is not None:
            return native(input)
        for module in run:
            input = module(input)
        return input

    def _chain(self, number: int, run: list[Any], input: Tensor) -> NativeChain | None:
        """Made once, and anew when a stage has been packed anew; None if a stage is not packed for the kernel."""
        packed = [module._packed for module in run]
        kept: dict[int, tuple[list[list[Tensor]], NativeChain]] = self.__dict__.setdefault("_kept", {})
        made_of, native = kept.get(number, ([], None))
        if native is not None and len(made_of) == len(packed) and all(map(operator.is_, made_of, packed)):
            return native
        if not all(packed_for(input, tensors) for tensors in packed):
            return None
        kept[number] = packed, NativeChain([module.stage for module in run], packed)
        return kept[number][1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


_STAGES = (FusedStage, FusedInvertedResidual, FusedConv)


def _runs(chain: FusedChain) -> list[list[nn.Module]]:
    """The children, those of inner chains too; stages that one call can run stand together."""
    runs: list[list[nn.Module]] = []
    joined = False
    for module in _flat(chain):
        joins = type(module) in _STAGES and not own_code(module)
        if joins and joined:
            runs[-1].append(module)
        else:
            runs.append([module])
        joined = joins
    return runs


def _flat(chain: nn.Module) -> Iterator[nn.Module]:
    for module in chain._modules.values():
        assert module is not None
        if type(module) is FusedChain and not own_code(module):
            yield from _flat(module)
        else:
            yield module
