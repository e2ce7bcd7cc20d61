"""A sweep from its file to its summary."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from epitorch.errors import require
from epitorch.results import RunResult
from epitorch.sweeps.cluster import Resources
from epitorch.sweeps.file import SweepFile
from epitorch.sweeps.jobs import Budget, Job, finished, jobs_of, keep
from epitorch.sweeps.methods import Method, check_labels, methods_of
from epitorch.sweeps.plot import summary_plots
from epitorch.sweeps.published import published_points
from epitorch.sweeps.runner import Failed, run_jobs
from epitorch.sweeps.summary import summarize, write_summary
from epitorch.training.recipe_sound import with_fold


@dataclass(frozen=True)
class SweepReport:
    """What a sweep found, as plain data, and the runs that failed."""

    summary: dict[str, Any]
    failed: tuple[Failed, ...]
    folder: Path


def run_sweep(
    sweep: SweepFile,
    data: str | Path,
    out: str | Path,
    *,
    results: Path | None = None,
    seeds: Sequence[int] | None = None,
    folds: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    max_steps: int | None = None,
    resources: Resources | None = None,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
    console: Console | None = None,
) -> SweepReport:
    """Make the runs of a sweep and sum them up; called again, it goes on where it was stopped, however that was.

    Args:
        sweep: From `load_sweep`.
        data: As `train` takes it.
        out: Folder of the runs and, without `results`, of the summary.
        results: Folder of summary and plots; the result and log of every run are copied there too.
        seeds: In place of the sweep's, for every method.
        folds: Likewise.
        methods: Only these.
        max_steps: At most so many optimiser steps of every run: for trials.
        resources: What the runs may take; default one core each.
        overwrite: Begin runs anew whose recipe is not their folder's any more.
        command: For the summary; default this process's.
        console: For progress; default standard error.

    Raises:
        InputError: If the sweep is not valid, or a folder holds another run.
        MissingExtraError: If Ray is not installed.
        KeyboardInterrupt: After Ctrl-C, once the runs have written their state.
    """
    out = Path(out)
    resources = resources or Resources()
    jobs = jobs_of(_chosen(sweep, seeds, folds, methods), out)
    budget = Budget(str(data), max_steps, "cpu" if resources.gpus == 0 else "auto")
    told = ["epitorch", *sys.argv[1:]] if command is None else command
    summary = _Summary(sweep, jobs, budget, results or out, results, told)
    require("matplotlib", "sweep")  # not only after hours of work
    failed = run_jobs(jobs, budget, resources, overwrite=overwrite, after=summary.write, console=console)
    made = summary.made()
    if made["methods"]:
        published = published_points(sweep.published) if sweep.published else []
        summary_plots(made, results or out, published=published, title=sweep.name)
    return SweepReport(made, tuple(failed), results or out)


def _chosen(
    sweep: SweepFile, seeds: Sequence[int] | None, folds: Sequence[int] | None, labels: Sequence[str] | None
) -> list[Method]:
    found = methods_of(sweep)
    if labels is not None:
        check_labels(labels, [method.label for method in found], "--methods")
        found = [method for method in found if method.label in labels]
    if seeds is not None:
        found = [replace(method, seeds=tuple(seeds)) for method in found]
    if folds is not None:
        for method, fold in product(found, folds):
            with_fold(method.recipe, fold)  # refuses one that there cannot be
        found = [replace(method, folds=tuple(folds)) for method in found]
    return found


@dataclass(frozen=True)
class _Summary:
    """Writes the summary of what is finished."""

    sweep: SweepFile
    jobs: Sequence[Job]
    budget: Budget
    folder: Path
    copies: Path | None
    command: Sequence[str]

    def write(self) -> None:
        runs = self._runs()
        if any(runs.values()):
            write_summary(self.folder, self._of(runs), runs)

    def made(self) -> dict[str, Any]:
        return self._of(self._runs())

    def _of(self, runs: dict[str, list[RunResult]]) -> dict[str, Any]:
        asked = self.sweep.references
        references = {label: patterns for label, patterns in asked.items() if label in runs}
        if not references and all(patterns == ("*",) for patterns in asked.values()):
            references = dict.fromkeys([*runs][:1], ("*",))
        made = summarize(runs, references, total=len(self.jobs), command=self.command)
        return made | {"max_steps": self.budget.max_steps}

    def _runs(self) -> dict[str, list[RunResult]]:
        runs: dict[str, list[RunResult]] = {job.method.label: [] for job in self.jobs}
        for job in self.jobs:
            result = finished(job, self.budget)
            if result is not None:
                runs[job.method.label].append(result)
                if self.copies is not None:
                    keep(job, self.copies / "runs")
        return runs
