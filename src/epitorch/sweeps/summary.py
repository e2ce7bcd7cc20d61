"""What a sweep found: for each method mean and spread, and its differences to the references, paired."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from epitorch._files import write_atomic
from epitorch.errors import InputError, explain
from epitorch.results import RunResult
from epitorch.training.folds import cross_validation, paired_difference

Runs = Mapping[str, Sequence[RunResult]]


def pairs_of(labels: Sequence[str], references: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return which methods are compared: with each reference those that one of its patterns fits.

    Two references that fit each other meet once, the earlier compared with the later.
    """
    order = list(references)

    def fits(label: str, reference: str) -> bool:
        return label != reference and any(fnmatchcase(label, pattern) for pattern in references[reference])

    def twice(label: str, reference: str) -> bool:
        return label in references and fits(reference, label) and order.index(label) > order.index(reference)

    return [
        (label, reference)
        for reference in references
        for label in labels
        if fits(label, reference) and not twice(label, reference)
    ]


def summarize(
    runs: Runs, references: Mapping[str, Sequence[str]], *, total: int, command: Sequence[str]
) -> dict[str, Any]:
    """Return the summary as plain data: accuracies are fractions of the test data.

    Args:
        runs: The finished runs of each method; a method without one is left out.
        references: As for `pairs_of`.
        total: Runs that the sweep asks for.
        command: That made it.
    """
    there = {label: list(results) for label, results in runs.items() if results}
    everyone = [result for results in there.values() for result in results]
    pairs = [pair for pair in pairs_of(list(runs), references) if set(pair) <= set(there)]
    differences = [difference(there[a], there[b], a, b) for a, b in pairs]
    return {
        "command": shlex.join(command),
        "seeds": sorted({result.seed for result in everyone}),
        "folds": sorted({fold for result in everyone if (fold := fold_of(result)) is not None}),
        "complete": len(everyone) == total,
        "methods": {label: _method(label, results) for label, results in there.items()},
        "differences": [row for row in differences if row is not None],
        "environment": everyone[-1].environment if everyone else None,
    }


def fold_of(result: RunResult) -> int | None:
    """Return the fold that a run was tested on; None where the data are no sounds."""
    sound = result.recipe.get("sound")
    return sound["fold"] if isinstance(sound, dict) else None


def measured_on(results: Sequence[RunResult]) -> str:
    """Return `test images`, or `held-out images` where the data have no split to test on."""
    return "held-out images" if any(result.accuracy.test is None for result in results) else "test images"


def _accuracy(result: RunResult) -> float:
    """On the test images; where there are none, the last on the held-out ones.

    Raises:
        InputError: If the run has neither.
    """
    accuracy = _last(result.accuracy.heldout) if result.accuracy.test is None else result.accuracy.test
    if accuracy is None:
        expected = "one on test or held-out images"
        raise InputError(explain("a run has no accuracy", expected=expected, got="none", where=result.name))
    return accuracy


def spread(results: Sequence[RunResult], label: str) -> dict[str, Any]:
    """Return n, mean and standard deviation of the accuracy, for sounds by fold and by seed as well."""
    if fold_of(results[0]) is not None:
        return asdict(cross_validation([replace(result, name=label) for result in results]))
    by_seed = {result.seed: _accuracy(result) for result in sorted(results, key=lambda result: result.seed)}
    values = list(by_seed.values())
    return {
        "name": label,
        "seeds": list(by_seed),
        "n": len(values),
        "mean": mean(values),
        "sd": stdev(values) if len(values) > 1 else None,
        "by_seed": values,
    }


def difference(first: Sequence[RunResult], second: Sequence[RunResult], name: str, other: str) -> dict[str, Any] | None:
    """Return mean and standard error of `first - second` over the seeds (and folds) that both have; None without one.

    For sounds the standard error is given twice: over all pairs, and over folds, whose runs share their test clips.
    """
    one, two = (_by_key(results) for results in (first, second))
    common = sorted(set(one) & set(two), key=str)
    if not common:
        return None
    if fold_of(first[0]) is not None:
        return asdict(
            paired_difference(
                [replace(result, name=name) for result in first], [replace(result, name=other) for result in second]
            )
        )
    values = [one[key] - two[key] for key in common]
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return {"first": name, "second": other, "n": len(values), "mean": mean(values), "standard_error": error}


