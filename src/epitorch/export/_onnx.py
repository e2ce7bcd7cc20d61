"""ONNX files: written by torch's exporter, made small, run in ONNX Runtime."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epitorch.errors import ExportError, InputError, explain, require
from epitorch.export._graph import shrink
from epitorch.export._job import Job

Run = Callable[[list[Any]], list[Any]]
OPSET = 20
_LARGEST = 2**31  # bytes of one protocol buffer


def write_onnx(job: Job, path: Path) -> None:
    """Write the model with its weights in one file."""
    path.write_bytes(onnx_bytes(job))


def onnx_bytes(job: Job, *, scale_made_weights: bool = False) -> bytes:
    """The model as a protocol buffer; `scale_made_weights` as for `shrink`.

    Raises:
        ExportError: If it is larger than a protocol buffer may be.
    """
    from epitorch import __version__

    for module in ("onnx", "onnxscript"):
        require(module, "onnx")
    program: Any = torch.onnx.export(
        job.program(), dynamo=True, opset_version=job.opset or OPSET, optimize=False, verbose=False
    )
    model = program.model
    shrink(model, _argument_names(job), scale_made_weights=scale_made_weights)
    model.producer_name, model.producer_version = "epitorch", __version__
    model.metadata_props.clear()
    model.metadata_props.update(job.metadata())
    proto = require("onnx_ir", "onnx").to_proto(model)
    del proto.graph.value_info[:]  # types and shapes of initializers stand in these already
    content: bytes = proto.SerializeToString()
    if len(content) >= _LARGEST:
        raise ExportError(
            explain("the model is too large for one ONNX file", expected=f"< {_LARGEST} bytes", got=len(content))
        )
    return content


def _argument_names(job: Job) -> list[str]:
    """Names that the model's forward has for its arguments, as far as each has one of its own."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = inspect.signature(job.net.forward).parameters.values()
    return [parameter.name for parameter in known if parameter.kind in kinds][: len(job.arguments)]


def open_onnx(path: Path, threads: int = 1) -> Run:
    """Load a file into ONNX Runtime on the CPU; the call takes and returns arrays."""
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def run_onnx(path: Path, batches: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """Outputs of ONNX Runtime on one thread."""
    run = open_onnx(path)
    return [[torch.from_numpy(value) for value in run([value.numpy() for value in batch])] for batch in batches]


def check_opset(opset: int | None) -> None:
    """Refuse what torch's exporter has no operators for."""
    if opset is not None and not (isinstance(opset, int) and 18 <= opset <= 23):
        raise InputError(explain("opset is not valid", expected="a whole number from 18 to 23", got=repr(opset)))
