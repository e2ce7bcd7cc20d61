"""The tables of a report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from epitorch.report._data import Cell, Column, Latency, Method, Routing, Run, Table
from epitorch.report._methods import accuracy_of, smallest_batch


def all_tables(runs: Sequence[Run], methods: Sequence[Method], latencies: Sequence[Latency]) -> list[Table]:
    """Return every table that has rows."""
    pictured = [run for run in runs if run.layers]
    tables = [
        methods_table(methods, latencies),
        runs_table(runs),
        latency_table(latencies),
        layers_table(pictured),
        routing_table(pictured),
        curves_table(runs),
    ]
    return [table for table in tables if table.rows]


def methods_table(methods: Sequence[Method], latencies: Sequence[Latency]) -> Table:
    """Return a row for each recipe: what it costs and reaches."""
    columns = (
        Column("method"),
        Column("role"),
        Column("n", "whole"),
        Column("accuracy %", "percent"),
        Column("sd", "percent"),
        Column("measured on"),
        Column("to dense", "points"),
        Column("to narrow", "points"),
        Column("parameters", "whole"),
        Column("MAdds", "whole"),
        Column("latency"),
    )
    rows = [_method_row(method, latencies) for method in methods]
    return Table("methods", "Methods", columns, tuple(rows))


def _method_row(method: Method, latencies: Sequence[Latency]) -> tuple[Cell, ...]:
    return (
        method.name,
        method.role or "not known",
        method.n,
        method.accuracy,
        method.sd,
        method.measured if method.accuracy is not None else None,
        method.to_dense,
        method.to_narrow,
        method.params,
        method.madds,
        latency_words(latencies, method.name),
    )


def latency_words(latencies: Sequence[Latency], method: str) -> str | None:
    """Return the times of a method at its smallest batch as words."""
    rows = smallest_batch(latencies, method)
    return ", ".join(f"{row.runtime} {row.milliseconds:.3g} ms" for row in rows) or None


def runs_table(runs: Sequence[Run]) -> Table:
    """Return a row for each run."""
    columns = (
        Column("run"),
        Column("state"),
        Column("test %", "percent"),
        Column("with learner %", "percent"),
        Column("held-out %", "percent"),
        Column("parameters", "whole"),
        Column("MAdds", "whole"),
        Column("seconds", "number"),
        Column("epochs", "whole"),
        Column("seed", "whole"),
        Column("date"),
    )
    return Table("runs", "Runs", columns, tuple(_run_row(run) for run in runs))


def _run_row(run: Run) -> tuple[Cell, ...]:
    result = run.result
    accuracy, on = accuracy_of(run)
    heldout = accuracy if on == "held-out" else (run.curves.heldout or (None,))[-1]
    return (
        run.label,
        run.state,
        None if result is None else result.accuracy.test,
        None if result is None else result.accuracy.test_learner,
        heldout,
        run.params,
        run.madds,
        None if result is None else round(result.seconds.total, 1),
        len(run.curves.loss) or None,
        None if result is None else result.seed,
        None if result is None else result.date[:10],
    )


def latency_table(latencies: Sequence[Latency]) -> Table:
    """Return the rows of the benchmarks."""
    columns = (
        Column("network"),
        Column("method"),
        Column("runtime"),
        Column("batch", "whole"),
        Column("ms", "ms"),
        Column("lower quartile", "ms"),
        Column("upper quartile", "ms"),
        Column("speed-up", "number"),
        Column("bytes stored", "whole"),
        Column("runs as"),
    )
    rows: list[tuple[Cell, ...]] = [
        (r.model, r.method, r.runtime, r.batch, r.milliseconds, *r.quartiles, round(r.speedup, 2), r.stored, r.runs_as)
        for r in latencies
    ]
    return Table("latency", "Latency", columns, tuple(rows))


def layers_table(runs: Sequence[Run]) -> Table:
    """Return a row for each layer with a weight."""
    columns = (
        Column("run"),
        Column("layer"),
        Column("kind"),
        Column("parameters before", "whole"),
        Column("parameters after", "whole"),
        Column("MAdds dense", "whole"),
        Column("MAdds", "whole"),
        Column("runs as"),
        Column("reason"),
        Column("error", "number"),
        Column("ms as it runs", "ms"),
        Column("ms folded", "ms"),
    )
    rows = [row for run in runs for row in _layer_rows(run)]
    return Table("layers", "Layers", columns, tuple(rows))


def _layer_rows(run: Run) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for layer in run.layers:
        times = dict(layer.seconds)
        rows.append(
            (
                run.label,
                layer.name,
                layer.kind,
                layer.before,
                layer.after,
                layer.madds_dense,
                layer.madds,
                layer.strategy,
                layer.reason,
                None if layer.error is None else round(layer.error, 4),
                _ms(times.get(layer.strategy)),
                _ms(times.get("folded")),
            )
        )
    return rows


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def routing_table(runs: Sequence[Run]) -> Table:
    """Return a row for each axis with starts."""
    columns = (
        Column("run"),
        Column("layer"),
        Column("axis"),
        Column("positions", "whole"),
        Column("block", "whole"),
        Column("blocks", "whole"),
        Column("positions used %", "percent"),
        Column("moved, mean", "number"),
        Column("moved, most", "number"),
    )
    rows: list[tuple[Cell, ...]] = [
        (run.label, r.layer, r.axis, r.size, r.length, r.blocks, used(r), *moves(r))
        for run in runs
        for r in run.routing
    ]
    return Table("routing", "Routing maps", columns, tuple(rows))


def used(routing: Routing) -> float | None:
    """Return the share of positions that a block uses; None where only some blocks are known."""
    if len(routing.shown) < routing.blocks:
        return None
    places: set[int] = set()
    for start in routing.starts:
        last = routing.length + (start != int(start))  # a start between two positions mixes both
        places |= {(int(start) + k) % routing.size for k in range(min(last, routing.size))}
    return len(places) / routing.size


def moves(routing: Routing) -> tuple[float | None, float | None]:
    """Return how far starts lie from where they began, on the circle: mean and most, in positions."""
    if not routing.moved:
        return None, None
    ways = [
        min(abs(a - b), routing.size - abs(a - b)) for a, b in zip(routing.moved[0], routing.moved[-1], strict=True)
    ]
    return round(sum(ways) / len(ways), 3), round(max(ways), 3)


def curves_table(runs: Sequence[Run]) -> Table:
    """Return a row for each epoch of each run."""
    columns = (
        Column("run"),
        Column("epoch", "whole"),
        Column("training loss", "number"),
        Column("held-out loss", "number"),
        Column("training %", "percent"),
        Column("held-out %", "percent"),
        Column("held-out with learner %", "percent"),
    )
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        c = run.curves
        for epoch, values in enumerate(zip_longest(c.loss, c.heldout_loss, c.train, c.heldout, c.heldout_learner), 1):
            loss = tuple(None if value is None else round(value, 5) for value in values[:2])
            rows.append((run.label, epoch, *loss, *values[2:]))
    return Table("curves", "Training curves", columns, tuple(rows))