def _by_key(results: Sequence[RunResult]) -> dict[tuple[int | None, int], float]:
    return {(fold_of(result), result.seed): _accuracy(result) for result in results}


def _method(label: str, results: Sequence[RunResult]) -> dict[str, Any]:
    gaps = [result.accuracy.gap for result in results if result.accuracy.gap is not None]
    losses = [loss for result in results if (loss := _last(result.loss["train"])) is not None]
    last = results[-1]
    return {
        **spread(results, label),
        "measured_on": measured_on(results),
        "gap_mean": mean(gaps) if gaps else None,
        "train_loss_mean": mean(losses) if losses else None,
        "parameters": last.parameters.total,
        "madds_executed": last.madds.executed,
        "madds_paper": last.madds.paper,
        "seconds_mean": mean(result.seconds.total for result in results),
        "epochs": last.data["epochs_run"],
        "recipe": last.name,
        "recipe_sha256": last.recipe_sha256,
    }


def row_of(label: str, result: RunResult) -> dict[str, Any]:
    """Return one run as a flat row of `runs.json`."""
    return {
        "method": label,
        "fold": fold_of(result),
        "seed": result.seed,
        "test": result.accuracy.test,
        "test_learner": result.accuracy.test_learner,
        "heldout": _last(result.accuracy.heldout),
        "test_images": result.accuracy.test_images,
        "train_loss": _last(result.loss["train"]),
        "parameters": result.parameters.total,
        "madds_executed": result.madds.executed,
        "seconds": result.seconds.total,
        "steps": result.data["steps_run"],
        "command": shlex.join(result.command),
        "git_commit": result.environment.get("git_commit"),
        "date": result.date,
    }


def _last(values: Sequence[Any]) -> Any:
    return values[-1] if values else None


# ---- files ----


def write_summary(folder: Path, summary: Mapping[str, Any], runs: Runs) -> None:
    """Write `summary.json`, `summary.md` and `runs.json`."""
    rows = [row_of(label, result) for label, results in runs.items() for result in results]
    _write(folder / "summary.json", json.dumps(summary, indent=1))
    _write(folder / "runs.json", json.dumps(rows, indent=1))
    _write(folder / "summary.md", markdown(summary))


def markdown(summary: Mapping[str, Any]) -> str:
    """Return the summary as two tables: methods, and differences in points.

    "learner - map": points that the index learner's own starts are better on the test data than the routing map.
    """
    head = ["method", "test %", "sd (runs)", "n", "parameters", "MAdds (M)", "train loss"]
    learned = any(row["gap_mean"] is not None for row in summary["methods"].values())
    head += ["learner - map"] if learned else []
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for label, row in summary["methods"].items():
        loss = "-" if row["train_loss_mean"] is None else f"{row['train_loss_mean']:.3f}"
        cells = [label, f"{100 * row['mean']:.2f}", _percent(row["sd"]), f"{row['n']}", f"{row['parameters']:,}"]
        cells += [f"{row['madds_executed'] / 1e6:.1f}", loss]
        cells += [_percent(row["gap_mean"], "+")] if learned else []
        lines.append(f"| {' | '.join(cells)} |")
    heldout = [label for label, row in summary["methods"].items() if row["measured_on"] == "held-out images"]
    if heldout:
        lines += ["", f"No split to test on; the held-out images stand in: {', '.join(heldout)}."]
    if summary.get("max_steps") is not None:
        lines += ["", f"Stopped after {summary['max_steps']} steps a run: a rehearsal, no result."]
    if summary["differences"]:
        lines += ["", *_differences(summary["differences"])]
    return "\n".join([*lines, "", f"`{summary['command']}`"])


def _differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    folds = any("standard_error_folds" in row for row in rows)
    header = "| difference | points | standard error (pairs) |" + (" (folds) |" if folds else "") + " n |"
    lines = [header, "|---|" + "---:|" * (4 if folds else 3)]
    for row in rows:
        cells = [_percent(row["standard_error"])] + ([_percent(row["standard_error_folds"])] if folds else [])
        errors = " | ".join(cells)
        lines.append(f"| {row['first']} - {row['second']} | {100 * row['mean']:+.2f} | {errors} | {row['n']} |")
    return lines


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.2f}".replace("-0.00", f"{sign}0.00")


def _write(path: Path, text: str) -> None:
    write_atomic(path, f"{text}\n".encode())
