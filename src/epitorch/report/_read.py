"""From folders to runs."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epitorch.errors import CheckpointError, InputError, explain
from epitorch.report._data import Curves, Run, State
from epitorch.results import RunResult, load_results

RESULTS, RUN, CHECKPOINT, CONFIG = "results.json", "run.json", "checkpoint", "config.json"
STARTS = "starts.json"
LONGEST = 120  # characters of a name on the page


@dataclass(frozen=True)
class Found:
    """A run that was found: its folder, None for one of a results file, and what it measured."""

    folder: Path | None
    result: RunResult | None
    state: State


def clean(text: object) -> str:
    """Return text that every format can hold: no control characters, no half characters, not without end."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in str(text))
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "\u2026"


def find_runs(paths: Sequence[str | Path]) -> list[Found]:
    """Return the runs that the paths name: folders of runs or of checkpoints, folders that hold such, results files.

    Raises:
        InputError: If there is none, or a results file cannot be read.
    """
    if not paths:
        raise InputError(explain("there is nothing to report", expected="folders of runs", got="none"))
    found = [run for path in dict.fromkeys(map(Path, paths)) for run in _runs_at(path)]
    named: dict[object, Found] = {}
    for run in found:  # a folder that is given beside the one that holds it counts once
        named.setdefault(run.folder.resolve() if run.folder else id(run), run)
    return list(named.values())


