"""Looks that the drawn and the interactive figures share."""

from __future__ import annotations

from dataclasses import dataclass

from epitorch.report._data import Chart

# each at least 3.4:1 against white and against the dark page
COLOURS = ("#2f7fd6", "#c9660a", "#1e9160", "#c2519d", "#8067d6", "#d1453b", "#1c8fa6", "#7a828c")
DRAWN_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
PAGE_MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")


@dataclass(frozen=True)
class Look:
    """Of one series: its colour, and which of the markers."""

    colour: str
    marker: int


def looks(chart: Chart) -> list[Look]:
    """Return the look of each series: groups differ by colour and marker, so that neither is needed alone."""
    groups = {group: i for i, group in enumerate(dict.fromkeys(s.group or s.name for s in chart.series))}
    places = [groups[s.group or s.name] for s in chart.series]
    return [Look(COLOURS[i % len(COLOURS)], i % len(DRAWN_MARKERS)) for i in places]


def rows_of(chart: Chart) -> list[str]:
    """Return the names of the rows of bars or strips, from the top; none where there are no bars."""
    barred = [series for series in chart.series if series.mode in ("bars", "strips")]
    return list(dict.fromkeys(name for series in barred for name in series.y))
