"""Ray: started here or joined by address, quiet, with the resources that a run takes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epitorch.errors import InputError, explain, require
from epitorch.sweeps.task import execute, stop_file

STORE = 80 * 2**20  # bytes of shared memory: no data pass through it


@dataclass(frozen=True)
class Resources:
    """What the runs may take.

    Args:
        jobs: Runs at a time; None is as many as fit.
        cpus: Of one run, which are its threads; None shares the machine's among `jobs`, else 1.
        gpus: Of one run, 0.5 for two on each; None is 1 where there are any, else 0.
        address: Of an existing cluster (`auto`, `ray://HOST:PORT`); None starts Ray on this machine.
    """

    jobs: int | None = None
    cpus: int | None = None
    gpus: float | None = None
    address: str | None = None


class Cluster:
    """Starts runs as Ray tasks."""

    def __init__(self, ray: Any, cpus: int, gpus: float, jobs: int | None) -> None:
        self._ray, self.cpus, self.gpus, self._jobs = ray, cpus, gpus, jobs
        self._stop: Path | None = None
        self._run = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(execute)

    def capacity(self) -> int:
        """How many runs to have at a time: as asked, else as many as fit now, at least one."""
        if self._jobs is not None:
            return self._jobs
        there = self._ray.cluster_resources()
        fit = [there.get("CPU", 0) // self.cpus]
        if self.gpus:
            fit.append(there.get("GPU", 0) // self.gpus)
        return max(1, int(min(fit)))

    def start(self, command: Sequence[str], folder: str, log: str) -> Any:
        """Start a run and return its handle."""
        self._stop = stop_file(Path(folder))
        self._stop.unlink(missing_ok=True)
        return self._run.remote(list(command), folder, log, os.getcwd(), self.cpus)

    def ended(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        """Wait until a run ends, at most so long, and return those that have."""
        return list(self._ray.wait(list(handles), num_returns=1, timeout=seconds)[0])

    def outcome(self, handle: Any) -> str | None:
        """What went wrong with a run that has ended; None is nothing."""
        try:
            code = self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            return (str(error).strip() or type(error).__name__).splitlines()[-1]
        return None if code == 0 else f"exit code {code}"

    def stop(self, handles: Sequence[Any]) -> None:
        """Ask runs to write their state and end, and wait for that; cancel those that have not begun."""
        if self._stop is None:
            return
        self._stop.touch()
        for handle in handles:
            self._ray.cancel(handle, force=False)
        for handle in handles:
            self.outcome(handle)
        self._stop.unlink(missing_ok=True)


@contextmanager
def connected(resources: Resources) -> Iterator[Cluster]:
    """Join the cluster, or start Ray here and end it after.

    Raises:
        MissingExtraError: If Ray is not installed.
        InputError: If no cluster answers at the address, or a run asks for more than there is.
    """
    with _variables(), _handlers():
        ray = require("ray", "sweep")
        ours = not ray.is_initialized()
        if ours:
            _start(ray, resources)
        try:
            yield _cluster(ray, resources)
        finally:
            if ours:
                ray.shutdown()


def _start(ray: Any, resources: Resources) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if resources.address is None:
        cpus = max((resources.jobs or 1) * _cpus(resources), _cores())
        # "local": without it Ray joins a cluster that happens to run on this machine
        ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=STORE, **quiet)
        return
    try:
        _reach(resources.address)
        ray.init(address=resources.address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            explain(
                "no Ray cluster answers",
                expected="the address of one: auto, HOST:PORT or ray://HOST:PORT",
                got=f"{resources.address}: {str(error).splitlines()[0]}",
                where="--address",
                fix="see that it runs; if it wants a token, set RAY_AUTH_MODE=token (Ray's documentation)",
            )
        ) from error


def _reach(address: str) -> None:
    """Raise OSError at once if nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _cluster(ray: Any, resources: Resources) -> Cluster:
    there = ray.cluster_resources()
    gpus = resources.gpus if resources.gpus is not None else float(bool(there.get("GPU")))
    cpus = _cpus(resources)
    for what, asked, most in (("CPU", cpus, _most(ray, "CPU")), ("GPU", gpus, _most(ray, "GPU"))):
        if asked > most:
            raise InputError(
                explain(
                    f"a run asks for more {what}s than any machine has",
                    expected=f"at most {most:g}",
                    got=f"{asked:g}",
                    where=f"--{what.lower()}s-per-run",
                )
            )
    return Cluster(ray, cpus, gpus, resources.jobs)


def _most(ray: Any, what: str) -> float:
    return max((float(node["Resources"].get(what, 0)) for node in ray.nodes() if node["Alive"]), default=0.0)


def _cpus(resources: Resources) -> int:
    if resources.cpus is not None:
        return resources.cpus
    if resources.address is not None or resources.jobs is None:
        return 1
    return max(1, _cores() // resources.jobs)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# No statistics are sent, and runs are no less urgent than the sweep itself (Ray would make them so by 15) and not the
# first that the system kills when memory runs out.
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_kill_child_processes_on_worker_exit": "0",  # our runs end by themselves, after they have written their state
    # Ray would stop runs when the machine's memory is nearly full, whoever fills it, and a run never asked Ray for any
    "RAY_memory_monitor_refresh_ms": "0",
}


@contextmanager
def _variables() -> Iterator[None]:
    """Set what Ray reads from the environment; it is put back after."""
    # Ray itself turns its tokens on in this process when it starts a cluster
    before = {key: os.environ.get(key) for key in (*_VARIABLES, "RAY_AUTH_MODE")}
    os.environ.update(_VARIABLES)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def _handlers() -> Iterator[None]:
    """Put back what Ray does to the handling of SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