def _runs_at(path: Path) -> list[Found]:
    if path.is_file():
        return [Found(None, result, "finished") for result in load_results(path)]
    run = _run_in(path)
    if run is not None:
        return [run]
    below = sorted(folder for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
    inside = [run for folder in below if (run := _run_in(folder)) is not None]
    if inside:
        return _as_listed(path, inside)
    if (path / RESULTS).is_file():
        return _runs_at(path / RESULTS)
    raise InputError(
        explain(
            "there is no run here",
            expected=f"a folder with {RESULTS}, {RUN} or {CHECKPOINT}/, a folder that holds such, or a {RESULTS}",
            got="a folder without any" if path.is_dir() else "nothing of this name",
            where=str(path),
            fix="give the folder that `epitorch train` or `epitorch demo` wrote to",
        )
    )


def _run_in(folder: Path) -> Found | None:
    if (folder / RESULTS).is_file():
        results = load_results(folder / RESULTS)
        return Found(folder, results[0], "finished") if len(results) == 1 else None
    if (folder / RUN).is_file():
        return Found(folder, None, "unfinished")
    there = (folder / CONFIG).is_file() or (folder / CHECKPOINT / CONFIG).is_file()
    return Found(folder, None, "checkpoint") if there else None


def _as_listed(path: Path, runs: list[Found]) -> list[Found]:
    """In the order of the results beside them, where there are such: a demo's dense network comes first."""
    if not (path / RESULTS).is_file():
        return runs
    order = {result.name: i for i, result in enumerate(load_results(path / RESULTS))}
    return sorted(runs, key=lambda run: order.get(run.result.name, len(order)) if run.result else len(order))


def fold_of(result: RunResult) -> int | None:
    """Return the fold that sounds were tested on."""
    sound = result.recipe.get("sound") if isinstance(result.recipe, dict) else None
    return sound.get("fold") if isinstance(sound, dict) else None


def describe(found: Sequence[Found]) -> list[Run]:
    """Return runs without their layers, labelled so that no two are called the same."""
    runs = [_described(run) for run in found]
    labels = _labels(found, [run.name for run in runs])
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def _described(found: Found) -> Run:
    folder, result = found.folder, found.result
    if result is not None:
        return _finished(folder, result)
    config = _peek(folder) if folder else {}
    model, recipe = config.get("model"), config.get("recipe")
    named = recipe.get("name") if isinstance(recipe, dict) else None
    name = clean(named or (folder.name if folder else "") or model or "checkpoint")
    epitomes = bool(config.get("plan")) if config else None
    curves = _curves_of_csv(folder) if folder else Curves()
    missing = {
        "unfinished": "This run is not finished: it has no results yet.",
        "checkpoint": "A checkpoint without a run: nothing is known of its training and accuracy.",
    }[found.state]
    places = _places(folder, name, found.state)
    return Run("", name, places, found.state, None, epitomes, None, None, curves, notes=(missing,))


def _finished(folder: Path | None, result: RunResult) -> Run:
    accuracy = result.accuracy
    notes = []
    if accuracy.test is None:
        notes.append("No test accuracy: there was no split to test on; the held-out accuracy stands in.")
    curves = Curves(
        *(_numbers(result.loss.get(key)) for key in ("train", "heldout")),
        *(_numbers(values) for values in (accuracy.train, accuracy.heldout, accuracy.heldout_learner)),
    )
    epitomes = bool(result.recipe.get("epitome")) if isinstance(result.recipe, dict) else None
    name = clean(result.name)
    places = _places(folder, result.name, "finished")
    params, madds = result.parameters.total, result.madds.executed
    return Run("", name, places, "finished", result, epitomes, params, madds, curves, notes=tuple(notes))


def _places(folder: Path | None, name: str, state: State) -> tuple[str, ...]:
    names = (name, f"recipe:{name}")
    if folder is None:
        return names
    spots = (folder, folder / CHECKPOINT)
    return (*names, *(str(spot) for spot in spots), *(str(spot.resolve()) for spot in spots))


def _numbers(values: Any) -> tuple[float | None, ...]:
    given = values if isinstance(values, list | tuple) else ()
    return tuple(v if isinstance(v, int | float) and math.isfinite(v) else None for v in given)


def _peek(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; nothing where there is none yet."""
    path = next((p for p in (folder / CONFIG, folder / CHECKPOINT / CONFIG) if p.is_file()), None)
    if path is None:
        return {}
    data = read_json(path, "a checkpoint's configuration", CheckpointError)
    return data if isinstance(data, dict) else {}


def read_json(path: Path, expected: str, error_type: type[InputError] = InputError) -> Any:
    """Return the content of a JSON file.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        got = error if isinstance(error, OSError) else f"no JSON: {error}"
        raise error_type(explain("this file cannot be read", expected=expected, got=got, where=str(path))) from error


def _labels(found: Sequence[Found], names: list[str]) -> list[str]:
    often = Counter(names)
    labels = [name if often[name] == 1 else _told_apart(run, name) for run, name in zip(found, names, strict=True)]
    taken: Counter[str] = Counter()
    unique = []
    for label in labels:
        taken[label] += 1
        unique.append(label if taken[label] == 1 else f"{label} ({taken[label]})")
    return unique


def _told_apart(found: Found, name: str) -> str:
    if found.result is None:
        return f"{name} ({clean(found.folder)})" if found.folder else name
    fold = fold_of(found.result)
    return f"{name}, {'' if fold is None else f'fold {fold}, '}seed {found.result.seed}"


# ---- curves of a run that is not finished ----


def _curves_of_csv(folder: Path) -> Curves:
    path = next((p for p in (folder / "logs" / "metrics.csv", folder / "metrics.csv") if p.is_file()), None)
    if path is None:
        return Curves()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            # of an epoch that a run did again after a kill, the later row counts
            rows = list({row["epoch"]: row for row in csv.DictReader(file) if row.get("epoch")}.values())
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            explain("the curves cannot be read", expected="a metrics.csv", got=error, where=str(path))
        ) from error
    keys = ("train_loss", "heldout_loss", "train_accuracy", "heldout_accuracy", "heldout_accuracy_learner")
    return Curves(*(_column(rows, key) for key in keys))


def _column(rows: Iterable[dict[str, Any]], key: str) -> tuple[float | None, ...]:
    values = tuple(_number(row.get(key)) for row in rows)
    return values if any(value is not None for value in values) else ()


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
