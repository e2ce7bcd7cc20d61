"""OpenVINO models in int8, by NNCF's post-training quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epitorch.errors import require
from epitorch.export._job import Job
from epitorch.export._made import Split, check_quantized, split
from epitorch.export._onnx import onnx_bytes

_KERNELS = ("Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData", "MatMul")
_LEVELS = 255  # from -127 to 127


def write_int8_openvino(job: Job, path: Path, items: list[tuple[Any, ...]]) -> tuple[str, ...]:
    """Write `path` (.xml) and the weights beside it (.bin).

    Args:
        job: What is exported.
        path: The .xml file.
        items: Inputs to calibrate on.

    Returns:
        Names of layers whose weights were left in float.

    Raises:
        ExportError: If all were.
    """
    openvino, onnx = require("openvino", "openvino"), require("onnx", "onnx")
    parts = split(onnx.load_from_string(onnx_bytes(job, scale_made_weights=True)))
    core = openvino.Core()
    model = core.read_model(parts.body.SerializeToString())
    users = _users(model, parts)
    quantized = _quantize(model, items)
    left = _float_weights(quantized)
    if parts.maker is not None:
        _make_weights(quantized, core.read_model(parts.maker.SerializeToString()), users)
    for name, value in job.metadata().items():
        quantized.set_rt_info(value, ["epitorch", name])
    openvino.save_model(quantized, path, compress_to_fp16=False)
    return left


def _quantize(model: Any, items: list[tuple[Any, ...]]) -> Any:
    nncf = require("nncf", "int8")
    names = [entry.get_any_name() for entry in model.inputs]
    data = nncf.Dataset([dict(zip(names, item, strict=True)) for item in items])
    return nncf.quantize(model, data, subset_size=len(items), target_device=nncf.TargetDevice.CPU)


def _users(model: Any, parts: Split) -> dict[tuple[str, int], str]:
    """Operators that read a weight that will be made, by name and position, which NNCF keeps; the weight's name."""
    found = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_friendly_name() in parts.weights:
            for reader in node.output(0).get_target_inputs():
                found[reader.get_node().get_friendly_name(), reader.get_index()] = node.get_friendly_name()
    return found


def _make_weights(model: Any, maker: Any, users: dict[tuple[str, int], str]) -> None:
    """Let the model make its weights, rounded with the scales that NNCF chose.

    Rounded by `FakeQuantize`, which the CPU plugin turns into int8 weights once their source is folded; what stands in
    NNCF's result (int8, `Convert`, `Multiply`) it recognises only on stored weights.
    """
    operators = require("openvino.opset13", "openvino")
    made = {
        name: result.input_value(0) for result in maker.get_results() for name in result.input(0).get_tensor().names
    }
    for node in model.get_ordered_ops():
        for (name, position), weight in users.items():
            if node.get_friendly_name() != name:
                continue
            now, source = node.input_value(position).get_node(), made[weight]
            if now.get_type_name() == "FakeQuantize":  # behind a reshape, of depthwise layers
                now.input(0).replace_source_output(source)
                continue
            scale = _scale(now)
            if scale is not None:
                low, high = operators.constant(-127 * scale), operators.constant(127 * scale)
                source = operators.fake_quantize(source, low, high, low, high, _LEVELS).output(0)
            node.input(position).replace_source_output(source)
    model.validate_nodes_and_infer_types()


def _scale(node: Any) -> Any:
    """Of int8 weights as NNCF stores them: constant, `Convert`, `Multiply`; None for float weights."""
    if node.get_type_name() != "Multiply" or node.input_value(0).get_node().get_type_name() != "Convert":
        return None
    return node.input_value(1).get_node().get_data()


def _float_weights(model: Any) -> tuple[str, ...]:
    kernels = [node for node in model.get_ordered_ops() if node.get_type_name() in _KERNELS]
    left = [node.get_friendly_name() for node in kernels if not _is_int8(_behind_reshapes(node))]
    check_quantized(len(kernels), left, sorted({node.get_type_name() for node in model.get_ordered_ops()}))
    return tuple(left)


def _is_int8(node: Any) -> bool:
    return node.get_type_name() == "FakeQuantize" or _scale(node) is not None


def _behind_reshapes(node: Any) -> Any:
    """What a weight is read from; groups are an axis of their own."""
    source = node.input_value(1).get_node()
    while source.get_type_name() in ("Reshape", "Transpose"):
        source = source.input_value(0).get_node()
    return source
