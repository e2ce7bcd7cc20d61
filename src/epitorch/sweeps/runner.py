"""Makes the runs that are not finished yet, some at a time, and goes on where one fails."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from epitorch.errors import EpitorchError, InputError, explain
from epitorch.sweeps.cluster import Cluster, Resources, connected
from epitorch.sweeps.jobs import Budget, Job, command_of, data_of, finished, refuse_changed, state_of, write_recipes
from epitorch.sweeps.progress import Reporter
from epitorch.training.data_kinds import Kind, find_data, kind_of

LOCK = ".driver.lock"
POLL = 1.0


@dataclass(frozen=True)
class Failed:
    """A run that did not finish, and why."""

    job: Job
    problem: str


def run_jobs(
    jobs: Sequence[Job],
    budget: Budget,
    resources: Resources,
    *,
    overwrite: bool = False,
    after: Callable[[], None] = lambda: None,
    console: Console | None = None,
) -> list[Failed]:
    """Make the runs that are not finished; unfinished ones go on where their last saved state was.

    Args:
        jobs: All of them in one folder.
        budget: What they share.
        resources: What they may take.
        overwrite: Begin those anew whose recipe, seed, data or number of steps is another than their folder's.
        after: Called at the start and after every run.
        console: For progress; default standard error.

    Returns:
        The runs that failed.

    Raises:
        InputError: If a folder holds another run and `overwrite` is off, or another sweep is at work there.
        DataError: If the data are not there; on an existing cluster the runs find out.
        KeyboardInterrupt: After Ctrl-C, once the runs have written their state.
    """
    out = jobs[0].folder.parent
    console = console or Console(stderr=True)
    if resources.address is None:  # on a cluster the data may lie on other machines
        _find_data([job for job in jobs if finished(job, budget) is None], budget)
    with _claimed(out):
        if not overwrite:
            refuse_changed(jobs, budget)
        write_recipes(list({job.method.label: job.method for job in jobs}.values()), out)
        waiting = [job for job in jobs if finished(job, budget) is None]
        after()
        if not waiting:
            console.print(f"all {len(jobs)} runs were finished before", highlight=False)
            return []
        with connected(resources) as cluster, _terminable() as asked:
            reporter = Reporter(len(jobs), len(jobs) - len(waiting), cluster.capacity, console)
            with reporter.shown():
                return _Work(cluster, budget, overwrite, reporter, after, asked).through(waiting)


def _find_data(jobs: Sequence[Job], budget: Budget) -> None:
    found: list[tuple[str, Kind]] = []
    for job in jobs:
        wanted = data_of(job, budget), kind_of(job.method.recipe)
        if wanted not in found:
            find_data(*wanted)
            found.append(wanted)


class _Work:
    """The runs that wait and those at work."""

    def __init__(
        self,
        cluster: Cluster,
        budget: Budget,
        overwrite: bool,
        reporter: Reporter,
        after: Callable[[], None],
        asked: threading.Event,
    ) -> None:
        self._cluster, self._budget, self._overwrite = cluster, budget, overwrite
        self._reporter, self._after, self._asked = reporter, after, asked
        self._running: dict[Any, Job] = {}

    def through(self, waiting: Sequence[Job]) -> list[Failed]:
        queue, failed = list(waiting), []
        try:
            while queue or self._running:
                while queue and len(self._running) < self._cluster.capacity():
                    self._begin(queue.pop(0))
                for handle in self._cluster.ended(list(self._running), POLL):
                    failed += self._end(handle)
                if self._asked.is_set():
                    raise SystemExit(128 + signal.SIGTERM)
        except BaseException:
            self._stop()
            raise
        return failed

    def _begin(self, job: Job) -> None:
        overwrite = self._overwrite and state_of(job, self._budget) == "changed"
        command = command_of(job, self._budget, overwrite=overwrite)
        if overwrite:
            job.log.unlink(missing_ok=True)
        self._running[self._cluster.start(command, str(job.folder), str(job.log))] = job
        self._reporter.begun(job.name)

    def _end(self, handle: Any) -> list[Failed]:
        job, problem = self._running.pop(handle), self._cluster.outcome(handle)
        if finished(job, self._budget) is not None:
            problem = (
                None  # a run that outlived an earlier sweep may have finished it, so that ours found nothing to do
            )
        elif problem is None:
            problem = "its recipe was changed while the sweep was at work"
        else:
            problem = f"{problem}, {_last_words(job.log)}"
        self._reporter.ended(job.name, problem)
        self._after()
        return [] if problem is None else [Failed(job, problem)]

    def _stop(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not cost the runs their state
        self._reporter.say(f"stopping {len(self._running)} runs")
        self._cluster.stop(list(self._running))
        self._reporter.say("stopped; the same command goes on")


def failure(failed: Sequence[Failed]) -> EpitorchError:
    """Return the error that ends a sweep of which runs failed."""
    return EpitorchError(
        explain(
            f"{len(failed)} runs failed",
            expected="all runs finished",
            got="; ".join(f"{fail.job.name}: {fail.problem}" for fail in failed[:4]),
            fix=f"see {failed[0].job.log}; the same command tries them again, finished runs are kept",
        )
    )


def _last_words(log: Path) -> str:
    """The last error that a run printed, or its last line."""
    try:
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
    except OSError:
        lines = []
    errors = [line for line in lines if line.startswith("error: ")]
    return f"{(errors or lines or ['it printed nothing'])[-1]} (see {log})"


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            explain("cannot make the output folder", expected="a folder that can be made", got=error, where=str(out))
        ) from error
    lock = FileLock(out / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(
            explain(
                "another sweep is at work in this folder",
                expected="one at a time",
                got=str(out),
                fix="wait for it to end, or choose another --out",
            )
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _terminable() -> Iterator[threading.Event]:
    """Inside, SIGTERM sets the event: an exception would turn into another in Ray. The handlers are put back after."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
