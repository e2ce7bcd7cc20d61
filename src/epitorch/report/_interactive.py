"""Figures for plotly's script: plain data, no plotly needed to make it."""

from __future__ import annotations

from html import escape
from typing import Any

from epitorch.report._data import Chart, Series
from epitorch.report._looks import PAGE_MARKERS, Look, looks, rows_of


def plotly_data(chart: Chart) -> dict[str, Any]:
    """Return traces and layout of a figure; colours of text and grid are the page's to set."""
    traces = [_trace(series, look) for series, look in zip(chart.series, looks(chart), strict=True)]
    rows = rows_of(chart)
    strips = any(series.mode == "strips" for series in chart.series)
    across: dict[str, Any] = {"title": {"text": _text(chart.x_title)}, "automargin": True}
    across["type"] = "log" if chart.log_x else "linear"
    if chart.x_range:
        across["range"] = list(chart.x_range)
    up: dict[str, Any] = {"title": {"text": _text(chart.y_title)}, "automargin": True}
    if rows:
        up.update(autorange="reversed", type="category", tickmode="linear", tickfont={"size": 11})
    height = 110 + (16 if strips else 36) * len(rows) if rows else 400
    layout = {
        "xaxis": across,
        "yaxis": up,
        "barmode": "overlay" if strips else "group",
        "height": height,
        "margin": {"l": 50, "r": 16, "t": 16, "b": 48},
        "showlegend": False,
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout}


def _text(text: str) -> str:
    """Plotly reads a few tags in text; names from files must not become some."""
    return escape(str(text), quote=False)


def _trace(series: Series, look: Look) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "name": _text(series.name),
        "x": list(series.x),
        "y": [_text(y) if isinstance(y, str) else y for y in series.y],
        "text": [_text(note) for note in series.notes],
        "hoverinfo": "text",
    }
    if series.mode in ("bars", "strips"):
        bars = {"type": "bar", "orientation": "h", "marker": {"color": look.colour}, "textposition": "none"}
        return {**trace, **bars, **({"base": list(series.base)} if series.base else {})}
    line = series.mode == "line"
    symbol = PAGE_MARKERS[look.marker]
    trace.update(type="scatter", mode="lines+markers" if line else "markers")
    trace["marker"] = {"color": look.colour, "symbol": symbol, "size": 5 if line else 12}
    trace["line"] = {
        "color": look.colour,
        "width": 1.2 if series.faint else 2,
        "dash": "dash" if series.faint else "solid",
    }
    if any(series.spread):
        trace["error_y"] = {"type": "data", "array": list(series.spread), "color": look.colour}
    return trace
