"""A model's cost as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epitorch.cost.analysis import Cost


def table(cost: Cost) -> str:
    """A row for each layer, the totals, and notes on what the rows do not show."""
    head = ("layer", "kind", "params", "MAdds", "interpolation", "MAdds (paper)", "MAdds (dense)", "runs as")
    rows: list[tuple[str, ...]] = [
        (
            layer.name or "(model)",
            layer.kind,
            f"{layer.params:,}",
            f"{layer.madds:,}",
            f"{layer.madds_interpolation:,}",
            f"{layer.madds_paper:,}",
            f"{layer.madds_dense:,}",
            layer.strategy,
        )
        for layer in cost.layers
    ]
    rest = cost.params - sum(layer.params for layer in cost.layers)
    total = (cost.madds, cost.madds_interpolation, cost.madds_paper, cost.madds_dense)
    rows.append(("(outside of these layers)", "", f"{rest:,}", "", "", "", "", ""))
    rows.append(("total", "", f"{cost.params:,}", *(f"{number:,}" for number in total), ""))
    return "\n".join([*aligned([head, *rows], left=(0, 1, 7)), *_notes(cost)])


def _notes(cost: Cost) -> list[str]:
    notes = [
        f"params = epitomes {cost.params_epitome:,} + routing maps {cost.params_routing:,}"
        f" + everything that is no epitome {cost.params_other:,}"
    ]
    if cost.inputs:
        sizes = ", ".join("x".join(map(str, shape)) for shape in cost.inputs)
        notes.append(f"MAdds are those of one input of {sizes}")
    if cost.params_learner:
        notes.append(f"index learners (training only, not in params): {cost.params_learner:,}")
    if cost.by_kind:
        notes.append("MAdds by kind: " + ", ".join(f"{kind} {madds:,}" for kind, madds in cost.by_kind.items()))
    for outside in cost.operators:
        where = outside.where or "(model)"
        notes.append(f"outside of layers: {outside.madds:,} MAdds of {outside.operator} in {where}")
    for entry in cost.uncounted:
        amount = "an unknown number of" if entry.madds is None else f"{entry.madds:,}"
        notes.append(f"not counted: {amount} MAdds of {entry.operator} in {entry.where or '(model)'}")
    return notes


def aligned(rows: list[tuple[str, ...]], left: tuple[int, ...]) -> list[str]:
    """Lines of a table; the columns in `left` are flush left, the others flush right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
