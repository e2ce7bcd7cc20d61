"""ExecuTorch programs (.pte) for XNNPACK, where the package `executorch` is installed."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from epitorch.cost._trace import tensors
from epitorch.errors import MissingExtraError, explain, require
from epitorch.export._job import Job


def require_executorch() -> None:
    """Say what to install: the package pins one torch version, so no extra of ours names it."""
    try:
        require("executorch", "executorch")
    except MissingExtraError as error:
        raise MissingExtraError(
            explain(
                "'executorch' is needed here",
                expected="the package 'executorch' of the version that goes with the installed torch",
                got="it is not installed",
                fix="pip install executorch  (1.5.1 goes with torch 2.14.1)",
            )
        ) from error


def write_executorch(job: Job, path: Path) -> None:
    """Lower to XNNPACK and write; what XNNPACK does not take runs on ExecuTorch's portable kernels."""
    exir = require("executorch.exir", "executorch")
    xnnpack = require("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch")
    lowered = exir.to_edge_transform_and_lower(job.program(), partitioner=[xnnpack.XnnpackPartitioner()])
    path.write_bytes(lowered.to_executorch().buffer)


def run_executorch(path: Path, batches: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """Outputs of ExecuTorch's runtime."""
    runtime = require("executorch.runtime", "executorch")
    # the method reads constants from the program's bytes without holding them: the program has to outlive its runs
    program = runtime.Runtime.get().load_program(path.read_bytes())
    method = program.load_method("forward")
    return [[tensor.clone() for tensor in tensors(method.execute(list(arguments)))] for arguments in batches]
