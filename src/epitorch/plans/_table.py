"""A plan as a table."""

from __future__ import annotations

from math import prod

from epitorch.plans._data import LayerPlan, Plan, WeightFacts, params_after
from epitorch.spec import EpitomeSpec

_HEAD = ("layer", "weight", "epitome", "starts", "index", "share", "rank", "params", "MAdds")
_LEFT = (0,)


def plan_table(plan: Plan) -> str:
    """One row per layer, then what was left and why, then the totals."""
    names = [*plan.layers, *(name for name in plan.left if name not in plan.layers)]
    order = {name: i for i, name in enumerate(plan.weights)}
    names.sort(key=lambda name: order.get(name, len(order)))
    rows = [_HEAD, *(_row(plan, name) for name in names)]
    return "\n".join([*_aligned(rows), *_totals(plan)])


def rank_bounds(spec: EpitomeSpec) -> tuple[int, int]:
    """Largest possible rank of the weight matrix `(C_out, C_in * prod K)`: dense, and generated (method section 8).

    With separable starts the generated matrix has at most `O` independent rows and `I` independent input channels;
    with one start per pair of blocks it can have full rank where there are as many shifts. With one per pair on one
    axis each of the S blocks of the other adds what shifts tell apart: all but the sums over the positions that a shift
    goes through, so `S (O - g) + g` rows (g the group length); of R whole blocks of filters no more than
    `R (O - g) + g` rows differ by more than these sums. Input channels likewise.
    """
    out, columns = spec.weight_shape[0], prod(spec.weight_shape[1:])
    taps = prod(spec.weight_shape[2:])
    if "spatial" in spec.start_shapes:
        return min(out, columns), min(out, columns)
    if spec.channel_starts == "grid":
        shifts = prod(spec.epitome_shape[:2])
        most = min(spec.num_in_blocks * shifts, spec.num_out_blocks * shifts * taps)
        return min(out, columns), min(out, columns, most)
    rows, inputs = spec.epitome_shape[:2]
    if "out" in spec.start_shapes and spec.owners("out") == "grid":
        rows, inputs = _told_apart(rows, spec.num_in_blocks, out, spec), spec.weight_shape[1]
    if "in" in spec.start_shapes and spec.owners("in") == "grid":
        rows, inputs = out, _told_apart(inputs, spec.num_out_blocks, spec.weight_shape[1], spec)
    return min(out, columns), min(out, rows, min(spec.weight_shape[1], inputs) * taps)


def _told_apart(size: int, others: int, length: int, spec: EpitomeSpec) -> int:
    """Directions on an axis of `length` with starts per pair, of `size` positions, by the blocks of the other axis."""
    group, block = spec.group_length, spec.block_out if spec.channel_starts == "grid_out" else spec.block_in
    own = length // size if block == size and length % size == 0 else length
    return min(others, own) * (size - group) + group


def _row(plan: Plan, name: str) -> tuple[str, ...]:
    facts, layer = plan.weights.get(name), plan.layers.get(name)
    shape = "-" if facts is None else _shape(facts.shape)
    if layer is None:
        before = "-" if facts is None else f"{facts.params:,}"
        madds = "-" if facts is None else _number(facts.madds_dense)
        return (name or "(model)", shape, f"left: {plan.left[name]}", "", "", "", "", before, madds)
    if facts is None:
        return (name, shape, _shape(layer.epitome_shape), layer.channel_starts, layer.index, "-", "-", "-", "-")
    madds = _change(facts.madds_dense, plan.madds_of(name))
    return (name, shape, _shape(layer.epitome_shape), *_figures(plan, name, layer, facts), madds)


def _figures(plan: Plan, name: str, layer: LayerPlan, facts: WeightFacts) -> tuple[str, ...]:
    before, after = facts.params, params_after(plan, name)
    spec = layer.spec_for(facts.shape, facts.transposed)
    rank = rank_bounds(spec)
    starts = f"{spec.channel_starts} {spec.num_out_blocks}x{spec.num_in_blocks}"
    return starts, layer.index, f"{after / before:.3f}", f"{rank[0]} > {rank[1]}", _change(before, after)


def _totals(plan: Plan) -> list[str]:
    lines = [f"{len(plan.layers)} layers to convert, {len(plan.left)} left"]
    asked = plan.budget
    if asked is None:
        return [*lines, "no budget is known: this plan was written by hand"]
    lines.append(f"parameters  {_change(asked.params_dense, plan.params)}")
    at = "" if not asked.input_shape else f", for one input of {_shape(asked.input_shape[1:])}"
    lines.append(f"MAdds       {_change(asked.madds_dense, plan.madds)}{at}")
    if plan.madds != plan.madds_fresh:
        lines.append(f"{_number(plan.madds_fresh):>12} MAdds right after conversion: whole starts are not interpolated")
    total = plan.params if asked.kind == "params" else plan.madds
    rest = "" if total is None else f", {asked.amount - total:,} of it unused"
    if total is not None and total > asked.amount:
        rest = f", exceeded by {total - asked.amount:,}: the plan was edited"
    what = "parameters" if asked.kind == "params" else "MAdds"
    return [*lines, f"budget      {asked.amount:,} {what}{rest}"]


def _change(before: int | None, after: int | None) -> str:
    return f"{_number(before)} > {_number(after)}"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if k in _LEFT else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
