"""Makes the runs of a part that are not finished yet, some at a time, and keeps what they measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.jobs import RESULT, Job
from filelock import FileLock, Timeout

from epitorch._files import write_atomic
from epitorch.errors import InputError, explain

ROOT = Path(__file__).resolve().parents[2]
GRACE = 90  # seconds for a run to write its state after SIGTERM


@dataclass(frozen=True)
class Settings:
    """How runs are made.

    Args:
        results: Folder that is committed; gets the result of every finished run.
        jobs: Runs at a time.
        threads: Of each.
        retry: Make failed ones again.
        full: The parts for a GPU.
    """

    results: Path
    jobs: int = 1
    threads: int = 1
    retry: bool = False
    full: bool = False


def make(jobs: Sequence[Job], settings: Settings) -> list[str]:
    """Make the runs; Ctrl-C stops them in order, and the same command goes on.

    Returns:
        Names of the runs that could not be made: not those in which a method failed, which is a result.

    Raises:
        InputError: If another driver is at work on the part.
    """
    folder = jobs[0].out / jobs[0].part.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".driver.lock", timeout=0):
            return _Driver(list(jobs), settings).go()
    except Timeout as error:
        raise InputError(
            explain("another driver is at work", expected="one at a time", got=str(folder), fix="wait for it to end")
        ) from error


class _Driver:
    """The runs that wait and those at work."""

    def __init__(self, jobs: list[Job], settings: Settings) -> None:
        self.jobs, self.settings = jobs, settings
        self.running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
        self.broken: list[str] = []

    def go(self) -> list[str]:
        for job in self.jobs:
            _keep(job, self.settings.results)
        waiting = [job for job in self.jobs if not self._finished(job)]
        _say(f"part {self.jobs[0].part.name}: {len(self.jobs)} runs, {len(waiting)} to make")
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            self._through(waiting)
        except KeyboardInterrupt:
            self._stop()
            _say("stopped; the same command goes on")
            raise SystemExit(130) from None
        finally:
            signal.signal(signal.SIGTERM, before)
        return self.broken

    def _through(self, waiting: list[Job]) -> None:
        while waiting or self.running:
            while len(self.running) < self.settings.jobs and (job := self._next(waiting)) is not None:
                self._begin(job)
            if not self.running:
                self.broken += [f"{job.name} (needs a run that is not there)" for job in waiting]
                return
            time.sleep(0.5)
            for name in [name for name, (_, process) in self.running.items() if process.poll() is not None]:
                self._end(name)

    def _next(self, waiting: list[Job]) -> Job | None:
        """The first run whose predecessors are finished."""
        ready = (job for job in waiting if all(before.result() is not None for before in job.needed()))
        job = next(ready, None)
        if job is not None:
            waiting.remove(job)
        return job

    def _finished(self, job: Job) -> bool:
        result = job.result()
        return result is not None and not (self.settings.retry and result["status"] == "failed")

    def _begin(self, job: Job) -> None:
        (job.folder / RESULT).unlink(missing_ok=True)  # of another run, or a failed one that is made again
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / "console.log").open("wb") as log:
            # a session of its own: Ctrl-C reaches the driver alone, which then stops its runs in order
            process = subprocess.Popen(
                command_of(job, self.settings.full),
                stdout=log,
                stderr=log,
                env=_environment(self.settings),
                start_new_session=True,
            )
        self.running[job.name] = job, process
        _say(f"begun {job.name}")

    def _end(self, name: str) -> None:
        job, _ = self.running.pop(name)
        result = job.result()
        if result is None:
            self.broken.append(f"{name} (see {job.folder / 'console.log'})")
        told = "not made" if result is None else _told(result)
        _keep(job, self.settings.results)
        _say(f"ended {name}: {told}")

    def _stop(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for _, process in self.running.values():
            process.terminate()
        for _, process in self.running.values():
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def command_of(job: Job, full: bool) -> list[str]:
    """The command line that makes a run."""
    where = ["--data", str(job.data), "--out", str(job.out)]
    what = ["--part", job.part.name.removesuffix("-full"), "--method", job.method, "--budget", job.budget]
    flags = [flag for flag, on in (("--full", full), ("--smoke", job.smoke)) if on]
    return [sys.executable, "-m", "benchmarks.peers", "one", *what, "--seed", str(job.seed), *where, *flags]


def _environment(settings: Settings) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(settings.threads)}


def _told(result: dict[str, Any]) -> str:
    if result["status"] == "failed":
        return f"failed: {result['error'].splitlines()[0]}"
    measure = "agreement" if "agreement" in result else "accuracy"
    return f"{measure} {100 * result[measure]:.2f}%, {result['params']:,} parameters, {result['file_bytes']:,} bytes"


def _keep(job: Job, results: Path) -> None:
    """Copy the result to where it is committed; the first part's training has no row of its own."""
    if job.method != "start" and job.result() is not None:
        write_atomic(results / job.part.name / f"{job.name}.json", (job.folder / RESULT).read_bytes())


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)
