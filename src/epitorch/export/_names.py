"""Names in an exported ONNX graph: those that a user meets mean something, all others are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from epitorch.errors import require

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_GENERATED = ".parametrizations.weight.original"  # torch's name of the epitome that a weight is made from
_ONES = ("strides", "dilations")


def name_graph(graph: Any, arguments: list[str]) -> None:
    """Call outputs "output", "output_1" and on, the first axis "batch"; weights keep their names, the rest is short.

    Args:
        graph: An `onnx_ir.Graph`; it is changed in place.
        arguments: Names for its inputs; others, or of another number, leave torch's.
    """
    if len(arguments) == len(graph.inputs):
        for value, name in zip(graph.inputs, arguments, strict=True):
            value.name = name
    _own_outputs(graph)
    ends = [*graph.inputs, *graph.outputs]
    for position, value in enumerate(graph.outputs):
        value.name = f"\0{position}"  # out of the way of an inner value with this name
    taken = {value.name for value in graph.inputs}
    taken |= _name_initializers(graph, taken)
    outputs = ["output" if n == 0 else f"output_{n}" for n in range(len(graph.outputs))]
    while taken & set(outputs):
        outputs = [f"{name}_" for name in outputs]
    short = _short_names("_", taken | set(outputs))
    for node in graph:
        for value in node.outputs:
            if not any(value is end for end in ends):
                value.name, value.type, value.shape = next(short), None, None
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    _name_batch(graph)


def _own_outputs(graph: Any) -> None:
    """Each output a value of its own, where a model returns an argument, a weight, or one tensor twice."""
    ir = require("onnx_ir", "onnx")
    seen: set[int] = set()
    for position, value in enumerate(graph.outputs):
        if value.producer() is None or id(value) in seen:
            node = ir.node("Identity", [value])
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            graph.append(node)
            graph.outputs[position] = node.outputs[0]
        seen.add(id(graph.outputs[position]))


def _name_initializers(graph: Any, taken: set[str]) -> set[str]:
    """Rename constants; parameters and buffers have a dot in their names, or are named for what they are."""
    values = list(graph.initializers.values())
    graph.initializers.clear()
    kept = {value.name.replace(_GENERATED, ".epitome") for value in values if "." in value.name}
    short = _short_names("c", taken | kept)
    used: set[str] = set()
    for value in values:
        name = value.name.replace(_GENERATED, ".epitome") if "." in value.name else next(short)
        value.name = next(short) if name in used else name
        value.const_value.name = value.name
        used.add(value.name)
        graph.register_initializer(value)
    return used


def _short_names(start: str, taken: set[str]) -> Iterator[str]:
    return (name for n in count() if (name := start + _digits(n)) not in taken)


def _digits(n: int) -> str:
    return np.base_repr(n, len(_DIGITS)).lower()


def _name_batch(graph: Any) -> None:
    ir = require("onnx_ir", "onnx")
    symbols = {value.shape[0].value for value in graph.inputs if isinstance(value.shape[0], ir.SymbolicDim)}
    for value in [*graph.inputs, *graph.outputs]:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                text = size.value
                for symbol in symbols - {None}:
                    text = re.sub(rf"\b{re.escape(symbol)}\b", "batch", text)
                value.shape[axis] = ir.SymbolicDim(text)


# ---- attributes ----


def drop_defaults(graph: Any, opset: int) -> None:
    """Leave out attributes that say what holds without them."""
    schema = require("onnx.defs", "onnx").get_schema
    for node in graph:
        known = schema(node.op_type, opset, node.domain).attributes
        for name, attribute in list(node.attributes.items()):
            if _is_default(name, attribute.value, known.get(name)):
                del node.attributes[name]


def _is_default(name: str, value: Any, known: Any) -> bool:
    if name in _ONES and all(number == 1 for number in value):
        return True
    if name == "pads" and all(number == 0 for number in value):
        return True
    if known is None or known.required or not known.default_value.type:
        return False
    default = require("onnx.helper", "onnx").get_attribute_value(known.default_value)
    return bool(value == (default.decode() if isinstance(default, bytes) else default))
