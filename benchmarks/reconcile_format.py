"""How the reconciliation page writes numbers and tables."""

from __future__ import annotations

from paper_tables import Printed
from reconcile_counts import Counted


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def millions(number: float, digits: int = 1) -> str:
    """For example 300.8."""
    return f"{number / 1e6:.{digits}f}"


def less(number: float, printed: str, digits: int) -> str:
    """Ours less the printed figure, signed, in millions; a dash where nothing is printed."""
    return f"{number / 1e6 - float(printed):+.{digits}f}" if printed else "-"


def comparison(printed: Printed, mine: Counted) -> tuple[str, ...]:
    """One row: printed, ours, difference."""
    return (
        printed.row.replace("*", "\\*"),
        printed.params or "-",
        millions(mine.params, 3),
        less(mine.params, printed.params, 3),
        printed.madds or "-",
        millions(mine.madds),
        millions(mine.interpolation) if mine.interpolation else "-",
        less(mine.madds, printed.madds, 1),
        less(mine.plain, printed.madds, 1),
    )


HEAD = (
    "row",
    "params printed",
    "ours",
    "difference",
    "MAdds printed",
    "ours, executed",
    "of it interpolation",
    "difference",
    "difference without interpolation",
)


def points(better: Printed, base: Printed) -> str:
    """Difference of two printed accuracies, written out."""
    return f"{better.top1} - {base.top1} = {float(better.top1) - float(base.top1):+.2f}"


def change(new: float, old: float) -> str:
    """Relative change in percent."""
    return f"{100 * (new / old - 1):+.1f}%"


def span(numbers: list[float]) -> str:
    """For example "17.2 to 19.1"."""
    return f"{min(numbers):.1f} to {max(numbers):.1f}"


def same(one: int, other: int) -> str:
    """Say whether two counts agree, rather than claim it."""
    return "equal to ours" if one == other else f"differs from ours by {one - other:+,}"
