"""The runs of a sweep and what their folders hold: `OUT/METHOD-seedS`, for sounds `OUT/METHOD-foldF-seedS`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from epitorch._files import write_atomic
from epitorch.errors import InputError, explain
from epitorch.results import RunResult, load_results
from epitorch.sweeps.methods import Method
from epitorch.training.folder import LOG, RESULTS, RUN

State = Literal["finished", "new", "unfinished", "changed"]
RECIPES = "recipes"


@dataclass(frozen=True)
class Budget:
    """What all runs of a sweep share.

    Args:
        data: Where the data are, as `train` takes it.
        max_steps: At most so many optimiser steps; None is the recipe's number.
        accelerator: As for `train`.
    """

    data: str
    max_steps: int | None = None
    accelerator: str = "auto"


@dataclass(frozen=True)
class Job:
    """One run: a method with a seed and, for sounds, a fold."""

    method: Method
    fold: int | None
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.folder.with_name(f"{self.folder.name}.log")


def jobs_of(methods: Sequence[Method], out: Path) -> list[Job]:
    """Return the runs: seeds one after the other and in each the folds, so that what is finished first is paired."""
    seeds = list(dict.fromkeys(seed for method in methods for seed in method.seeds))
    folds = list(dict.fromkeys(fold for method in methods for fold in method.folds))
    return [
        Job(method, fold, seed, out / _folder(method, fold, seed))
        for seed in seeds
        for fold in folds
        for method in methods
        if seed in method.seeds and fold in method.folds
    ]


def _folder(method: Method, fold: int | None, seed: int) -> str:
    middle = "" if fold is None else f"-fold{fold}"
    return f"{method.label}{middle}-seed{seed}"


def finished(job: Job, budget: Budget) -> RunResult | None:
    """Return the result of exactly this run: same recipe text, seed, fold and number of steps; None without one."""
    file = job.folder / RESULTS
    if not file.is_file():
        return None
    result = load_results(file)[0]
    sound = result.recipe.get("sound")
    fold = sound["fold"] if isinstance(sound, dict) else None
    same = (result.recipe_sha256, result.seed, fold) == (job.method.recipe.sha256, job.seed, job.fold)
    return result if same and _began(job).get("max_steps", budget.max_steps) == budget.max_steps else None


def state_of(job: Job, budget: Budget) -> State:
    """Say what the folder of a run holds."""
    if finished(job, budget) is not None:
        return "finished"
    began = _began(job)
    if not (job.folder / RESULTS).exists() and not began:
        return "new"
    wanted = {"recipe_sha256": job.method.recipe.sha256, "seed": job.seed, "max_steps": budget.max_steps}
    same = all(began.get(key) == value for key, value in wanted.items()) and _same_data(job, budget)
    return "unfinished" if same and not (job.folder / RESULTS).exists() else "changed"


def data_of(job: Job, budget: Budget) -> str:
    """Return the data's path as the unfinished run was given it, else as it is given now: the same place."""
    return str(_began(job)["data"]) if _same_data(job, budget) else budget.data


def refuse_changed(jobs: Sequence[Job], budget: Budget) -> None:
    """Raise InputError if a folder holds another run than the sweep's."""
    changed = [job.name for job in jobs if state_of(job, budget) == "changed"]
    if changed:
        raise InputError(
            explain(
                f"{len(changed)} of {len(jobs)} folders hold a run of another recipe, seed, data or number of steps",
                expected="runs of the recipes as they are now",
                got=", ".join(changed[:8]) + (", ..." if len(changed) > 8 else ""),
                where=str(jobs[0].folder.parent),
                fix="choose another --out, or pass --overwrite: these begin anew, all others are kept",
            )
        )


def busy(folder: Path) -> bool:
    """Whether a run is at work in the folder: it may outlive a sweep that was killed outright, and end by itself."""
    if not (folder / ".lock").is_file():
        return False
    try:
        with FileLock(folder / ".lock", timeout=0):
            return False
    except Timeout:
        return True


def write_recipes(methods: Sequence[Method], out: Path) -> None:
    """Write the recipes whose values were replaced, for `epitorch train` to read."""
    for method in methods:
        if method.named is None:
            write_atomic(recipe_file(method, out), method.recipe.text.encode())


def recipe_file(method: Method, out: Path) -> Path:
    """Return where `write_recipes` puts the recipe of a method."""
    return out / RECIPES / f"{method.label}.yaml"


def command_of(job: Job, budget: Budget, *, overwrite: bool) -> list[str]:
    """Return the arguments of `epitorch` that make the run."""
    method = job.method
    named = method.named if method.named is not None else str(recipe_file(method, job.folder.parent))
    command = ["train", named, "--data", data_of(job, budget), "--seed", str(job.seed), "--out", str(job.folder)]
    command += [] if job.fold is None else ["--fold", str(job.fold)]
    command += [] if budget.max_steps is None else ["--max-steps", str(budget.max_steps)]
    command += [] if budget.accelerator == "auto" else ["--accelerator", budget.accelerator]
    return [*command, *(["--overwrite"] if overwrite else [])]


def keep(job: Job, folder: Path) -> None:
    """Copy what is worth committing of a run."""
    for name in (RESULTS, LOG):
        source = job.folder / name
        if source.is_file() and _differs(source, folder / job.name / name):
            write_atomic(folder / job.name / name, source.read_bytes())


def _differs(source: Path, copy: Path) -> bool:
    return not copy.is_file() or copy.read_bytes() != source.read_bytes()


def _began(job: Job) -> dict[str, object]:
    try:
        began = json.loads((job.folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return began if isinstance(began, dict) else {}


def _same_data(job: Job, budget: Budget) -> bool:
    began = _began(job).get("data")
    return isinstance(began, str) and Path(began).resolve() == Path(budget.data).resolve()
