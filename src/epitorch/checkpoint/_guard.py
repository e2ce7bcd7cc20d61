"""Building what a file asks for within bounds: a few bytes of JSON can ask for a network of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from epitorch.errors import CheckpointError, explain

LEAST = 1 << 30  # bytes that any checkpoint may build
_TIMES = 16  # a network may be so many times larger before its layers are converted
_SIZED = ("aten::empty", "aten::zeros", "aten::ones", "aten::rand", "aten::randn")  # the first argument is the shape
_OPERATIONS, _EACH = 2_000, 100  # at all, and for each tensor in the file; networks of timm need up to 13 for each


class TooLargeError(CheckpointError):
    """The network that a checkpoint describes is out of proportion to its file."""


def limits(file_bytes: int, tensors: int, max_bytes: int | None) -> Bounded:
    """The bounds for a file of so many bytes and tensors."""
    room = max(LEAST, _TIMES * file_bytes) if max_bytes is None else max_bytes
    return Bounded(room, _OPERATIONS + _EACH * tensors)


class Bounded(TorchDispatchMode):
    """Inside, torch refuses to make more than `room` bytes of tensors or to run more than `operations`.

    An operation's result is measured on the meta device before it is made. The mode holds for this thread alone.
    """

    def __init__(self, room: int, operations: int) -> None:
        super().__init__()
        self.room, self.operations = room, operations
        self._made, self._ran = 0, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its whole compiler to keep it out of the method below

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        self._ran += 1
        if self._ran > self.operations:
            raise self._refusal(f"more than {self.operations:,} operations")
        if not func.is_view and not func._schema.is_mutable:
            self._made += _bytes_of_result(func, args, given)
            if self._made > self.room:
                raise self._refusal(f"{self._made:,} bytes")
        return func(*args, **given)

    def _refusal(self, got: str) -> TooLargeError:
        return TooLargeError(
            explain(
                "the network that the configuration describes is too large for its file",
                expected=f"at most {self.room:,} bytes and {self.operations:,} operations to build it",
                got=got,
                fix="if you trust the checkpoint, give max_bytes",
            )
        )


def _bytes_of_result(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    if func._schema.name in _SIZED:  # nearly all there is: no need to run it
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return prod(args[0]) * dtype.itemsize
    names = {argument.name for argument in func._schema.arguments}
    changed = {**kwargs, **{key: value for key, value in (("device", "meta"), ("generator", None)) if key in names}}
    try:
        made = func(*tree_map(_as_meta, tuple(args)), **tree_map(_as_meta, changed))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # its size depends on values, or it is wrong
        return 0
    sizes: list[int] = []
    tree_map_only(Tensor, lambda value: sizes.append(value.numel() * value.element_size()), made)
    return sum(sizes)


def _as_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
