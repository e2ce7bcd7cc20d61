"""The page: one file, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from epitorch.errors import require
from epitorch.report._data import Chart, Table
from epitorch.report._draw import inline_svg
from epitorch.report._interactive import plotly_data
from epitorch.report._tables import to_html

MOST_BYTES = 5_900_000  # of the page; plotly's script is 4.8 MB of it
_SKELETON_BYTES = 60_000  # what is around figures, tables and texts
MOST_NAMES = 200  # of what was left out
# Nothing may be fetched from anywhere, whatever a name in a file says.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass
class Budget:
    """Bytes that the page may still grow by, and how many figures and tables it had no room for."""

    left: int
    out: list[str] = field(default_factory=list)

    def takes(self, what: str, *texts: str) -> bool:
        """Say whether the texts fit, and count them."""
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if size > self.left:
            self.out.append(what)
            return False
        self.left -= size
        return True


@dataclass(frozen=True)
class Group:
    """Figures under one heading.

    Args:
        title: The heading.
        charts: The figures.
        closed: It is a line to open.
        rank: Where there is no room for all, those of a low rank are in.
    """

    title: str
    charts: tuple[Chart, ...]
    closed: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        key: Of its address.
        title: Its heading.
        body: HTML above the figures.
        groups: Figures.
        empty: What is said where there are none and no body.
        tail: Tables after the figures.
        last: It gets the room that the others leave.
    """

    key: str
    title: str
    body: str = ""
    groups: tuple[Group, ...] = ()
    empty: str = ""
    tail: tuple[Table, ...] = ()
    last: bool = False


class _Writer:
    """Puts figures and tables in, as long as there is room."""

    def __init__(self, budget: Budget, interactive: bool, say: Callable[[str], None]) -> None:
        self.budget, self.interactive, self.say = budget, interactive, say
        self.data: dict[str, Any] = {}
        self.tables: dict[Table, str] = {}

    def section(self, section: Section) -> str:
        fits = self.budget.takes(f"{section.title}, text", section.body)
        ranked = sorted(range(len(section.groups)), key=lambda i: section.groups[i].rank)
        written = {i: self._group(section.groups[i]) for i in ranked}
        inside = (section.body if fits else "") + "".join(written[i] for i in range(len(written)))
        inside += "".join(self._table(table, opened=True) for table in section.tail)
        inside = inside or f'<p class="soft">{escape(section.empty)}</p>'
        head = f'<h2 id="{section.key}-title">{escape(section.title)}</h2>'
        return f'<section id="{section.key}" aria-labelledby="{section.key}-title">{head}{inside}</section>\n'

    def _group(self, group: Group) -> str:
        inside = "".join(self._figure(chart) for chart in group.charts)
        if not inside:
            return ""
        if group.closed:
            return f"<details><summary>{escape(group.title)}</summary>{inside}</details>"
        return (f"<h3>{escape(group.title)}</h3>" if group.title else "") + inside

    def _figure(self, chart: Chart) -> str:
        self.say(chart.title)
        if self.budget.left < 5_000:  # not even drawn
            self.budget.out.append(chart.title)
            return ""
        svg = inline_svg(chart)
        data = plotly_data(chart) if self.interactive else None
        shell = _figure(chart, svg, data is not None)
        if not self.budget.takes(chart.title, shell, "" if data is None else _script_json(data)):
            return ""
        if data is not None:
            self.data[chart.key] = data
        table = "" if chart.table is None else self._table(chart.table)
        return shell.replace("</figure>", f"{table}</figure>")

    def _table(self, table: Table, opened: bool = False) -> str:
        if table in self.tables:
            return f'<p class="soft"><a href="#{self.tables[table]}">{escape(table.title)}, as a table</a></p>'
        text = to_html(table)
        if not self.budget.takes(f"table: {table.title}", text):
            return ""
        place = self.tables[table] = f"table-{len(self.tables)}"
        if opened:
            return f'<div id="{place}">{text}</div>'
        return f'<details id="{place}"><summary>As a table</summary>{text}</details>'


def _figure(chart: Chart, svg: str, interactive: bool) -> str:
    key, title = escape(chart.key), escape(chart.title)
    caption = f'<figcaption id="{key}-told"><strong>{title}</strong>{escape(chart.about)}</figcaption>'
    label = f'role="img" aria-label="{escape(f"{chart.title}. {chart.about}")}"'
    place = f'<div class="legend" role="group" aria-label="Shown in: {title}"></div><div class="plot" {label}></div>'
    static = f'<div class="static scroll" tabindex="0" {label}>{svg}</div>'
    return f'<figure id="{key}" aria-labelledby="{key}-told">{caption}{place if interactive else ""}{static}</figure>'


def page(title: str, about: str, sections: Sequence[Section], *, interactive: bool, say: Callable[[str], None]) -> str:
    """Return the whole page.

    Args:
        title: Of the page.
        about: A line below it.
        sections: Its parts.
        interactive: Put plotly's script in.
        say: Is told what is being drawn.

    Raises:
        MissingExtraError: If plotly or matplotlib is not installed.
    """
    script = _plotly() if interactive else ""
    budget = Budget(MOST_BYTES - _SKELETON_BYTES - len(script.encode()))
    writer = _Writer(budget, interactive, say)
    written = {s.key: writer.section(s) for s in sorted(sections, key=lambda s: s.last)}
    body = "".join(written[s.key] for s in sections) + _left_out(budget.out)
    links = "".join(f'<li><a href="#{s.key}">{escape(s.title)}</a></li>' for s in sections)
    style = _text("page.css")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style>'
    )
    top = (
        '<a class="skip" href="#main">To the content</a><header><div class="wide">'
        f'<h1>{escape(title)}</h1><span class="soft">{escape(about)}</span>'
        '<button type="button" id="theme" hidden></button></div>'
        f'<nav class="wide" aria-label="Parts of the report"><ul>{links}</ul></nav></header>'
    )
    scripts = f'<script type="application/json" id="charts">{_script_json(writer.data)}</script>'
    scripts += f"<script>{script}</script>" if script else ""
    scripts += f"<script>{_text('page.js')}</script>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n'
        f'<body>{top}\n<main id="main" class="wide" tabindex="-1">\n{body}</main>\n'
        f'<footer class="wide">Made by epitorch.</footer>\n{scripts}</body></html>\n'
    )


def _left_out(names: Sequence[str]) -> str:
    if not names:
        return ""
    entries = "".join(f"<li>{escape(name)}</li>" for name in names[:MOST_NAMES])
    return (
        f"<details><summary>{len(names)} figures and tables were left out to keep the page under 6 MB; --figures and "
        f"--tables write all of them</summary><ul>{entries}</ul></details>"
    )


def _plotly() -> str:
    text: str = require("plotly.offline", "report").get_plotlyjs()
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _script_json(data: Any) -> str:
    """JSON inside of a script element: no character of it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
