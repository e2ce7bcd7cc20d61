"""Use an installed epitorch as a user would, in an empty folder: train, export, run the file, look at the report.

PYTHON tools/smoke.py, with the Python of an environment that has `epitorch[demo,onnx,report]`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Run all steps in a temporary folder; the first that fails says so."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["EPITORCH_CACHE"] = folder
        _files()
        _commands()
        _without_torch()
    print("the installed package works")
    return 0


def _check(holds: object, what: str) -> None:
    if not holds:
        raise SystemExit(f"smoke test: {what}")


def _files() -> None:
    import epitorch.cli
    from epitorch.deploy import fused
    from epitorch.sweeps.file import sweep_names
    from epitorch.sweeps.tables import table_names
    from epitorch.training.recipe import recipe_names

    package = Path(epitorch.__file__).parent
    _check(package.is_relative_to(sys.prefix), f"{package} is not the installed package")
    for kind, names in (("recipes", recipe_names()), ("tables", table_names()), ("sweeps", sweep_names())):
        _check(len(names) > 2, f"the package lacks its {kind}")
    library = (package / "deploy" / "_fused.so").exists()
    _check(fused.native_available() == library, f"native kernel: {fused.native_problem()}")
    print(f"epitorch {epitorch.__version__} in {package}, native kernel: {'yes' if library else 'no'}")


def _commands() -> None:
    from epitorch.cli import main as epitorch

    for line in (
        "train digits/epitome --data digits --max-steps 3 --out run",
        "count run",
        "export run --to onnx --out net.onnx --data digits",
        "report run --static",
    ):
        _check(epitorch(line.split()) == 0, f"epitorch {line}")
    _check(Path("report.html").stat().st_size > 10_000, "the report is empty")
    script = Path(sys.executable).with_name("epitorch")
    said = subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout
    _check(said.startswith("epitorch "), f"epitorch --version says {said!r}")


def _without_torch() -> None:
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession("net.onnx")
    known = json.loads(session.get_modelmeta().custom_metadata_map["epitorch_input"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: np.ones((2, *known["shape"]), np.float32)})
    _check(scores.shape == (2, 10) and np.isfinite(scores).all(), "the exported network")


if __name__ == "__main__":
    sys.exit(main())
