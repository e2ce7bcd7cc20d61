"""Milliseconds of the trained networks, one after the other in every round, in ONNX Runtime and in OpenVINO."""

from __future__ import annotations

import copy
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.common import installed, load_final
from benchmarks.peers.jobs import Job
from benchmarks.peers.methods import METHODS
from torch import Tensor, nn

import epitorch
from epitorch._files import write_atomic
from epitorch.errors import InputError, explain
from epitorch.export import export, open_onnx, open_openvino
from epitorch.nn import EpitomeLayer
from epitorch.timing import Times, alternate, busy_clock, torch_threads
from epitorch.training.setup import environment

RUNTIMES = ("onnxruntime", "openvino")
Call = Callable[[], object]


def time_all(jobs: Sequence[Job], results: Path, *, rounds: int = 30) -> Path:
    """Time the finished networks of the first seed and write `latency.json`.

    Networks with epitomes are deployed for the runtime by measurement (`strategy="auto"`), all others are exported as
    they are. A network that differs from another's in its file alone is not timed again.

    Args:
        jobs: Of one part.
        results: Folder of the results.
        rounds: How often each network is timed.

    Raises:
        InputError: If no network is finished.
    """
    chosen = _timed(jobs)
    if not chosen:
        raise InputError(explain("no network is finished", expected="at least one", got=f"{len(jobs)} runs to make"))
    example = torch.zeros(1, *chosen[0].part.shape)
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    for runtime in RUNTIMES:
        with tempfile.TemporaryDirectory() as folder, torch_threads(1):
            calls = _ready(chosen, example, runtime, Path(folder), failures)
            times = alternate({name: call for name, (call, _) in calls.items()}, rounds=rounds, clock=busy_clock(1))
            rows += _rows(chosen, calls, times, runtime)
    report = {
        "part": chosen[0].part.name,
        "rows": rows,
        "failures": failures,
        "rounds": rounds,
        "clock": "processor time",
        "threads": 1,
        "batch": 1,
        "input": list(example.shape[1:]),
        "versions": {name: installed(name) for name in (*RUNTIMES, "onnx")},
        "environment": environment(torch.device("cpu")),
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    file = results / chosen[0].part.name / "latency.json"
    write_atomic(file, (json.dumps(report, indent=1) + "\n").encode())
    return file


def _timed(jobs: Sequence[Job]) -> list[Job]:
    first = min(job.seed for job in jobs)
    own = [job for job in jobs if job.seed == first and job.method != "start" and not METHODS[job.method].timed_as]
    return [job for job in own if (job.result() or {}).get("status") == "done"]


def _ready(
    jobs: Sequence[Job], example: Tensor, runtime: str, folder: Path, failures: list[dict[str, str]]
) -> Mapping[str, tuple[Call, int]]:
    calls: dict[str, tuple[Call, int]] = {}
    for job in jobs:
        try:
            calls[job.name] = _call(job, example, runtime, folder / job.name)
        except Exception as error:  # exporters and runtimes may raise anything; the others go on
            told = f"{type(error).__name__}: {error}"[:1500]
            failures.append({"method": job.method, "budget": job.budget, "runtime": runtime, "error": told})
    return calls


def _call(job: Job, example: Tensor, runtime: str, stem: Path) -> tuple[Call, int]:
    """One pass, and the bytes of the file that it runs."""
    file = job.result() or {}
    stored = job.folder / file["file"] if file.get("file", "").endswith(".onnx") else None
    if stored is None:
        stored = stem.with_name(f"{stem.name}{'.onnx' if runtime == 'onnxruntime' else '.xml'}")
        target: Any = "onnx" if runtime == "onnxruntime" else "openvino"
        export(_deployed(load_final(job).model, example, runtime), example, target, stored, dynamic="none")
    run = (open_onnx if runtime == "onnxruntime" else open_openvino)(stored)
    feeds = [example.numpy()]
    return lambda: run(feeds), sum(part.stat().st_size for part in _files(stored))


def _deployed(model: nn.Module, example: Tensor, runtime: Any) -> nn.Module:
    if any(isinstance(layer, EpitomeLayer) for layer in model.modules()):
        return epitorch.deploy(model, example, "auto", runtime=runtime, progress=False)
    return copy.deepcopy(model).eval()


def _files(stored: Path) -> list[Path]:
    weights = stored.with_suffix(".bin")
    return [stored, weights] if stored.suffix == ".xml" and weights.exists() else [stored]


def _rows(
    jobs: Sequence[Job], calls: Mapping[str, tuple[Call, int]], times: Mapping[str, Times], runtime: str
) -> list[dict[str, Any]]:
    whole = next((times[job.name] for job in jobs if job.method == "dense" and job.name in times), None)
    rows = []
    for job in [job for job in jobs if job.name in times]:
        taken = times[job.name]
        rows.append(
            {
                "method": job.method,
                "budget": job.budget,
                "seed": job.seed,
                "runtime": runtime,
                "milliseconds": 1e3 * taken.median,
                "quartiles": [1e3 * value for value in taken.quartiles],
                "speedup_over_dense": None if whole is None else taken.speedup_over(whole).median,
                "runtime_file_bytes": calls[job.name][1],
            }
        )
    return rows
