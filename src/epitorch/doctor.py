"""What is installed and what this machine can do: the first thing to look at, and to report, when something fails."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from epitorch import __version__
from epitorch._extras import EXTRAS
from epitorch._files import cache_dir
from epitorch.deploy._fused_native import instruction_set, native_problem
from epitorch.errors import require


@dataclass(frozen=True)
class Diagnosis:
    """What `epitorch doctor` prints. `to_dict()` is plain data, `str()` a page.

    Args:
        epitorch: Version.
        python: Version.
        platform: System and processor's kind.
        torch: Version.
        cpu: Cores, torch's threads, the widest instructions that torch uses, and OMP_NUM_THREADS.
        gpus: CUDA devices by name and bytes of memory.
        kernel: Instruction set of the native kernel for fused blocks, or why it is not there.
        packages: By extra, the version of each package, None where it is missing.
        runtimes: Versions and devices of the runtimes that are installed.
        cache: Folder, whether it can be written, free bytes of its disk.
    """

    epitorch: str
    python: str
    platform: str
    torch: str
    cpu: dict[str, Any]
    gpus: list[dict[str, Any]]
    kernel: dict[str, str | None]
    packages: dict[str, dict[str, str | None]]
    runtimes: dict[str, Any]
    cache: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def __str__(self) -> str:
        cpu, cache = self.cpu, self.cache
        gpus = ", ".join(f"{gpu['name']} ({gpu['memory'] / 2**30:.0f} GiB)" for gpu in self.gpus) or "none"
        kernel = self.kernel["instruction_set"] or f"not there: {self.kernel['problem']}"
        written = "writable" if cache["writable"] else "NOT writable"
        return "\n".join(
            [
                f"epitorch     {self.epitorch}",
                f"python       {self.python}, {self.platform}",
                f"torch        {self.torch}",
                f"CPU          {cpu['cores']} cores, {cpu['threads']} threads, {cpu['capability']}"
                + (f", OMP_NUM_THREADS={cpu['omp_num_threads']}" if cpu["omp_num_threads"] else ""),
                f"GPU          {gpus}",
                f"fused kernel {kernel}",
                *(f"{name:<12} {_runtime(found)}" for name, found in self.runtimes.items()),
                f"cache        {cache['folder']}, {written}, {cache['free'] / 2**30:.1f} GiB free",
                "",
                *(_extra(name, packages) for name, packages in self.packages.items()),
            ]
        )


def diagnose() -> Diagnosis:
    """Look at what is installed and what the machine can do. Nothing is written, and nothing leaves the machine."""
    return Diagnosis(
        epitorch=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cpu={
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        gpus=_gpus(),
        kernel={"instruction_set": instruction_set(), "problem": native_problem() or None},
        packages={extra: {name: _version(name) for name in packages} for extra, packages in EXTRAS.items()},
        runtimes={"onnxruntime": _onnxruntime(), "openvino": _openvino(), "executorch": _version("executorch")},
        cache=_cache(),
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory": device.total_memory} for device in found]


def _onnxruntime() -> dict[str, Any] | None:
    if find_spec("onnxruntime") is None:
        return None
    onnxruntime = require("onnxruntime", "onnx")
    return {"version": onnxruntime.__version__, "devices": onnxruntime.get_available_providers()}


def _openvino() -> dict[str, Any] | None:
    if find_spec("openvino") is None:
        return None
    core = require("openvino", "openvino").Core()
    return {"version": _version("openvino"), "devices": core.available_devices}


def _cache() -> dict[str, Any]:
    folder = cache_dir().expanduser()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return {"folder": str(folder), "writable": writable, "free": shutil.disk_usage(there).free}


def _runtime(found: Any) -> str:
    if found is None:
        return "not installed"
    return found if isinstance(found, str) else f"{found['version']}, {', '.join(found['devices'])}"


def _extra(name: str, packages: dict[str, str | None]) -> str:
    there = ", ".join(f"{package} {found}" for package, found in packages.items() if found)
    missing = ", ".join(package for package, found in packages.items() if not found)
    told = f"missing: {missing} (pip install 'epitorch[{name}]')" if missing else ""
    return f"[{name}]".ljust(12) + " " + "; ".join(part for part in (there, told) if part)
