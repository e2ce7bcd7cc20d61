"""ONNX files in int8: ONNX Runtime's static quantisation, QuantizeLinear and DequantizeLinear around each operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epitorch.errors import require
from epitorch.export._graph import tidy
from epitorch.export._job import Job
from epitorch.export._made import WEIGHTED, check_quantized, put_back, split
from epitorch.export._onnx import onnx_bytes

# no ConvTranspose: there is no int8 kernel, so that its weight would be made float again in every pass
_ALWAYS = (
    "Conv",
    "Gemm",
    "MatMul",
    "Relu",
    "Clip",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "MaxPool",
)
# not where channels are mixed: each piece of a rotation would get scales of its own
_UNMIXED = ("Add", "Mul", "Concat", "Split", "Slice", "Gather", "Pad", "AveragePool", "GlobalAveragePool", "Resize")


class Reader:
    """Calibration inputs, one after another, as ONNX Runtime asks for them.

    Args:
        names: Of the model's inputs.
        items: Arrays for each of them.
    """

    def __init__(self, names: list[str], items: list[tuple[Any, ...]]) -> None:
        self._items = iter([dict(zip(names, item, strict=True)) for item in items])

    def get_next(self) -> dict[str, Any] | None:
        """The next one; None behind the last."""
        return next(self._items, None)


def write_int8_onnx(job: Job, path: Path, items: list[tuple[Any, ...]]) -> tuple[str, ...]:
    """Write the model with int8 weights and activations.

    Args:
        job: What is exported.
        path: The file.
        items: Inputs to calibrate on.

    Returns:
        Names of weights that were left in float.

    Raises:
        ExportError: If all were.
    """
    onnx = require("onnx", "onnx")
    proto = onnx.load_from_string(onnx_bytes(job, scale_made_weights=True))
    described = list(proto.metadata_props)
    parts = split(proto)
    for number, node in enumerate(parts.body.graph.node):
        node.name = f"n{number}"
    _quantize(parts.body, path, items, _ALWAYS if job.strategy == "reuse" else (*_ALWAYS, *_UNMIXED))
    quantized = onnx.load(path)
    left = _float_weights(quantized.graph)
    put_back(quantized, parts)
    path.write_bytes(_tidied(quantized, described))
    return left


def _quantize(body: Any, path: Path, items: list[tuple[Any, ...]], types: tuple[str, ...]) -> None:
    quantization = require("onnxruntime.quantization", "onnx")
    prepared = path.with_suffix(".prepared.onnx")
    try:
        # no optimisation: batch norms are merged, and weights must keep their names
        quantization.quant_pre_process(body, prepared, skip_optimization=True, skip_symbolic_shape=True)
        quantization.quantize_static(
            prepared,
            path,
            Reader([value.name for value in body.graph.input], items),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=list(types),
            nodes_to_exclude=_left_in_float(body.graph),
            calibration_providers=["CPUExecutionProvider"],
        )
    finally:
        prepared.unlink(missing_ok=True)


def _left_in_float(graph: Any) -> list[str]:
    """Scales and shifts of single channels: one int8 scale over all channels would round small ones away."""
    stored = {tensor.name for tensor in graph.initializer}
    constant = set(stored)
    for node in graph.node:
        if all(name in constant for name in node.input if name):
            constant.update(node.output)
    return [node.name for node in graph.node if node.op_type in ("Add", "Mul") and set(node.input) & constant]


def _float_weights(graph: Any) -> tuple[str, ...]:
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    readers = [node for node in graph.node if node.op_type in WEIGHTED]
    left = [node.input[1] for node in readers if made_by.get(node.input[1]) != "DequantizeLinear"]
    check_quantized(len(readers), left, sorted({node.op_type for node in graph.node}))
    return tuple(dict.fromkeys(left))


def _tidied(model: Any, described: list[Any]) -> bytes:
    from epitorch import __version__

    ir = require("onnx_ir", "onnx")
    made = ir.from_proto(model)
    tidy(made)
    proto = ir.to_proto(made)
    del proto.graph.value_info[:], proto.metadata_props[:]
    proto.metadata_props.extend(described)
    proto.producer_name, proto.producer_version = "epitorch", __version__
    content: bytes = proto.SerializeToString()
    return content
