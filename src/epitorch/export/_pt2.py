"""torch.export programs, and AOTInductor packages compiled from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epitorch.cost._trace import as_arguments, tensors
from epitorch.errors import ExportError, explain
from epitorch.export._job import Job

_COMPILERS = ("c++", "g++", "clang++")


def write_pt2(job: Job, path: Path) -> None:
    """Save the program."""
    torch.export.save(job.program(), path)


def write_compiled(job: Job, path: Path) -> None:
    """Compile the program for this machine."""
    torch._inductor.aoti_compile_and_package(job.program(), package_path=str(path))


def require_compiler() -> None:
    """AOTInductor writes C++.

    Raises:
        ExportError: If there is no compiler.
    """
    if not any(shutil.which(name) for name in _COMPILERS):
        raise ExportError(
            explain(
                "compiling needs a C++ compiler",
                expected=" or ".join(_COMPILERS),
                got="none on the PATH",
                fix="install one, or export with compiled=False",
            )
        )


def run_pt2(path: Path, batches: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """Outputs of a saved program."""
    return _outputs(torch.export.load(path).module(), batches)


def run_compiled(path: Path, batches: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """Outputs of a compiled package."""
    return _outputs(torch._inductor.aoti_load_package(str(path)), batches)


def _outputs(call: Any, batches: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    with torch.no_grad():
        return [[tensor.clone() for tensor in tensors(call(*as_arguments(one)))] for one in batches]
