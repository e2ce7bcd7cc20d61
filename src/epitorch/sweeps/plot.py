"""The paper's plot: accuracy against multiply-adds, and against parameters, of runs and of published results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from epitorch.errors import InputError, explain, require
from epitorch.sweeps.published import PublishedPoint

Axis = Literal["madds", "params"]
_AXES: dict[Axis, str] = {"madds": "multiply-adds of an image (millions)", "params": "parameters (millions)"}
_MARKERS = "oD^vPsX*h<>p"  # of runs: the next one where the colours are used up; of published points: one a method
_COLOURS = [f"C{k}" for k in range(10)]
_CLOSE = 3  # times the smallest cost; below that a logarithmic axis has no round ticks
_LONG = 40  # characters of a label; longer ones stand below each other
_SAME_TEXT = {"svg.hashsalt": "epitorch", "svg.fonttype": "none"}  # the same plot is the same file, with text as text


@dataclass(frozen=True)
class Point:
    """What runs of one method reached.

    Args:
        label: Of the method.
        accuracy: Mean, in percent.
        sd: Standard deviation over runs, in points; None for one run.
        n: Number of runs.
        madds: Multiply-adds of an image that the deployed network executes, in millions.
        params: In millions.
    """

    label: str
    accuracy: float
    sd: float | None
    n: int
    madds: float
    params: float


def points_of(summary: Mapping[str, Any]) -> list[Point]:
    """Return the points of a sweep's summary."""
    return [
        Point(
            label,
            100 * row["mean"],
            None if row["sd"] is None else 100 * row["sd"],
            row["n"],
            row["madds_executed"] / 1e6,
            row["parameters"] / 1e6,
        )
        for label, row in summary["methods"].items()
    ]


def accuracy_plot(
    points: Sequence[Point],
    out: str | Path,
    *,
    against: Axis = "madds",
    published: Sequence[PublishedPoint] = (),
    title: str = "",
) -> list[Path]:
    """Draw accuracy against cost and write it as SVG and PNG.

    Args:
        points: Of runs, drawn with their standard deviation; a colour and marker for each method.
        out: File without suffix.
        against: `madds` or `params`; a logarithmic axis, if the costs are not close.
        published: Of other methods, from `published_points`, in a panel of their own beside that of the runs, with the
            runs small among them: other schedules reach other accuracies, and one panel would squeeze the runs into
            a corner. Those that lack the cost are left out.
        title: Of the plot.

    Returns:
        The two files.

    Raises:
        InputError: If there is nothing to draw, or no such axis.
        MissingExtraError: If matplotlib is not installed.
    """
    if against not in _AXES:
        raise InputError(explain("there is no such axis", expected=" | ".join(_AXES), got=against))
    beside = [point for point in published if getattr(point, against) is not None]
    if not points and not beside:
        raise InputError(explain("there is nothing to draw", expected="points of runs or published ones", got="none"))
    paths = [Path(f"{out}.{kind}") for kind in ("svg", "png")]
    panels = (["runs"] if points else []) + (["published"] if beside else [])
    with _figure(len(panels)) as figure:
        for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            if panel == "runs":
                _draw_runs(axes, points, against)
            else:
                _draw_published(axes, beside, against)
                _draw_runs_small(axes, points, against)
            shown = [*points, *(beside if panel == "published" else [])]
            _scale(axes, [getattr(point, against) for point in shown])
            axes.set(xlabel=_AXES[against], ylabel="top-1 accuracy (%)")
            axes.grid(alpha=0.3, which="both")
            longest = max((len(label) for label in axes.get_legend_handles_labels()[1]), default=0)
            columns = 2 if longest < _LONG else 1
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns)
        figure.suptitle(title)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


@contextmanager
def _figure(panels: int) -> Iterator[Any]:
    matplotlib = require("matplotlib", "sweep")
    figures = require("matplotlib.figure", "sweep")  # not pyplot: it would open windows and keep every figure
    with matplotlib.rc_context(_SAME_TEXT):
        yield figures.Figure(figsize=(6.0 * panels, 4.5), dpi=150)


def _draw_published(axes: Any, points: Sequence[PublishedPoint], against: Axis) -> None:
    methods = dict.fromkeys(point.method for point in points)
    for method, marker in zip(methods, cycle(_MARKERS), strict=False):
        line = sorted((getattr(p, against), p.accuracy, p.label) for p in points if p.method == method)
        across, up = [x for x, _, _ in line], [y for _, y, _ in line]
        (drawn,) = axes.plot(across, up, marker=marker, ms=4, lw=0.8, alpha=0.7, label=method)
        for x, y, label in line:
            axes.annotate(label, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=5, color=drawn.get_color())


def _draw_runs(axes: Any, points: Sequence[Point], against: Axis) -> None:
    for k, point in enumerate(points):
        colour, marker = _COLOURS[k % len(_COLOURS)], _MARKERS[k // len(_COLOURS) % len(_MARKERS)]
        look = {"color": colour, "marker": marker, "ls": "none", "ms": 6, "mec": "black", "mew": 0.6, "capsize": 3}
        told = f"{point.label} (n = {point.n})".replace("$", r"\$")  # not a formula
        axes.errorbar(getattr(point, against), point.accuracy, yerr=point.sd, label=told, **look)


def _draw_runs_small(axes: Any, points: Sequence[Point], against: Axis) -> None:
    if not points:
        return
    across = [getattr(point, against) for point in points]
    axes.plot(across, [point.accuracy for point in points], "k.", ms=4, label="runs made here")


def _scale(axes: Any, costs: Sequence[float]) -> None:
    """A logarithmic axis with ticks like 0.5, 1, 2; a linear one where the costs are too close, or zero, for that."""
    if min(costs) <= 0 or max(costs) < _CLOSE * min(costs):
        return
    tickers = require("matplotlib.ticker", "sweep")
    few = max(costs) < 1000 * min(costs)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(tickers.LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.xaxis.set_major_formatter(tickers.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(tickers.NullFormatter())


def summary_plots(
    summary: Mapping[str, Any], folder: Path, *, published: Sequence[PublishedPoint] = (), title: str = ""
) -> list[Path]:
    """Draw both plots of a summary into its folder."""
    points = points_of(summary)
    drawn: list[Path] = []
    for against in _AXES:
        drawn += accuracy_plot(
            points, folder / f"accuracy-{against}", against=against, published=published, title=title
        )
    return drawn
