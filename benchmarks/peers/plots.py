"""Pareto plots: accuracy against each cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.methods import METHODS
from benchmarks.peers.networks import peer
from benchmarks.peers.summary import COSTS, Row, cost_of, front

_SAME_TEXT = {"svg.hashsalt": "epitorch", "svg.fonttype": "none"}  # the same plot is the same file, with text as text
_MARKERS = "osD^vP*Xhd<>p8H"


def pareto(rows: Sequence[Row], title: str, measure: str, file: Path) -> Path:
    """Draw the score against parameters, multiply-adds, bytes and milliseconds; a line joins the front.

    Args:
        rows: Of one part.
        title: Of the part.
        measure: What the score is.
        file: An SVG file.
    """
    matplotlib: Any = peer("matplotlib")
    figure_class: Any = peer("matplotlib.figure").Figure
    with matplotlib.rc_context(_SAME_TEXT):
        figure = figure_class(figsize=(12, 8.5), layout="constrained")
        axes = figure.subplots(2, 3).flat
        for axis, (kind, label) in zip(axes, COSTS.items(), strict=False):
            _panel(axis, rows, kind, label, measure)
        _legend(figure, list(figure.axes)[-1], rows)
        figure.suptitle(title)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None})
    text = file.read_text(encoding="utf-8")
    file.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return file


def _panel(axis: Any, rows: Sequence[Row], kind: str, label: str, measure: str) -> None:
    for row in rows:
        cost = cost_of(row, kind)
        if cost is not None:
            axis.errorbar(cost, row.score, row.error or 0, fmt=_marker(row), color=_colour(row), ms=6, alpha=0.85)
    best = sorted((cost_of(row, kind) or 0, row.score) for row in front(rows, kind))
    axis.plot([cost for cost, _ in best], [score for _, score in best], color="0.6", lw=1, zorder=0)
    if best:
        axis.set_xscale("log")
    axis.set_xlabel(label)
    axis.set_ylabel(f"{measure} (%)")
    axis.grid(alpha=0.3)


def _legend(figure: Any, axis: Any, rows: Sequence[Row]) -> None:
    """The last panel's place."""
    axis.axis("off")
    for method in dict.fromkeys(row.method for row in rows):
        row = next(row for row in rows if row.method == method)
        axis.plot([], [], _marker(row), color=_colour(row), label=row.label)
    axis.legend(loc="center", fontsize=9, frameon=False)


def _marker(row: Row) -> str:
    return _MARKERS[list(METHODS).index(row.method) % len(_MARKERS)]


def _colour(row: Row) -> str:
    return f"C{list(METHODS).index(row.method) % 10}"
