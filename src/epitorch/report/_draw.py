"""Figures as SVG and PNG, by matplotlib: for papers, and for a page without scripts."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epitorch._files import write_atomic
from epitorch.errors import require
from epitorch.report._data import Chart, Series
from epitorch.report._looks import DRAWN_MARKERS, Look, looks, rows_of

_INK = "#010203"  # stands for the colour of the page's text
_RULES = {
    "svg.hashsalt": "epitorch",  # the same figure is the same file
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name with a dollar is no formula
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def write_figures(charts: Sequence[Chart], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Write every figure as SVG and PNG, and return the files."""
    written = []
    for chart in charts:
        say(chart.title)
        for suffix in ("svg", "png"):
            path = folder / f"{chart.key}.{suffix}"
            content = _drawn(chart, suffix)
            write_atomic(path, content.replace(_INK.encode(), b"#000000") if suffix == "svg" else content)
            written.append(path)
    return written


def inline_svg(chart: Chart) -> str:
    """Return a figure as an element of a page: its text in the page's colour, its ids its own."""
    text = _drawn(chart, "svg", titled=False).decode("utf-8")
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = _own_ids(text, chart.key)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text)
    text = re.sub(r'="[^"]*"', _short, text)
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true" focusable="false">', text, count=1
    )
    return re.sub(r">\s+<", "><", text.strip())


def _own_ids(text: str, key: str) -> str:
    """Ids that something refers to begin with the figure's key; the many others go."""
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{key}-{found[1]}"' if found[1] in used else "", text)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{key}-", text)


def _short(attribute: re.Match[str]) -> str:
    """A hundredth of a point is enough; numbers in text stay as they are."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", attribute[0])


def _drawn(chart: Chart, suffix: str, *, titled: bool = True) -> bytes:
    out = io.BytesIO()
    with _figure(chart) as figure, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")  # a name in another script: SVG has it as text
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied.*")
        axes = figure.subplots()
        _fill(axes, chart)
        axes.set_title(chart.title if titled else "")
        _legend(figure, axes, chart)
        metadata = _NO_METADATA if suffix == "svg" else {"Software": None}
        figure.savefig(out, format=suffix, transparent=suffix == "svg", metadata=metadata)
    return out.getvalue()


@contextmanager
def _figure(chart: Chart) -> Iterator[Any]:
    matplotlib = require("matplotlib", "report")
    figures = require("matplotlib.figure", "report")  # not pyplot: it would open windows and keep every figure
    rows, entries = len(rows_of(chart)), len({series.name for series in chart.series})
    strips = any(series.mode == "strips" for series in chart.series)
    height = 1.3 + (0.17 if strips else 0.34) * rows if rows else 3.6
    height += 0.2 * -(-entries // 2) if entries > 1 else 0.0
    with matplotlib.rc_context(_RULES):
        yield figures.Figure(figsize=(7.0, height), dpi=150, layout="constrained")


def _fill(axes: Any, chart: Chart) -> None:
    rows = rows_of(chart)
    for i, (series, look) in enumerate(zip(chart.series, looks(chart), strict=True)):
        if series.mode in ("bars", "strips"):
            _bars(axes, series, look, rows, i, len(chart.series))
        else:
            _marks(axes, series, look)
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title)
    axes.grid(alpha=0.25, axis="x" if rows else "both", color=_INK)
    axes.set_axisbelow(True)
    if chart.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the usual one writes formulas
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        axes.tick_params(axis="x", which="minor", labelsize=7)
    if chart.x_range:
        axes.set_xlim(*chart.x_range)
    if rows:
        axes.set_yticks(range(len(rows)), rows, fontsize=7)
        axes.set_ylim(len(rows) - 0.5, -0.5)


def _bars(axes: Any, series: Series, look: Look, rows: list[str], place: int, sets: int) -> None:
    if series.mode == "strips":
        axes.barh(
            [rows.index(y) for y in series.y],
            series.x,
            0.8,
            left=series.base,
            color=look.colour,
            label=_label(series),
            clip_on=False,
        )
        return
    height = 0.8 / sets
    at = [rows.index(y) - 0.4 + (place + 0.5) * height for y in series.y]
    axes.barh(at, series.x, height, color=look.colour, label=_label(series))


def _marks(axes: Any, series: Series, look: Look) -> None:
    line = series.mode == "line"
    spread = [value or 0.0 for value in series.spread] if any(series.spread) else None
    axes.errorbar(
        series.x,
        series.y,
        yerr=spread,
        label=_label(series),
        color=look.colour,
        marker=DRAWN_MARKERS[look.marker],
        markersize=3 if line else 7,
        markevery=max(1, len(series.x) // 4),  # lines of one colour differ by dashes, of another by their markers
        linestyle=("--" if series.faint else "-") if line else "none",
        linewidth=0.9 if series.faint else 1.5,
        capsize=3,
    )


def _label(series: Series) -> str:
    """Matplotlib hides labels that begin with an underscore."""
    return f"\u200a{series.name}" if series.name.startswith("_") else series.name


def _legend(figure: Any, axes: Any, chart: Chart) -> None:
    if len(chart.series) > 1:
        once = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        handles, labels = list(once.values()), list(once)
        figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=7, frameon=False)
