"""Writes docs/results/peers.md and its plots from the results of runs; no number comes from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.methods import METHODS
from benchmarks.peers.parts import PARTS, Part, part_named
from benchmarks.peers.plots import pareto
from benchmarks.peers.summary import COSTS, Result, Row, front, load, rows_of

from epitorch._files import write_atomic

_HEAD = Path(__file__).with_name("page.md")
_NO_FULL = """## Part e: the full schedules

`--full` on a GPU: parts a, c and d for 60 epochs, all their budgets, three seeds. No runs are recorded yet."""
_COLUMNS = (
    "method",
    "%",
    "- dense",
    "parameters",
    "MAdds (M)",
    "file (kB)",
    "ORT ms",
    "OpenVINO ms",
    "train s",
    "peak MB",
    "lines",
)


def write(results: Path, page: Path) -> Path:
    """Write the page and its plots.

    Args:
        results: Folder with a folder for each part.
        page: The Markdown file; plots lie beside it.
    """
    sections = [_HEAD.read_text(encoding="utf-8").rstrip()]
    full = [part_named(name, full=True) for name, part in PARTS.items() if part.trains]
    made = [part for part in full if (results / part.name).is_dir()]
    for part in [*PARTS.values(), *made]:
        sections.append("\n".join(_section(part, results / part.name, page)))
    if not made:
        sections.append(_NO_FULL)
    write_atomic(page, ("\n\n".join(sections) + "\n").encode())
    return page


def _section(part: Part, folder: Path, page: Path) -> list[str]:
    found, timings = load(folder)
    lines = [f"## {_heading(part)}", "", *_protocol(part)]
    if not found:
        return [*lines, "", "No runs are recorded yet."]
    rows = rows_of(found, timings)
    measure = "agreement" if not part.trains else "accuracy"
    plot = pareto(rows, part.title, measure, page.with_name(f"peers-{part.name}.svg"))
    lines += ["", f"![{measure} against cost: {part.title}]({plot.name})"]
    for budget in _budgets(rows):
        lines += ["", f"### {_budget_title(budget)}", "", *_table(_within(rows, budget))]
    lines += ["", "### On the Pareto front", "", *_fronts(rows)]
    lines += ["", "### What failed, what is not in it", "", *_failures(part, found, timings)]
    return [*lines, "", *_provenance(found, timings)]


def _heading(part: Part) -> str:
    return f"Part {part.name}: {part.title}"


def _protocol(part: Part) -> list[str]:
    if not part.trains:
        return [
            f"{part.measured} images are measured, {part.calibration} others calibrate (batch norm is estimated on "
            f"them again for every method that changes weights); seeds {_listed(part.seeds)} draw both sets."
        ]
    return [
        f"{part.epochs} epochs for every method; methods that begin from a trained dense network spend "
        f"{part.start_epochs} of them on it. Seeds {_listed(part.seeds)}."
    ]


def _budgets(rows: Sequence[Row]) -> list[str]:
    return sorted({row.budget for row in rows}, key=lambda name: (name != "own", name.split("-")[0], -_share(name)))


def _within(rows: Sequence[Row], budget: str) -> list[Row]:
    """Rows made for a budget; for one on bytes, where methods have steps of their own, all whose file fits."""
    dense = next((row.file_bytes for row in rows if row.method == "dense"), None)
    if dense is None or not budget.startswith("bytes"):
        return [row for row in rows if row.budget == budget]
    return [row for row in rows if row.file_bytes <= _share(budget) * dense]


def _share(budget: str) -> float:
    return float(budget.partition("-")[2] or 1)


def _budget_title(budget: str) -> str:
    kind, _, share = budget.partition("-")
    if budget == "own":
        return "Of one size"
    told = {"params": "parameters", "madds": "multiply-adds", "bytes": "bytes (all files that fit)"}
    return f"At most {share} of dense: {told[kind]}"


def _table(rows: Sequence[Row]) -> list[str]:
    ranked = sorted(rows, key=lambda row: -row.score)
    return [_line(_COLUMNS), "|---|" + "---:|" * (len(_COLUMNS) - 1), *(_line(_cells(row)) for row in ranked)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.label,
        f"{_with_error(row.score, row.error, '')} ({len(row.seeds)})",
        "-" if row.lead is None or row.method == "dense" else _with_error(row.lead, row.lead_error, "+"),
        f"{row.params:,}",
        f"{row.madds / 1e6:.2f}",
        f"{row.file_bytes / 1e3:.1f}",
        _time(row, "onnxruntime"),
        _time(row, "openvino"),
        f"{row.seconds:.0f}",
        "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
        str(row.lines),
    )


def _with_error(value: float, error: float | None, sign: str) -> str:
    return f"{value:{sign}.2f}" + ("" if error is None else f" ± {error:.2f}")


def _time(row: Row, runtime: str) -> str:
    if runtime not in row.milliseconds:
        return "-"
    speedup = f" ({row.speedups[runtime]:.2f}x)" if runtime in row.speedups else ""
    return f"{row.milliseconds[runtime]:.3f}{speedup}"


def _fronts(rows: Sequence[Row]) -> list[str]:
    """All rows of the part together, whatever budget they were made for."""
    lines = []
    for kind, label in COSTS.items():
        best = sorted(front(rows, kind), key=lambda row: -row.score)
        told = ", ".join(f"{row.label} ({row.budget}, {row.score:.2f})" for row in best)
        lines.append(f"* {label}: {told or 'not measured'}.")
    return lines


def _failures(part: Part, found: Sequence[Result], timings: Result | None) -> list[str]:
    lines = [f"* {METHODS[name].label}: left out, {why}." for name, why in part.left_out.items()]
    for result in found:
        if result["status"] == "failed":
            lines.append(_failed(result, result["error"]))
            lines += ["", "    ```text", f"    {result['command']}", "    ```", ""]
    for row in timings["failures"] if timings else []:
        lines.append(_failed(row, f"in {row['runtime']}: {row['error']}"))
    return lines or ["Nothing."]


def _failed(result: Result, error: str) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result.get("versions", {}).items())
    where = f"{METHODS[result['method']].label} ({result['budget']}{_seed(result)})"
    return f"* {where} failed{f' with {versions}' if versions else ''}: `{error.splitlines()[0][:300]}`"


def _seed(result: Result) -> str:
    return f", seed {result['seed']}" if "seed" in result else ""


def _provenance(found: Sequence[Result], timings: Result | None) -> list[str]:
    last = max(found, key=lambda result: str(result["date"]))
    surroundings: dict[str, Any] = last["environment"]
    packages = sorted({f"{k} {v}" for result in found for k, v in result["versions"].items()})
    text = (
        f"{len(found)} runs until {last['date']}; {surroundings['cpu']}, {last['threads']} thread(s), "
        f"torch {surroundings['torch']}{''.join(f', {name}' for name in packages)}."
    )
    if timings is None:
        return [f"{text} Not timed."]
    versions = ", ".join(f"{name} {number}" for name, number in timings["versions"].items())
    return [f"{text} Timed {timings['date']} in {timings['rounds']} rounds, batch 1, {timings['clock']}: {versions}."]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
