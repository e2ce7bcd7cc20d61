"""The native kernel through ctypes: which library there is, and running stages in it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from epitorch.deploy._fused_block import (
    GATES,
    KINDS,
    Activation,
    Stage,
    check_input,
    check_size,
    check_stage,
    output_size,
)
from epitorch.deploy._fused_pack import Packed, pack
from epitorch.errors import EpitorchError, ShapeError, explain

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


_SQUEEZE = ("reduce", "reduce_bias", "restore", "restore_bias")
_POINTERS = ("expand", "table", "constants", "project", "bias", *_SQUEEZE)
_DTYPES = [torch.float32, torch.int32, *[torch.float32] * 7]
_OUTLINE = ("kind", "in_channels", "out_channels", "kernel", "stride", "padding")


class _Stage(ctypes.Structure):
    """Mirror of `struct Stage` in native/stage.h."""

    _fields_ = [
        *[
            (name, ctypes.c_int32)
            for name in [
                "kind",
                "in_channels",
                "out_channels",
                "kernel",
                "stride",
                "padding",
                "residual",
                "expands",
                "mid",
                "wrapped",
                "group_in",
                "group_out",
                "vectors",
                "z_floats",
                "has_upper",
                "tail_at",
                "tail_length",
                "tail_parts",
                "tail_vectors",
                "tail_blocks",
            ]
        ],
        ("activation", ctypes.c_int32 * 3),
        *[(name, ctypes.c_int32) for name in ("squeeze", "squeeze_activation", "gate")],
        ("low", ctypes.c_float * 3),
        ("high", ctypes.c_float * 3),
        *[(name, ctypes.c_float) for name in ("squeeze_low", "squeeze_high")],
        *[(name, ctypes.c_void_p) for name in _POINTERS],
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


def usable(x: Tensor) -> bool:
    """Whether the kernel can read this input: float32 on the CPU, no gradient, no autocast, no tracing."""
    plain = type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu"
    if not plain or (x.requires_grad and torch.is_grad_enabled()) or torch.is_autocast_enabled("cpu"):
        return False
    return native_available() and not watched() and holds_its_numbers(x)


def watched() -> bool:
    """Whether something follows torch's operators, which does not see a kernel: tracing, a transform, a mode."""
    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
    )


def holds_its_numbers(x: Tensor) -> bool:
    """Whether the memory of a tensor is what it means: no sparse one, no pending sign, no zeros that are not there."""
    return x.layout == torch.strided and not x.is_neg() and not x._is_zerotensor()


def runs_here(packed: list[Tensor]) -> bool:
    """Whether this processor has the vectors that a packing is for; it may come from another machine.

    Args:
        packed: From `pack_native`, for another device, or nothing.
    """
    if not packed or not packed[0].is_cpu:
        return True
    return int(packed[1]) <= LANES[instruction_set() or "portable"]


def pack_native(stage: Stage, instructions: InstructionSet | None = None) -> list[Tensor]:
    """Lay a stage out for the kernel: the struct without its pointers as bytes, then what they point to.

    Args:
        stage: It has no obstacle (`why_not_native`).
        instructions: Default: the widest that this processor has.
    """
    check_stage(stage)
    lanes = LANES[instructions or instruction_set() or "portable"]
    packed = pack(stage.map(lambda value: value.detach().cpu()), lanes)
    struct = torch.frombuffer(bytearray(_struct(stage, packed)), dtype=torch.uint8)
    parts = (packed.expand, packed.table, packed.constants, packed.project, packed.bias, *packed.squeeze)
    return [struct, torch.tensor([lanes], dtype=torch.int64, device="cpu"), *(part.contiguous() for part in parts)]


class NativeChain:
    """Packed stages ready to run.

    Args:
        stages: In order; the output of one is the input of the next.
        packed: `pack_native` of each, for the same instruction set; kept alive here.
    """

    def __init__(self, stages: list[Stage], packed: list[list[Tensor]]) -> None:
        self._outline = [(stage.settings, stage.kernel) for stage in stages]
        self._any_layout = stages[0].settings.kind == "stem"
        self._in_channels = stages[0].in_channels
        self._last = (0, 0), (0, 0)  # sizes of the last input and its output
        self._channels = stages[-1].out_channels
        self._packed = packed
        self._lanes = int(packed[0][1])
        self._structs = (_Stage * len(packed))(*(_with_pointers(tensors) for tensors in packed))
        _check_packed(stages, packed, list(self._structs))
        self._address = ctypes.addressof(self._structs)
        self._run = _library().functions.epitorch_run

    def __call__(self, x: Tensor) -> Tensor:
        """Run all stages.

        Args:
            x: float32 on the CPU, shape (N, in_channels, H, W). Only a stem first takes any memory layout as it
                is; otherwise what is not channels last is copied.

        Returns:
            Shape (N, out_channels, H', W'), channels last.

        Raises:
            ShapeError: If the input does not fit.
        """
        check_input(*self._outline[0], self._in_channels, x)
        batch, _, height, width = x.shape
        if not self._any_layout:
            x = x.contiguous(memory_format=torch.channels_last)
        rows, columns = self._output(height, width)
        y = torch.empty((batch, rows, columns, self._channels), dtype=torch.float32, device="cpu")
        strides = (ctypes.c_int64 * 4)(*x.stride())
        if y.numel():
            count, threads = len(self._outline), torch.get_num_threads()
            image = rows * columns * self._channels
            sizes = (batch, height, width)
            given = (self._lanes, self._address, count, x.data_ptr(), strides, *sizes, y.data_ptr(), image, threads)
            if self._run(*given):
                raise EpitorchError(f"this processor's library has no kernel for vectors of {self._lanes} floats")
        return y.permute(0, 3, 1, 2)

    def _output(self, height: int, width: int) -> tuple[int, int]:
        given, found = self._last
        if given == (height, width):
            return found
        rows, columns = height, width
        for settings, kernel in self._outline:
            check_size(settings, kernel, rows, columns)
            rows, columns = output_size(settings, kernel, rows, columns)
        self._last = (height, width), (rows, columns)
        return rows, columns


