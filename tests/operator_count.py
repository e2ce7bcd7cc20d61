"""Count what a module really executes, operator by operator, with no formula of the library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# per element of the result; a lerp is one multiply and one multiply-add, `add_(x, alpha)` one multiply-add
_PER_ELEMENT = {"aten.lerp.Scalar": 2, "aten.lerp.Tensor": 2, "aten.add_.Tensor": 1, "aten.sub_.Tensor": 1}
_BIAS = {"aten.add.Tensor"}
_MOVES = {
    "aten._to_copy",
    "aten.alias",
    "aten.cat",
    "aten.clone",
    "aten.constant_pad_nd",
    "aten.copy_",
    "aten.detach",
    "aten.fill_",
    "aten.new_zeros",
    "aten.reflection_pad1d",
    "aten.reflection_pad2d",
    "aten.reflection_pad3d",
    "aten.replication_pad1d",
    "aten.replication_pad2d",
    "aten.replication_pad3d",
    "aten.new_empty",
    "aten.empty_like",
    "aten.index_select",
    "aten.select",
    "aten.split_with_sizes",
    "aten.unbind",
    "aten.slice",
    "aten.squeeze",
    "aten.t",
    "aten.transpose",
    "aten.unsqueeze",
    "aten.view",
    "aten._unsafe_view",
    "aten.expand",
    "aten.zeros_like",
}


class Operators(TorchDispatchMode):
    """Sums multiply-adds and interpolation; refuses operators that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0
        self.interpolation = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.multiply_adds += flop_registry[packet](*args, **(kwargs or {}), out_val=output) // 2
        elif str(func) in _PER_ELEMENT:
            self.interpolation += _PER_ELEMENT[str(func)] * output.numel()
        elif str(func) not in _BIAS and str(packet) not in _MOVES:
            raise AssertionError(f"an operator that this count does not know: {func}")
        return output


class Sizes(TorchDispatchMode):
    """Records the number of elements of every tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.seen |= {tensor.numel() for tensor in _flat(output)}
        return output


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
