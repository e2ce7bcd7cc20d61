"""Weights that an exported graph makes from int8 epitomes: taken out for a quantiser, then put back.

A static quantiser has int8 kernels for weights that are stored, with a scale for each channel. A weight that the graph
makes from an epitome is to it an activation: one scale, and the epitome stays in 32 bits. So the part of the graph
that makes weights is cut off here (`split`), its epitomes are rounded to int8, the weights that these make are stored
for the quantiser, and in its result they are made in the graph again (`put_back`): the file holds each epitome once, in
8 bits, and a scale for each output channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from epitorch.errors import ExportError, explain, require

WEIGHTED = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0, "MatMul": 0}
"""Operators whose second input is a weight, and the axis of an epitome that has a scale for each place."""


@dataclass(frozen=True)
class Split:
    """A graph in two.

    Args:
        body: `onnx.ModelProto` with every weight stored.
        maker: One without inputs that makes weights from int8 epitomes; its outputs have the weights' names in `body`.
            None where nothing is made.
        weights: What `maker` computes, by name.
    """

    body: Any
    maker: Any
    weights: dict[str, np.ndarray]


def split(model: Any) -> Split:
    """Cut off what makes weights; those made from no epitome (a parametrised layer's) are stored for good.

    Args:
        model: `onnx.ModelProto`; it is changed.
    """
    made = _made_weights(model.graph)
    if not made:
        return Split(model, None, {})
    maker = _cut_off(model, made)
    axes = _axes(maker.graph, made, {name: value.size for name, value in _computed(maker).items()})
    _round_epitomes(maker.graph, axes)
    weights = _computed(maker)
    to_tensor = require("onnx.numpy_helper", "onnx").from_array
    model.graph.initializer.extend(to_tensor(value, name) for name, value in weights.items())
    kept = {name: value for name, value in weights.items() if name in axes}
    return Split(model, _trimmed(maker, set(kept)) if kept else None, kept)


def _made_weights(graph: Any) -> dict[str, int]:
    """Weights that depend on nothing but stored tensors and are none of them; the axis of their scales."""
    stored = {tensor.name for tensor in graph.initializer}
    constant, made = set(stored), {}
    for node in graph.node:
        if node.op_type in WEIGHTED and node.input[1] in constant - stored:
            made[node.input[1]] = WEIGHTED[node.op_type]
        if all(name in constant for name in node.input if name):
            constant.update(node.output)
    return made


def _cut_off(model: Any, made: dict[str, int]) -> Any:
    """Move the nodes that only weights need into a model of their own."""
    onnx = require("onnx", "onnx")
    graph = model.graph
    needed = _needed(graph, set(made))
    rest = _needed(graph, {output.name for output in graph.output}, stop=set(made))
    nodes = [node for node in graph.node if set(node.output) & needed]
    inputs = {name for node in nodes for name in node.input}
    outputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in made]
    stored = [tensor for tensor in graph.initializer if tensor.name in inputs]
    small = onnx.helper.make_graph(nodes, "weights", [], outputs, stored)
    maker = onnx.helper.make_model(small, opset_imports=model.opset_import, ir_version=model.ir_version)
    kept = [node for node in graph.node if set(node.output) & rest]
    used = {name for node in kept for name in node.input} | {output.name for output in graph.output}
    _keep(graph.node, kept)
    _keep(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in used])
    return maker


def _trimmed(maker: Any, names: set[str]) -> Any:
    """What makes these weights alone."""
    needed = _needed(maker.graph, names)
    _keep(maker.graph.node, [node for node in maker.graph.node if set(node.output) & needed])
    _keep(maker.graph.initializer, [tensor for tensor in maker.graph.initializer if tensor.name in needed])
    _keep(maker.graph.output, [output for output in maker.graph.output if output.name in names])
    return maker


def _keep(field: Any, kept: list[Any]) -> None:
    copies = [type(entry).FromString(entry.SerializeToString()) for entry in kept]
    del field[:]
    field.extend(copies)


def _needed(graph: Any, names: set[str], stop: set[str] = frozenset()) -> set[str]:  # type: ignore[assignment]
    """Names that these are made from, themselves among them; not what is behind `stop`."""
    found = set(names) - stop
    for node in reversed(graph.node):
        if set(node.output) & found:
            found.update(name for name in node.input if name and name not in stop)
    return found


def _computed(maker: Any) -> dict[str, np.ndarray]:
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(maker.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {}), strict=True))


# ---- epitomes in 8 bits ----


def _axes(graph: Any, made: dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    """For each epitome, and each weight made from one, the axis that has a scale for each place.

    An epitome is the largest matrix that a weight is made from, and smaller than the weight.
    """
    elements = {tensor.name: _matrix_elements(tensor) for tensor in graph.initializer}
    axes: dict[str, int] = {}
    for name, axis in made.items():
        sources = [source for source in _needed(graph, {name}) if 0 < elements.get(source, 0) < sizes[name]]
        if sources:
            axes |= dict.fromkeys([max(sources, key=elements.__getitem__), name], axis)
    return axes


def _matrix_elements(tensor: Any) -> int:
    """Elements of a float tensor with two axes or more; 0 for shapes, and numbers for each block or filter."""
    onnx = require("onnx", "onnx")
    matrix = tensor.data_type == onnx.TensorProto.FLOAT and sum(size > 1 for size in tensor.dims) > 1
    return int(np.prod(tensor.dims)) if matrix else 0


def _round_epitomes(graph: Any, axes: dict[str, int]) -> None:
    """Store each epitome as int8 with a scale for each row; three nodes make it again.

    Not `DequantizeLinear`: ONNX Runtime keeps that one for a kernel and would make the weight in every pass; and a
    `Cast` with a `Mul` right behind it OpenVINO keeps likewise. What stands here both fold when they load the file.
    """
    for tensor in [tensor for tensor in graph.initializer if tensor.name in axes]:
        stored, nodes = _rounded(tensor, axes[tensor.name])
        graph.initializer.remove(tensor)
        graph.initializer.extend(stored)
        _keep(graph.node, [*nodes, *graph.node])


def _rounded(tensor: Any, axis: int) -> tuple[list[Any], list[Any]]:
    """Tensors and nodes that make an epitome from int8."""
    onnx = require("onnx", "onnx")
    values = onnx.numpy_helper.to_array(tensor)
    rounded, scale = round_rows(values, axis)
    parts = {"int8": rounded.reshape(-1), "shape": np.array(values.shape), "scale": scale}
    names = {part: f"{tensor.name}.{part}" for part in (*parts, "cast", "shaped")}
    nodes = [
        onnx.helper.make_node("Cast", [names["int8"]], [names["cast"]], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Reshape", [names["cast"], names["shape"]], [names["shaped"]]),
        onnx.helper.make_node("Mul", [names["shaped"], names["scale"]], [tensor.name]),
    ]
    return [onnx.numpy_helper.from_array(value, names[part]) for part, value in parts.items()], nodes


def round_rows(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8.

    Args:
        values: Any shape.
        axis: That has a scale for each place.

    Returns:
        Whole numbers from -127 to 127, and scales (axes of size 1 but for `axis`): their product is about `values`.
    """
    others = tuple(k for k in range(values.ndim) if k != axis)
    largest = np.abs(values).max(axis=others, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.clip(np.rint(values / scale), -127, 127).astype(np.int8), scale


# ---- back ----


def put_back(model: Any, parts: Split) -> None:
    """Let a quantised graph make its weights.

    Args:
        model: `onnx.ModelProto` from ONNX Runtime's quantiser, made of `parts.body`; it is changed.
        parts: From `split`.
    """
    if parts.maker is None:
        return
    graph, maker = model.graph, parts.maker.graph
    nodes = [*maker.node, *(node for name in parts.weights for node in _rounding(graph, name))]
    dropped = {*parts.weights, *(_quantized(name) for name in parts.weights)}
    stored = {tensor.name for tensor in graph.initializer}
    initializers = [tensor for tensor in graph.initializer if tensor.name not in dropped]
    initializers += [tensor for tensor in maker.initializer if tensor.name not in stored]
    _keep(graph.initializer, initializers)
    _keep(graph.node, [*nodes, *graph.node])


def _quantized(name: str) -> str:
    return f"{name}_quantized"  # as ONNX Runtime names it


def _rounding(graph: Any, name: str) -> list[Any]:
    """The node that rounds a weight with the scales that the quantiser chose; none where it left the weight alone."""
    onnx = require("onnx", "onnx")
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] == _quantized(name):
            attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
            inputs = [name, *node.input[1:]]
            return [onnx.helper.make_node("QuantizeLinear", inputs, [_quantized(name)], **attributes)]
    return []


def check_quantized(total: int, left: list[str], operators: list[str]) -> None:
    """Refuse a result without an int8 weight.

    Args:
        total: Operators with weights.
        left: Those in float.
        operators: All kinds that the model has, for the message.

    Raises:
        ExportError: If nothing was quantised.
    """
    if len(left) < total:
        return
    raise ExportError(
        explain(
            "nothing in this model can be quantised",
            expected="a convolution or linear layer with a stored weight and an int8 kernel (none for transposed "
            "convolutions in ONNX Runtime)",
            got=f"{', '.join(operators)}" + (f"; in float: {', '.join(left)}" if left else ""),
            fix="export it in float: epitorch.export",
        )
    )
