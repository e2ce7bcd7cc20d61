"""OpenVINO's model files (.xml and .bin), converted from the ONNX graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epitorch.errors import require
from epitorch.export._job import Job
from epitorch.export._onnx import onnx_bytes


def write_openvino(job: Job, path: Path) -> None:
    """Write `path` (.xml) and the weights beside it (.bin)."""
    openvino = require("openvino", "openvino")
    source = path.with_suffix(".onnx")
    source.write_bytes(onnx_bytes(job))
    try:
        # convert_model folds constants, so that a weight made in the graph would be stored; read_model does not
        model = openvino.Core().read_model(source) if job.strategy == "size" else openvino.convert_model(source)
        for name, value in job.metadata().items():
            model.set_rt_info(value, ["epitorch", name])
        openvino.save_model(model, path, compress_to_fp16=job.compress_to_fp16)
    finally:
        source.unlink()


def run_openvino(path: Path, batches: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """Outputs of OpenVINO on one thread of the CPU, in full precision."""
    openvino = require("openvino", "openvino")
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled: Any = openvino.Core().compile_model(path, "CPU", options)
    found = []
    for arguments in batches:
        result = compiled([value.numpy() for value in arguments])
        found.append([torch.from_numpy(result[output].copy()) for output in compiled.outputs])
    return found
