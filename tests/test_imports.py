from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import epitorch

SOURCE = Path(epitorch.__file__).parent
HEAVY = (
    "torchvision",
    "timm",
    "pytorch_lightning",
    "lightning",
    "ray",
    "matplotlib",
    "plotly",
    "rich",
    "yaml",
    "pyarrow",
    "PIL",
    "sklearn",
    "safetensors",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "openvino",
    "nncf",
    "soundfile",
    "soxr",
    "webdataset",
    "triton",
    "shtab",
    "huggingface_hub",
    "httpx",
    "httpx2",
)
# Imports run one way: a module may import what stands before it, and its own package.
ORDER = [
    "errors",
    "_extras",
    "_files",
    "_inputs",
    "_rules",
    "_yaml",
    "timing",
    "progress",
    "spec",
    "functional",
    "init",
    "nn",
    "folding",
    "plans",
    "warmstart",
    "conversion",
    "optim",
    "cost",
    "deploy",
    "export",
    "tuning",
    "bench",
    "models",
]
ORDER += [
    "results",
    "checkpoint",
    "_api",
    "training",
    "sweeps",
    "report",
    "commands",
    "doctor",
    "_help",
    "_arguments",
    "_parsers",
    "_cli_models",
    "_cli_runs",
    "cli",
    "__main__",
]


def test_import_needs_torch_only() -> None:
    code = f"import sys, epitorch; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_check_above_can_fail() -> None:
    code = f"import sys, rich; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['rich']"


def test_help_needs_nothing() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from epitorch.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(['train', '--help'])\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))\n"
        "import epitorch; epitorch.convert_\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "True"]


@pytest.mark.parametrize("first", ["epitorch.deploy.fused", "epitorch.export", "epitorch.nn", "epitorch.cli"])
def test_the_public_names_are_there_whatever_is_imported_first(first: str) -> None:
    code = (
        f"import {first}, epitorch, types\n"
        "kinds = {name: type(getattr(epitorch, name)) for name in epitorch.__all__}\n"
        "assert set(kinds) <= set(dir(epitorch))\n"
        "assert not hasattr(epitorch, 'nothing')\n"
        "print(sorted(name for name, kind in kinds.items() if kind is types.ModuleType), kinds['deploy'].__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] function"


def part(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("epitorch."):
            found.add(node.module.split(".")[1])
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("epitorch.")}
    return found


def test_imports_run_one_way() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert len(files) > 30
    unknown = {part(path) for path in files} - set(ORDER)
    assert not unknown
    wrong = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in files
        for name in imported(path)
        if name != part(path) and ORDER.index(name) > ORDER.index(part(path))
    ]
    assert not wrong
