"""OpenVINO's model files (.xml and .bin), converted from the ONNX graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epitorch.errors import require
from epitorch.export._job import Job
from epitorch.export._onnx import Run, onnx_bytes


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


def open_openvino(path: Path, threads: int = 1) -> Run:
    """Load a file into OpenVINO on the CPU, in full precision; the call takes and returns arrays."""
    openvino = require("openvino", "openvino")
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled: Any = openvino.Core().compile_model(path, "CPU", options)
    request = compiled.create_infer_request()

    def run(arrays: list[Any]) -> list[Any]:
        result = request.infer(arrays)
        return [result[output] for output in compiled.outputs]

    return run


def run_openvino(path: Path, batches: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """Outputs of OpenVINO on one thread."""
    run = open_openvino(path)
    return [[torch.from_numpy(v.copy()) for v in run([value.numpy() for value in batch])] for batch in batches]
