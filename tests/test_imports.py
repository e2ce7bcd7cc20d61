from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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
