"""The native kernel through ctypes: which library there is, and running stages in it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from epitorch.deploy._fused_block import KINDS, Activation, Stage
from epitorch.deploy._fused_pack import Packed, pack

LIBRARY = Path(__file__).parent / "_fused.so"
InstructionSet = Literal["avx512", "avx2", "portable"]
LANES: dict[InstructionSet, int] = {"avx512": 16, "avx2": 8, "portable": 4}
KERNELS = (3, 5, 7)

# code in the kernel, lower and upper bound
_CLAMPS: dict[Activation, tuple[int, float, float]] = {
    "identity": (0, -float("inf"), float("inf")),
    "relu": (0, 0.0, float("inf")),
    "relu6": (0, 0.0, 6.0),
    "silu": (1, 0.0, 0.0),
    "hardswish": (2, 0.0, 0.0),
}


class _Stage(ctypes.Structure):
    """Mirror of `struct Stage` in native/stage.h."""

    _fields_ = [  # noqa: RUF012 - ctypes wants a plain list
        *[
            (name, ctypes.c_int32)
            for name in (
                "kind in_channels out_channels kernel stride padding residual expands mid wrapped group_in group_out "
                "vectors z_vectors has_upper tail_at tail_length tail_vectors tail_blocks"
            ).split()
        ],
        ("activation", ctypes.c_int32 * 3),
        ("low", ctypes.c_float * 3),
        ("high", ctypes.c_float * 3),
        *[(name, ctypes.c_void_p) for name in ("expand", "table", "constants", "project", "bias")],
    ]


@dataclass(frozen=True)
class _Library:
    functions: Any
    problem: str = ""


@cache
def _library() -> _Library:
    if not LIBRARY.exists():
        return _Library(None, f"the package was built without its kernel ({LIBRARY.name} is missing)")
    try:
        functions = ctypes.CDLL(str(LIBRARY))
        size = functions.epitorch_stage_size()
    except (OSError, AttributeError) as error:
        return _Library(None, f"{LIBRARY.name} does not load: {error}")
    if size != ctypes.sizeof(_Stage):
        return _Library(None, f"{LIBRARY.name} is of another version")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    functions.epitorch_run.argtypes = [
        *(number, pointer, number, pointer, pointer, number, number, number, pointer, ctypes.c_int64, number)
    ]
    return _Library(functions)


def native_available() -> bool:
    """Whether the native kernel of `FusedInvertedResidual` is there; otherwise torch's operators do its work."""
    return not _library().problem


def native_problem() -> str:
    """Why the native kernel is not there; empty if it is."""
    return _library().problem


def instruction_set() -> InstructionSet | None:
    """The widest instruction set that this processor has a kernel for; None without the library."""
    library = _library()
    if library.problem:
        return None
    lanes = library.functions.epitorch_widest()
    return next(name for name in get_args(InstructionSet) if LANES[name] == lanes)


def why_not_native(stage: Stage) -> str:
    """Why the kernel cannot run a stage; empty if it can."""
    s = stage.settings
    if s.kind != "block":
        return ""
    if stage.kernel not in KERNELS:
        return f"depthwise kernel {stage.kernel}: the kernel has {', '.join(map(str, KERNELS))}"
    if s.stride not in (1, 2):
        return f"depthwise stride {s.stride}: the kernel has 1 and 2"
    return ""


class NativeChain:
    """Stages packed for one instruction set; they share no memory with what they were made of.

    Args:
        stages: In order; the output of one is the input of the next. None has an obstacle (`why_not_native`).
        instructions: Default: the widest that this processor has.
    """

    def __init__(self, stages: list[Stage], instructions: InstructionSet | None = None) -> None:
        self.stages = stages
        self._lanes = LANES[instructions or instruction_set() or "portable"]
        self._packed = [pack(stage.map(lambda value: value.detach().cpu()), self._lanes) for stage in stages]
        structs = [_struct(stage, packed) for stage, packed in zip(stages, self._packed, strict=True)]
        self._structs = (_Stage * len(stages))(*structs)
        self._address = ctypes.addressof(self._structs)
        self._run = _library().functions.epitorch_run

    def __call__(self, x: Tensor) -> Tensor:
        """Run all stages.

        Args:
            x: float32 on the CPU, shape (N, in_channels, H, W). Only a stem first takes any memory layout as it
                is; otherwise what is not channels last is copied.

        Returns:
            Shape (N, out_channels, H', W'), channels last.
        """
        batch, _, height, width = x.shape
        if self.stages[0].settings.kind != "stem":
            x = x.contiguous(memory_format=torch.channels_last)
        rows, columns = height, width
        for stage in self.stages:
            rows, columns = stage.output_size(rows, columns)
        channels = self.stages[-1].out_channels
        y = torch.empty((batch, rows, columns, channels))
        strides = (ctypes.c_int64 * 4)(*x.stride())
        image = rows * columns * channels
        if y.numel():
            self._run(
                self._lanes,
                self._address,
                len(self.stages),
                x.data_ptr(),
                strides,
                batch,
                height,
                width,
                y.data_ptr(),
                image,
                torch.get_num_threads(),
            )
        return y.permute(0, 3, 1, 2)


def _struct(stage: Stage, packed: Packed) -> _Stage:
    s = stage.settings
    codes, lows, highs = zip(*(_CLAMPS[name] for name in s.activations), strict=True)
    a, b = stage.taps_in, stage.taps_out
    return _Stage(
        kind=KINDS.index(s.kind),
        in_channels=stage.in_channels,
        out_channels=stage.out_channels,
        kernel=stage.kernel,
        stride=s.stride,
        padding=s.padding,
        residual=int(s.residual),
        expands=1 if stage.expand is not None else 2 * int(packed.doubled),
        mid=a.size if a else 0,
        wrapped=b.size if b else 0,
        group_in=s.group_in,
        group_out=s.group_out,
        vectors=len(packed.table),
        z_vectors=packed.z_vectors,
        has_upper=int(packed.has_upper),
        tail_at=packed.tail_at,
        tail_length=packed.tail_length,
        tail_vectors=packed.tail_vectors,
        tail_blocks=packed.tail_blocks,
        activation=(ctypes.c_int32 * 3)(*codes),
        low=(ctypes.c_float * 3)(*lows),
        high=(ctypes.c_float * 3)(*highs),
        expand=packed.expand.data_ptr(),
        table=packed.table.data_ptr(),
        constants=packed.constants.data_ptr(),
        project=packed.project.data_ptr(),
        bias=packed.bias.data_ptr(),
    )
