"""Tables as Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from epitorch._files import write_atomic
from epitorch.report._data import Cell, Column, ColumnKind, Table

_SHOWN: dict[ColumnKind, Callable[[float], str]] = {
    "whole": lambda value: f"{value:,.0f}",
    "number": lambda value: f"{value:.4g}",
    "percent": lambda value: f"{100 * value:.2f}",
    "points": lambda value: f"{100 * value:+.2f}",
    "ms": lambda value: f"{value:.3f}",
}
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def shown(cell: Cell, column: Column) -> str:
    """Return a cell as people read it; a dash where there is nothing."""
    if cell is None:
        return "-"
    if column.kind == "text" or isinstance(cell, str):
        return str(cell)
    return _SHOWN[column.kind](cell)


def to_markdown(table: Table) -> str:
    """Return a table whose columns line up: text to the left, numbers to the right."""
    cells = [[_markdown(column.head) for column in table.columns]]
    cells += [[_markdown(shown(cell, c)) for cell, c in zip(row, table.columns, strict=True)] for row in table.rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    left = [column.kind == "text" for column in table.columns]
    rule = ["-" * width if first else "-" * (width - 1) + ":" for width, first in zip(widths, left, strict=True)]
    cells.insert(1, rule)
    return "".join(_markdown_row(row, widths, left) for row in cells)


def _markdown_row(row: Sequence[str], widths: Sequence[int], left: Sequence[bool]) -> str:
    padded = [
        cell.ljust(width) if first else cell.rjust(width) for cell, width, first in zip(row, widths, left, strict=True)
    ]
    return f"| {' | '.join(padded)} |\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", text)


def to_csv(table: Table) -> str:
    """Return the values themselves: fractions, not percent; an empty cell where there is nothing."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.head.removesuffix(" %") for column in table.columns])
    writer.writerows([_csv(cell) for cell in row] for row in table.rows)
    return out.getvalue()


def _csv(cell: Cell) -> Cell:
    # a spreadsheet would run a name that begins like a formula
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in tuple("=+-@\t\r") else cell


def to_latex(table: Table) -> str:
    """Return a `tabular` for the package booktabs."""
    kinds = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    lines = [_latex_row([column.head for column in table.columns])]
    rows = [[shown(cell, c) for cell, c in zip(row, table.columns, strict=True)] for row in table.rows]
    body = "\n".join(_latex_row(row) for row in rows)
    return "\n".join(
        [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", *lines, r"\midrule", body, r"\bottomrule", r"\end{tabular}", ""]
    )


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join("".join(_LATEX.get(c, c) for c in cell) for cell in cells) + r" \\"


def to_html(table: Table) -> str:
    """Return a table with a caption; the first column heads its rows."""
    head = "".join(f'<th scope="col"{_side(c)}>{escape(c.head)}</th>' for c in table.columns)
    rows = "".join(_html_row(row, table.columns) for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}, table"><table>'
        f"<caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _html_row(row: Sequence[Cell], columns: Sequence[Column]) -> str:
    cells = [escape(shown(cell, column)) for cell, column in zip(row, columns, strict=True)]
    first = f'<th scope="row">{cells[0]}</th>'
    rest = "".join(f"<td{_side(c)}>{cell}</td>" for cell, c in zip(cells[1:], columns[1:], strict=True))
    return f"<tr>{first}{rest}</tr>"


def _side(column: Column) -> str:
    return "" if column.kind == "text" else ' class="number"'


_FORMATS: dict[str, Callable[[Table], str]] = {"md": to_markdown, "csv": to_csv, "tex": to_latex}


def write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write every table as Markdown, CSV and LaTeX, and return the files."""
    written = []
    for table in tables:
        for suffix, render in _FORMATS.items():
            path = folder / f"{table.key}.{suffix}"
            write_atomic(path, render(table).encode("utf-8", "replace"))
            written.append(path)
    return written