def _check_packed(stages: list[Stage], packed: list[list[Tensor]], structs: list[_Stage]) -> None:
    """The kernel trusts every size that it is given."""
    for stage, tensors, struct in zip(stages, packed, structs, strict=True):
        lanes = int(packed[0][1])
        got: list[Any] = [int(tensors[1]), *(value.numel() for value in tensors[2:])]
        _must_equal("packed tensors", [lanes, *_lengths(struct, lanes)], got)
        _must_equal("packed dtypes", _DTYPES, [value.dtype for value in tensors[2:]])
        s = stage.settings
        expected = [KINDS.index(s.kind), stage.in_channels, stage.out_channels, stage.kernel, s.stride, s.padding]
        _must_equal("packed sizes", expected, [getattr(struct, name) for name in _OUTLINE])
    for before, after in pairwise(stages):
        _must_equal("channels from stage to stage", before.out_channels, after.in_channels)


def _must_equal(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ShapeError(explain(f"{what} do not fit the fused stages", expected=expected, got=got))


def _lengths(s: _Stage, lanes: int) -> list[int]:
    """Numbers behind each pointer, as native/stage.h says."""
    rows = -(-s.out_channels // lanes) * lanes
    if KINDS[s.kind] != "block":
        window = s.kernel**2 if KINDS[s.kind] == "stem" else 1
        return [0, 0, 0, rows * s.in_channels * window, rows, 0, 0, 0, 0]
    expand = -(-s.mid // lanes) * lanes * s.in_channels if s.expands == 1 else 0
    constants = s.vectors * (6 + s.kernel**2) * lanes
    gates = s.vectors * lanes if s.squeeze else 0
    squeeze = [s.squeeze * gates, -(-s.squeeze // lanes) * lanes, s.squeeze * gates, gates]
    return [expand, s.vectors * (4 + 2 * lanes), constants, rows * s.wrapped, rows, *squeeze]


def _with_pointers(tensors: list[Tensor]) -> _Stage:
    sizes = [len(tensors), *(int(t.is_cpu and t.is_contiguous()) for t in tensors)]
    _must_equal("packed tensors", [2 + len(_POINTERS), *[1] * len(tensors)], sizes)
    _must_equal("bytes of the packed sizes", ctypes.sizeof(_Stage), tensors[0].nbytes)
    struct = _Stage()
    ctypes.memmove(ctypes.addressof(struct), tensors[0].data_ptr(), ctypes.sizeof(_Stage))
    for name, tensor in zip(_POINTERS, tensors[2:], strict=True):
        setattr(struct, name, tensor.data_ptr())
    return struct


def _struct(stage: Stage, packed: Packed) -> _Stage:
    s = stage.settings
    codes, lows, highs = zip(*(_CLAMPS[name] for name in s.activations), strict=True)
    a, b = stage.taps_in, stage.taps_out
    between, gate = s.squeeze or ("identity", "sigmoid")
    squeeze_code, squeeze_low, squeeze_high = _CLAMPS[between]
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
        z_floats=packed.z_floats,
        has_upper=int(packed.has_upper),
        tail_at=packed.tail_at,
        tail_length=packed.tail_length,
        tail_parts=packed.tail_parts,
        tail_vectors=packed.tail_vectors,
        tail_blocks=packed.tail_blocks,
        activation=(ctypes.c_int32 * 3)(*codes),
        squeeze=0 if stage.squeeze is None else stage.squeeze.reduce.shape[0],
        squeeze_activation=squeeze_code,
        gate=GATES.index(gate),
        squeeze_low=squeeze_low,
        squeeze_high=squeeze_high,
        low=(ctypes.c_float * 3)(*lows),
        high=(ctypes.c_float * 3)(*highs),
    )
