"""Build hook: compile the native kernel of `epitorch.deploy.fused` if there is a C++ compiler.

The library needs nothing of torch or Python, so one build serves every version. Without a compiler, or where the
compilation fails, the package is built without it and torch's operators do its work.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("src/epitorch/deploy")
LIBRARY = PACKAGE / "_fused.so"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-w")
PORTABLE = {"kernel_portable.cpp": (), "entry.cpp": ("-fvisibility=default",)}
X86 = {
    "kernel_avx2.cpp": ("-mavx2", "-mfma"),
    "kernel_avx512.cpp": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"),
}


class NativeKernel(BuildHookInterface):
    """Compile, or say why not."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before a wheel is made, an editable one too."""
        root = Path(self.root)
        problem = "" if version == "editable" and _is_newest(root) else compile_kernel(root)
        if problem:
            self.app.display_warning(f"epitorch is built without its native kernel: {problem}")
            (root / LIBRARY).unlink(missing_ok=True)
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"


def compile_kernel(root: Path) -> str:
    """Compile every source for its instruction set; returns what went wrong, or an empty string."""
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler (g++, clang++ or $CXX)"
    sources = PORTABLE | (X86 if platform.machine().lower() in ("x86_64", "amd64") else {})
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{name}.o" for name in sources]
        running = [
            subprocess.Popen(
                [*compiler, *FLAGS, *flags, "-c", str(root / PACKAGE / "native" / name), "-o", str(target)],
                stderr=subprocess.PIPE,
                text=True,
            )
            for (name, flags), target in zip(sources.items(), objects, strict=True)
        ]
        for process in running:
            _, errors = process.communicate()
            if process.returncode:
                return f"{compiler[0]} failed: {errors.strip()[:500]}"
        made = Path(folder) / LIBRARY.name
        linked = subprocess.run(
            [*compiler, "-shared", "-pthread", "-o", str(made), *map(str, objects)], capture_output=True, text=True
        )
        if linked.returncode:
            return f"linking failed: {linked.stderr.strip()[:500]}"
        part = root / LIBRARY.with_suffix(".part")
        shutil.copyfile(made, part)
        part.replace(root / LIBRARY)  # a process that has the old one loaded keeps it
    return ""


def _is_newest(root: Path) -> bool:
    """Whether the library is there and younger than its sources: pip asks twice for an editable install."""
    sources = [*(root / PACKAGE / "native").iterdir(), root / Path(__file__).name]
    library = root / LIBRARY
    return library.exists() and library.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def _compiler() -> list[str] | None:
    if sys.platform == "win32":
        return None
    asked = os.environ.get("CXX", "").split()
    candidates = [asked] if asked else [["g++"], ["clang++"], ["c++"]]
    return next((command for command in candidates if shutil.which(command[0])), None)


def _platform_tag() -> str:
    """This machine's; the compiler makes code for one processor, also where Python itself is for two."""
    tag = sysconfig.get_platform().replace("universal2", platform.machine())
    return tag.replace("-", "_").replace(".", "_")
