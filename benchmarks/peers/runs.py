"""One run: train or compress, write the file, read it back, measure."""

from __future__ import annotations

import json
import shlex
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import Any

import torch
from benchmarks.peers.common import MethodError, installed
from benchmarks.peers.jobs import RESULT, Job
from benchmarks.peers.methods import METHODS
from benchmarks.peers.trained import finished, trained
from benchmarks.peers.untrained import compared

from epitorch._files import write_atomic
from epitorch.training.devices import choose_device
from epitorch.training.setup import environment


def run(job: Job) -> dict[str, Any]:
    """Make a run and write its result; a failure of the method is a result too.

    Raises:
        MissingExtraError: If a package is missing.
        InputError: If data or folders do not fit.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    try:
        found = {"status": "done", **_measured(job)}
    except MethodError as error:
        found = _failure(error.__cause__ or error)
    result = {**_about(job), **found, "wall_seconds": time.perf_counter() - began}
    write_atomic(job.folder / RESULT, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _measured(job: Job) -> dict[str, Any]:
    if not job.part.trains:
        return compared(job)
    return trained(job) if METHODS[job.method].begins in ("fresh", "half") else finished(job)


def _failure(cause: BaseException) -> dict[str, Any]:
    shown = "".join(traceback.format_exception(cause))
    return {"status": "failed", "error": f"{type(cause).__name__}: {cause}"[:2000], "traceback": shown[-3000:]}


def _about(job: Job) -> dict[str, Any]:
    identity = job.identity()
    return {
        "identity": identity,
        **{key: identity[key] for key in ("part", "method", "budget", "seed")},
        "versions": {name: installed(name) for name in METHODS[job.method].needs},
        "environment": environment(choose_device("auto")),
        "threads": torch.get_num_threads(),
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
