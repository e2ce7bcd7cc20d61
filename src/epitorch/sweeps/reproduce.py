"""The paper's tables, run here and printed beside the paper's numbers."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from epitorch._files import write_atomic
from epitorch.errors import InputError, RecipeError, explain
from epitorch.results import RunResult, aligned
from epitorch.sweeps.cluster import Resources
from epitorch.sweeps.file import Value
from epitorch.sweeps.jobs import Budget, Job, finished, jobs_of
from epitorch.sweeps.methods import Method, plain_value, with_values
from epitorch.sweeps.runner import Failed, run_jobs
from epitorch.sweeps.summary import measured_on, spread
from epitorch.sweeps.tables import Row, Table
from epitorch.training.recipe import Recipe, load_recipe
from epitorch.training.recipe_sound import with_fold

Effort = Literal["smoke", "short", "full"]
EFFORTS: tuple[Effort, ...] = ("smoke", "short", "full")
SMOKE_STEPS, SMOKE_BATCH, SMOKE_HOLDOUT = 3, 16, 16
FOLDS = (1, 2, 3, 4, 5)  # of ESC-50 and ESC-10
WORDS: dict[Effort, str] = {
    "smoke": f"smoke: {SMOKE_STEPS} steps of {SMOKE_BATCH} samples show that the recipes run; "
    "what such networks get right means nothing and is left out",
    "short": "short: schedules of our own, shorter than the paper's; its accuracies are no target for them",
    "full": "full: the schedules of the recipes that follow the paper",
}


@dataclass(frozen=True)
class TableReport:
    """What was made of a table: `data` is what `table.json` holds, `text` what `table.md` does."""

    data: dict[str, Any]
    text: str
    failed: tuple[Failed, ...]
    folder: Path


def reproduce(
    table: Table,
    data: str | Path,
    out: str | Path,
    *,
    effort: Effort = "smoke",
    rows: Sequence[str] | None = None,
    seeds: int = 1,
    folds: Sequence[int] | None = None,
    resources: Resources | None = None,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
    console: Console | None = None,
) -> TableReport:
    """Run the rows of a table and set what they reach beside the paper's numbers.

    Called again, it goes on where it was stopped.

    Args:
        table: From `load_table`.
        data: As `train` takes it; `table.data` says what it must be.
        out: Folder of the runs, `table.md` and `table.json`.
        effort: `smoke`: a few steps of the paper's recipes, no accuracies; `short`: the short recipes; `full`: the
            paper's schedules.
        rows: Only these.
        seeds: How many, from 0.
        folds: Of sounds; default one with `smoke`, else all five.
        resources: What the runs may take; default one core each.
        overwrite: Begin runs anew whose recipe is not their folder's any more.
        command: For `table.json`; default this process's.
        console: For progress; default standard error.

    Raises:
        InputError: If there is no such row, a recipe is missing or not valid, or a folder holds another run.
        DataError: If the data are not there.
        MissingExtraError: If Ray is not installed.
        KeyboardInterrupt: After Ctrl-C, once the runs have written their state.
    """
    _check(effort, seeds)
    resources = resources or Resources()
    chosen = table.chosen(rows)
    methods = [_method(row, effort, tuple(range(seeds)), folds) for row in chosen]
    jobs = jobs_of(methods, Path(out))
    steps = SMOKE_STEPS if effort == "smoke" else None
    budget = Budget(str(data), steps, "cpu" if resources.gpus == 0 else "auto")
    told = ["epitorch", *sys.argv[1:]] if command is None else command
    page = _Page(table, chosen, jobs, budget, effort, told, Path(out))
    failed = run_jobs(jobs, budget, resources, overwrite=overwrite, after=page.write, console=console)
    made = page.data()
    return TableReport(made, markdown(made), tuple(failed), Path(out))


def _check(effort: str, seeds: int) -> None:
    if effort not in EFFORTS:
        raise InputError(explain("there is no such budget", expected=" | ".join(EFFORTS), got=effort, where="--budget"))
    if seeds < 1:
        raise InputError(explain("too few seeds", expected="a whole number from 1", got=seeds, where="--seeds"))


def _method(row: Row, effort: Effort, seeds: tuple[int, ...], folds: Sequence[int] | None) -> Method:
    named = row.short if effort == "short" else row.recipe
    try:
        recipe = load_recipe(named)
    except RecipeError as error:
        raise RecipeError(f"{error}\n  asked by: the table's row '{row.name}'") from error
    values = smoke_values(recipe) if effort == "smoke" else []
    changed = with_values(recipe, values, f"{recipe.name}-smoke") if values else recipe
    for fold in folds or ():
        with_fold(recipe, fold)  # refuses one that there cannot be
    if recipe.sound is None:
        tested: tuple[int | None, ...] = (None,)
    else:
        tested = tuple(folds or (FOLDS[:1] if effort == "smoke" else FOLDS))
    return Method(row.name, changed, None if values else named, seeds, tested)


def smoke_values(recipe: Recipe) -> list[Value]:
    """Return what a trial of a few steps on any processor needs to be otherwise than the recipe says."""
    training, epitome = recipe.training, recipe.epitome
    wanted: dict[str, tuple[Any, Any]] = {
        "training.batch_size": (training.batch_size, min(SMOKE_BATCH, training.batch_size)),
        "training.accumulate": (training.accumulate, 1),
        "training.compile": (training.compile, False),
        "training.sync_batchnorm": (training.sync_batchnorm, False),
        "training.precision": (training.precision, "fp32" if training.precision == "fp16" else training.precision),
        "data.holdout": (recipe.data.holdout, min(SMOKE_HOLDOUT, recipe.data.holdout)),
    }
    if epitome is not None:  # with so few epochs the map would be frozen from the start, and the learner never run
        wanted["epitome.freeze_last_epochs"] = epitome.freeze_last_epochs, 0
        wanted["epitome.snap"] = epitome.snap, False
    return [plain_value(key, new, "--budget smoke") for key, (old, new) in wanted.items() if old != new]


# ---- the table ----


@dataclass(frozen=True)
class _Page:
    """Writes the table of what is finished."""

    table: Table
    rows: Sequence[Row]
    jobs: Sequence[Job]
    budget: Budget
    effort: Effort
    command: Sequence[str]
    folder: Path

    def write(self) -> None:
        made = self.data()
        write_atomic(self.folder / "table.json", (json.dumps(made, indent=1) + "\n").encode())
        write_atomic(self.folder / "table.md", (markdown(made) + "\n").encode())

    def data(self) -> dict[str, Any]:
        runs: dict[str, list[RunResult]] = {row.name: [] for row in self.rows}
        for job in self.jobs:
            result = finished(job, self.budget)
            if result is not None:
                runs[job.method.label].append(result)
        there = [result for results in runs.values() for result in results]
        return {
            **{key: value for key, value in asdict(self.table).items() if key != "rows"},
            "budget": self.effort,
            "command": shlex.join(self.command),
            "complete": len(there) == len(self.jobs),
            "rows": [row_data(row, runs[row.name], with_accuracy=self.effort != "smoke") for row in self.rows],
            "environment": there[-1].environment if there else None,
        }


def row_data(row: Row, results: Sequence[RunResult], *, with_accuracy: bool) -> dict[str, Any]:
    """Return a row of `table.json`: accuracies in percent, parameters and multiply-adds in millions."""
    last = results[-1] if results else None
    reached = _accuracy(results, row.name) if results and with_accuracy else None
    ours = {
        "accuracy": None if reached is None else reached["mean"],
        "params": None if last is None else last.parameters.total / 1e6,
        "madds": None if last is None else last.madds.executed / 1e6,
    }
    paper = asdict(row.paper)
    return {
        "name": row.name,
        "label": row.label,
        "recipe": None if last is None else last.name,
        "recipe_sha256": None if last is None else last.recipe_sha256,
        "runs": len(results),
        "accuracy": reached,
        "params": ours["params"],
        "madds": ours["madds"],
        "seconds_mean": sum(result.seconds.total for result in results) / len(results) if results else None,
        "paper": paper,
        "difference": {key: _minus(value, paper[key]) for key, value in ours.items()},
    }


def _accuracy(results: Sequence[RunResult], name: str) -> dict[str, Any]:
    found = spread([replace(result, name=name) for result in results], name)
    return {
        "mean": 100 * found["mean"],
        "sd": None if found["sd"] is None else 100 * found["sd"],
        "n": found["n"],
        "measured_on": measured_on(results),
        "seeds": list(found["seeds"]),
        "folds": list(found.get("folds", [])),
    }


def _minus(ours: float | None, paper: float | None) -> float | None:
    return None if ours is None or paper is None else ours - paper


def markdown(data: dict[str, Any]) -> str:
    """Return what `table.md` holds."""
    effort: Effort = data["budget"]
    smoke = effort == "smoke"
    header = ["row", *([] if smoke else ["accuracy %", "paper", "diff."])]
    header += ["params (M)", "paper", "diff.", "MAdds (M)", "paper", "diff.", "runs"]
    rows = [_cells(row, smoke=smoke) for row in data["rows"]]
    notes = [f"{row['label']}: {row['paper']['note']}" for row in data["rows"] if row["paper"]["note"]]
    source = data["source"] if smoke else f"{data['source']}; {data['metric']}"
    lines = [data["title"], f"({source})", "", aligned([header, *rows]), "", WORDS[effort]]
    return "\n".join([*lines, *notes, *([] if data["complete"] else ["not complete"]), "", f"`{data['command']}`"])


def _cells(row: dict[str, Any], *, smoke: bool) -> list[str]:
    paper, differs = row["paper"], row["difference"]
    accuracy = [_reached(row["accuracy"]), _number(paper["accuracy"], 2), _number(differs["accuracy"], 2, "+")]
    cells = [row["label"], *([] if smoke else accuracy)]
    for key, digits in (("params", 3), ("madds", 1)):
        cells += [_number(row[key], digits), _printed(paper[key]), _number(differs[key], digits, "+")]
    return [*cells, str(row["runs"])]


def _reached(accuracy: dict[str, Any] | None) -> str:
    if accuracy is None:
        return "-"
    spread_ = "" if accuracy["sd"] is None else f" +- {accuracy['sd']:.2f}"
    heldout = ", held-out images" if accuracy["measured_on"] == "held-out images" else ""
    return f"{accuracy['mean']:.2f}{spread_} (n = {accuracy['n']}{heldout})"


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"


def _printed(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
