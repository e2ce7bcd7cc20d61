"""Make an exported ONNX graph small: nothing in the file but weights and the nodes that are needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from epitorch.errors import require
from epitorch.export._names import drop_defaults, name_graph

FOLDED = 32  # elements: larger constants are left to the runtime, which folds them in memory, not in the file


def shrink(model: Any, arguments: list[str], *, scale_made_weights: bool = False) -> None:
    """Fold small constants, merge batch norms, store equal tensors once, and drop names, types and traces.

    Args:
        model: An `onnx_ir.Model`; it is changed in place.
        arguments: Names for its inputs, if known.
        scale_made_weights: Merge batch norms into weights that the graph makes, too: a node that scales the weight.
            Runtimes do that by themselves when they load the file, quantisers do not.
    """
    ir_passes = require("onnx_ir.passes.common", "onnx")
    optimize = require("onnxscript.optimizer", "onnx").optimize
    optimize(model, input_size_limit=FOLDED, output_size_limit=FOLDED)
    _merge_batch_norms(model.graph, scale_made_weights)
    ir_passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)(model)
    ir_passes.RemoveUnusedNodesPass()(model)
    ir_passes.DeduplicateInitializersPass(size_limit=2**31)(model)
    _strip(model, arguments)


def tidy(model: Any) -> None:
    """Drop names, types and traces of inner values, and store equal tensors once; the inputs keep their names."""
    require("onnx_ir.passes.common", "onnx").DeduplicateInitializersPass(size_limit=2**31)(model)
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.shape = value.shape and value.shape.copy()  # what was read from a file cannot be changed
    _strip(model, [value.name for value in model.graph.inputs])


def _strip(model: Any, arguments: list[str]) -> None:
    model.graph.doc_string = None
    model.graph.metadata_props.clear()
    name_graph(model.graph, arguments)
    drop_defaults(model.graph, model.opset_imports[""])
    for node in model.graph:
        node.name, node.doc_string = None, None
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


# ---- batch norm ----


def _merge_batch_norms(graph: Any, scale_made_weights: bool) -> None:
    """Four vectors become two, or none where the layer before can take them: a scale and a shift per channel."""
    for node in [node for node in graph if node.op_type == "BatchNormalization"]:
        vectors = [_constant(value) for value in node.inputs[1:]]
        if any(vector is None for vector in vectors) or len(node.outputs) != 1:
            continue
        weight, bias, mean, variance = (vector.astype(np.float64) for vector in vectors if vector is not None)
        epsilon = node.attributes["epsilon"].value if "epsilon" in node.attributes else 1e-5
        scale = weight / np.sqrt(variance + epsilon)
        shift = bias - mean * scale
        if not _into_convolution(graph, node, scale, shift, scale_made_weights):
            _as_scale_and_shift(graph, node, scale, shift)


def _into_convolution(graph: Any, node: Any, scale: Any, shift: Any, scale_made_weights: bool) -> bool:
    """Multiply the weight of the convolution before, if that is stored and both are used here alone."""
    conv = node.inputs[0].producer()
    if conv is None or conv.op_type != "Conv" or len(node.inputs[0].uses()) != 1 or node.inputs[0].is_graph_output():
        return False
    bias = _bias(conv)
    weight = _scaled_weight(graph, conv, scale, scale_made_weights) if bias is not None else None
    if weight is None:
        return False
    dtype = node.inputs[1].const_value.numpy().dtype
    conv.resize_inputs(3)
    conv.replace_input_with(1, weight)
    name = (conv.inputs[1].name or "").removesuffix(".merged")
    conv.replace_input_with(2, _initializer(graph, f"{name}.bias", (bias * scale + shift).astype(dtype)))
    _replace(graph, node, conv.outputs[0])
    return True


def _bias(conv: Any) -> Any:
    """A convolution's bias; None if it is not known. One without has zeros, which the exporter may leave to expand."""
    value = conv.inputs[2] if len(conv.inputs) > 2 else None
    if value is None:
        return np.zeros(1)
    made_by = value.producer()
    if made_by is not None and made_by.op_type == "Expand":
        value = made_by.inputs[0]
    return _constant(value)


def _scaled_weight(graph: Any, conv: Any, scale: Any, scale_made_weights: bool) -> Any:
    """The weight with each filter scaled: a new tensor, or where the graph makes the weight, one more node."""
    value = conv.inputs[1]
    weight = _constant(value)
    if weight is not None and len(value.uses()) == 1:
        shaped = scale.reshape(-1, *[1] * (weight.ndim - 1))
        return _initializer(graph, f"{value.name}.merged", (weight * shaped).astype(weight.dtype))
    if not scale_made_weights or value.producer() is None or value.shape is None:
        return None
    ir = require("onnx_ir", "onnx")
    shaped = scale.reshape(-1, *[1] * (len(value.shape) - 1))
    factor = _initializer(graph, f"{value.name}.scale", shaped.astype(value.dtype.numpy()))
    times = ir.node("Mul", [value, factor])
    times.outputs[0].shape, times.outputs[0].type = value.shape, value.type
    graph.insert_before(conv, times)
    return times.outputs[0]


def _as_scale_and_shift(graph: Any, node: Any, scale: Any, shift: Any) -> None:
    ir = require("onnx_ir", "onnx")
    source, weight = node.inputs[0], node.inputs[1]
    rank = len(source.shape) if source.shape is not None else 4
    shape, dtype = (-1, *[1] * (rank - 2)), weight.const_value.numpy().dtype
    factor = _initializer(graph, f"{weight.name}.scale", scale.reshape(shape).astype(dtype))
    term = _initializer(graph, f"{weight.name}.shift", shift.reshape(shape).astype(dtype))
    times = ir.node("Mul", [source, factor])
    plus = ir.node("Add", [times.outputs[0], term])
    for new in (times, plus):
        new.outputs[0].shape, new.outputs[0].type = source.shape, source.type
    graph.insert_before(node, [times, plus])
    _replace(graph, node, plus.outputs[0])


def _replace(graph: Any, node: Any, value: Any) -> None:
    """Let `value` stand for the node's output."""
    ir = require("onnx_ir", "onnx")
    old = node.outputs[0]
    for position, output in enumerate(graph.outputs):
        if output is old:
            value.name, value.shape, value.type = old.name, old.shape, old.type
            graph.outputs[position] = value
    ir.convenience.replace_all_uses_with(old, value)
    graph.remove(node, safe=True)


def _constant(value: Any) -> Any:
    """Values of an initializer, or None."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    return value.const_value.numpy()


def _initializer(graph: Any, name: str, content: Any) -> Any:
    ir = require("onnx_ir", "onnx")
    while name in graph.initializers:
        name += "_"
    tensor = ir.tensor(content, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
