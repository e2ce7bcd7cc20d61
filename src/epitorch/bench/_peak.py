"""Peak memory of a process that loads one network and runs it: this module is that process too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch.export import open_onnx, open_openvino
from epitorch.tuning import Runtime

_MODULE = "epitorch.bench._peak"


def peak_bytes(runtime: Runtime, source: nn.Module | Path, arguments: tuple[Tensor, ...], folder: Path) -> int | None:
    """Measure in processes of their own.

    Args:
        runtime: Where the network runs.
        source: The network for torch, else its file.
        arguments: Example.
        folder: For files in between.

    Returns:
        Bytes at the peak beyond those of a process that imports the same and runs nothing; None where the system does
        not tell, or the network cannot be pickled.
    """
    inputs, file = folder / "inputs.pt", source if isinstance(source, Path) else folder / "net.pt"
    torch.save(arguments, inputs)
    if isinstance(source, nn.Module):
        try:
            torch.save(source, file)
        except Exception:  # a class that cannot be pickled cannot be sent to another process
            return None
    used, idle = _child(runtime, str(file), str(inputs)), _child(runtime)
    return None if used is None or idle is None else max(0, used - idle)


def _child(*arguments: str) -> int | None:
    done = subprocess.run([sys.executable, "-m", _MODULE, *arguments], capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None


def _run(runtime: str, file: str, inputs: str) -> None:
    arguments = torch.load(inputs, weights_only=True)
    if runtime == "torch":
        net: Any = torch.load(file, weights_only=False)  # written a moment ago by the process that started this one
        with torch.inference_mode():
            net(*arguments)
        return
    opened = open_onnx(Path(file)) if runtime == "onnxruntime" else open_openvino(Path(file))
    opened([value.numpy() for value in arguments])


def _main(runtime: str, *files: str) -> None:
    torch.set_num_threads(1)
    if runtime != "torch":
        __import__(runtime)
    if files:
        _run(runtime, *files)
    print(json.dumps(_peak_of_this_process()))


def _peak_of_this_process() -> int | None:
    """From Linux's own record: `ru_maxrss` would count the process that started this one."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


if __name__ == "__main__":
    _main(*sys.argv[1:])
