"""From results of runs to one row for each method and budget, and to the Pareto fronts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.peers.methods import METHODS

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One method at one budget, over its seeds.

    Args:
        method: Name.
        budget: Name.
        seeds: Of the runs that are done.
        score: Mean accuracy, or agreement with the dense network, in percent.
        error: Standard error of the mean; None for one run.
        lead: Mean difference to the dense network on the same seeds, in points; None without it.
        lead_error: Its standard error; None for one pair.
        params: Parameters.
        madds: Multiply-adds of one input.
        file_bytes: Of the file.
        milliseconds: By runtime.
        speedups: Over the dense network, by runtime.
        seconds: Of training, the dense network's first part among them.
        peak_bytes: Largest memory of a training process; None where nothing was trained.
        lines: That a user writes.
    """

    method: str
    budget: str
    seeds: tuple[int, ...]
    score: float
    error: float | None
    lead: float | None
    lead_error: float | None
    params: int
    madds: int
    file_bytes: int
    milliseconds: Mapping[str, float]
    speedups: Mapping[str, float]
    seconds: float
    peak_bytes: int | None
    lines: int

    @property
    def label(self) -> str:
        """Of the method."""
        return METHODS[self.method].label


def load(folder: Path) -> tuple[list[Result], Result | None]:
    """Results of a part's runs, and its timings if there are any."""
    files = sorted(folder.glob("*-seed*.json"))
    timings = folder / "latency.json"
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return results, json.loads(timings.read_text(encoding="utf-8")) if timings.exists() else None


def rows_of(results: Sequence[Result], timings: Result | None) -> list[Row]:
    """One row for each method and budget with a finished run, in the order of the methods."""
    done = [result for result in results if result["status"] == "done"]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in done:
        groups.setdefault((result["method"], result["budget"]), []).append(result)
    dense = {r["seed"]: _score(r) for r in groups.get(("dense", "own"), [])}
    order = list(METHODS)
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    return [_row(groups[key], dense, timings) for key in keys]


def _row(group: Sequence[Result], dense: Mapping[int, float], timings: Result | None) -> Row:
    group = sorted(group, key=lambda result: result["seed"])
    first = group[0]
    scores = [_score(result) for result in group]
    leads = [_score(result) - dense[result["seed"]] for result in group if result["seed"] in dense]
    peaks = [result["peak_memory_bytes"] for result in group if result.get("peak_memory_bytes")]
    return Row(
        first["method"],
        first["budget"],
        tuple(result["seed"] for result in group),
        mean(scores),
        standard_error(scores),
        mean(leads) if leads else None,
        standard_error(leads),
        round(mean(result["params"] for result in group)),
        round(mean(result["madds"] for result in group)),
        round(mean(result["file_bytes"] for result in group)),
        _timed(first, timings, "milliseconds"),
        _timed(first, timings, "speedup_over_dense"),
        mean(result["train_seconds"] for result in group),
        max(peaks) if peaks else None,
        first["lines"],
    )


def _score(result: Result) -> float:
    return 100 * float(result["agreement"] if "agreement" in result else result["accuracy"])


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for fewer than two values."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def _timed(result: Result, timings: Result | None, key: str) -> dict[str, float]:
    """By runtime; a method that changes the file alone runs as the one that it was made of."""
    method = METHODS[result["method"]].timed_as or result["method"]
    budget = "own" if METHODS[method].budgets == ("own",) else result["budget"]
    rows = timings["rows"] if timings else []
    return {
        row["runtime"]: row[key]
        for row in rows
        if (row["method"], row["budget"]) == (method, budget) and row[key] is not None
    }


COSTS = {
    "params": "parameters",
    "madds": "multiply-adds",
    "bytes": "bytes of the file",
    "onnxruntime": "ms in ONNX Runtime",
    "openvino": "ms in OpenVINO",
}


def cost_of(row: Row, kind: str) -> float | None:
    """One of a row's costs; None where it was not measured."""
    known: dict[str, float] = {"params": row.params, "madds": row.madds, "bytes": row.file_bytes, **row.milliseconds}
    return known.get(kind)


def front(rows: Sequence[Row], kind: str) -> list[Row]:
    """Rows that none beats: no other has at least their score for less, or a better score for the same."""
    known = [(cost, row) for row in rows if (cost := cost_of(row, kind)) is not None]
    return [
        row
        for cost, row in known
        if not any(
            (other <= cost and rival.score > row.score) or (other < cost and rival.score >= row.score)
            for other, rival in known
        )
    ]
