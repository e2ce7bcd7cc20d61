"""The figures of a report, without their looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epitorch.report._contents import curves_table, latency_table, layers_table, methods_table, moves
from epitorch.report._data import Chart, Column, Latency, Method, Routing, Run, Series, Table
from epitorch.sweeps.published import PublishedPoint

MAX_BARS = 80  # layers in a picture; the table has all
MAX_LINES = 16  # starts in a picture of how they moved


def overview_charts(
    methods: Sequence[Method], latencies: Sequence[Latency], published: Sequence[PublishedPoint]
) -> list[Chart]:
    """Return accuracy against multiply-adds, parameters and, where it was timed, milliseconds."""
    reached = [method for method in methods if method.accuracy is not None]
    charts = [
        _against(reached, latencies, published, "madds", "multiply-adds of a sample (millions)"),
        _against(reached, latencies, published, "params", "parameters (millions)"),
        _against_time(reached, latencies),
    ]
    return [chart for chart in charts if chart.series]


def _against(
    methods: Sequence[Method],
    latencies: Sequence[Latency],
    published: Sequence[PublishedPoint],
    what: str,
    axis: str,
) -> Chart:
    series = [*_published(published, what)]
    for method in methods:
        cost = getattr(method, what)
        if cost is not None and method.accuracy is not None:
            note = f"{method.name}: {100 * method.accuracy:.2f}% ({method.measured}, n = {method.n}), {cost:,}"
            spread = (None if method.sd is None else 100 * method.sd,)
            point = ((cost / 1e6,), (100 * method.accuracy,))
            series.append(Series(method.name, *point, "points", (note,), spread))
    title = "Accuracy against multiply-adds" if what == "madds" else "Accuracy against parameters"
    about = f"{title}: a point for each method, with the standard deviation where there are several runs."
    table = methods_table(methods, latencies)
    return Chart(f"accuracy-{what}", title, about, axis, "top-1 accuracy (%)", tuple(series), _wide(series), table)


def _published(points: Sequence[PublishedPoint], what: str) -> list[Series]:
    found = []
    for name in dict.fromkeys(point.method for point in points):
        own = [p for p in points if p.method == name and getattr(p, what) is not None]
        own.sort(key=lambda p: float(getattr(p, what)))
        if own:
            across, up = tuple(getattr(p, what) for p in own), tuple(p.accuracy for p in own)
            notes = tuple(f"{p.method} {p.label}, published: {p.accuracy}% ({p.source})" for p in own)
            found.append(Series(f"{name}, published", across, up, "line", notes, faint=True))
    return found


def _wide(series: Sequence[Series]) -> bool:
    """Costs far apart need a logarithmic axis."""
    values = [x for each in series for x in each.x if x > 0]
    return bool(values) and max(values) > 8 * min(values)


def _against_time(methods: Sequence[Method], latencies: Sequence[Latency]) -> Chart:
    reached = {method.name: 100 * method.accuracy for method in methods if method.accuracy is not None}
    rows = [row for row in latencies if row.method in reached]
    series = []
    for runtime, batch in dict.fromkeys((row.runtime, row.batch) for row in rows):
        own = [row for row in rows if (row.runtime, row.batch) == (runtime, batch)]
        notes = tuple(f"{row.method}: {row.milliseconds:.3f} ms, {reached[row.method or '']:.2f}%" for row in own)
        name = f"{runtime}, batch {batch}"
        up = tuple(reached[row.method or ""] for row in own)
        series.append(Series(name, tuple(row.milliseconds for row in own), up, "points", notes))
    about = "Accuracy against the time of one pass, a point for each method, runtime and batch size."
    return Chart(
        "accuracy-ms",
        "Accuracy against milliseconds",
        about,
        "milliseconds of a pass",
        "top-1 accuracy (%)",
        tuple(series),
        _wide(series),
        latency_table(rows),
    )


# ---- training ----


def training_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return loss and accuracy over the epochs."""
    loss: list[Series] = []
    accuracy: list[Series] = []
    for run in runs:
        c = run.curves
        loss += _curve(run, "training", c.loss, 1.0) + _curve(run, "held-out", c.heldout_loss, 1.0)
        accuracy += _curve(run, "held-out", c.heldout, 100.0)
        accuracy += _curve(run, "held-out, with learner", c.heldout_learner, 100.0)
    table = curves_table(runs)
    about = "of every run after each epoch."
    charts = [
        Chart("loss", "Loss", f"Training and held-out loss {about}", "epoch", "loss", tuple(loss), table=table),
        Chart(
            "accuracy-epochs",
            "Accuracy while training",
            f"Held-out accuracy {about}",
            "epoch",
            "held-out accuracy (%)",
            tuple(accuracy),
            table=table,
        ),
    ]
    return [chart for chart in charts if chart.series]


def _curve(run: Run, what: str, values: Sequence[float | None], scale: float) -> list[Series]:
    there = [(epoch, scale * value) for epoch, value in enumerate(values, 1) if value is not None]
    if not there:
        return []
    epochs, ys = zip(*there, strict=True)
    notes = tuple(f"{run.label}, {what}, epoch {epoch}: {y:.4g}" for epoch, y in there)
    return [Series(f"{run.name}, {what}", epochs, ys, "line", notes, faint=what != "held-out", group=run.name)]


# ---- layers ----


def layer_charts(run: Run, number: int) -> list[Chart]:
    """Return bars for each epitome layer: parameters, and error and time where they are known."""
    layers = [layer for layer in run.layers if layer.epitome][:MAX_BARS]
    if not layers:
        return []
    table = layers_table([run])
    names = tuple(layer.name for layer in layers)
    charts = [_parameters_chart(run, number, table)]
    if any(layer.error is not None for layer in layers):
        errors = tuple(layer.error or 0.0 for layer in layers)
        notes = tuple(f"{layer.name}: {layer.error}" for layer in layers)
        about = (
            "Relative Frobenius distance of each generated weight to the dense one; 0 is equal, 1 is as far as zero."
        )
        bars = (Series("error", errors, names, "bars", notes),)
        title = f"Reconstruction error, {run.label}"
        charts.append(Chart(f"error-{number}", title, about, "relative error", "", bars, table=table))
    if any(layer.seconds for layer in layers):
        charts.append(_times_chart(run, number, table))
    return charts


def _parameters_chart(run: Run, number: int, table: Table) -> Chart:
    layers = [layer for layer in run.layers if layer.epitome][:MAX_BARS]
    names = tuple(layer.name for layer in layers)
    before, after = tuple(layer.before for layer in layers), tuple(layer.after for layer in layers)
    notes = tuple(
        f"{layer.name}: {layer.before:,} before, {layer.after:,} after, runs as {layer.strategy}" for layer in layers
    )
    bars = (Series("before", before, names, "bars", notes), Series("after", after, names, "bars", notes))
    return Chart(
        f"parameters-{number}",
        f"Parameters of each epitome layer, {run.label}",
        "Two bars for each epitome layer: parameters of the plain layer, and those of its epitome and routing map.",
        "parameters",
        "",
        bars,
        table=table,
    )


def _times_chart(run: Run, number: int, table: Table) -> Chart:
    layers = [layer for layer in run.layers if layer.epitome and layer.seconds][:MAX_BARS]
    names = tuple(layer.name for layer in layers)
    chosen = tuple(1e3 * dict(layer.seconds).get(layer.strategy, 0.0) for layer in layers)
    folded = tuple(1e3 * dict(layer.seconds).get("folded", 0.0) for layer in layers)
    notes = tuple(f"{layer.name}: {layer.strategy} ({layer.reason})" for layer in layers)
    bars = (Series("folded", folded, names, "bars", notes), Series("as it runs", chosen, names, "bars", notes))
    about = "Milliseconds of each epitome layer, folded into a plain layer and as it was chosen to run."
    title = f"Time of each epitome layer, {run.label}"
    return Chart(f"time-{number}", title, about, "milliseconds", "", bars, table=table)


# ---- routing ----


def routing_charts(run: Run, number: int) -> list[Chart]:
    """Return two pictures for each axis with starts: where blocks lie, and how their starts moved."""
    charts = []
    for i, routing in enumerate(run.routing):
        key, table = f"{number}-{i}", _starts_table(run, routing)
        charts.append(_lies(run, routing, f"routing-{key}", table))
        if _has_moved(routing):
            charts.append(_moved(run, routing, f"moved-{key}", table))
    return charts


def _has_moved(routing: Routing) -> bool:
    most = moves(routing)[1]
    return most is not None and most > 0


def _lies(run: Run, r: Routing, key: str, table: Table) -> Chart:
    rows = tuple(f"block {i}" for i in r.shown)
    ends = [min(start + r.length, float(r.size)) for start in r.starts]
    notes = tuple(
        f"block {i}: begins at {s:.2f}, takes {r.length} of {r.size}" for i, s in zip(r.shown, r.starts, strict=True)
    )
    first = tuple(end - start for start, end in zip(r.starts, ends, strict=True))
    wrapped = tuple(max(0.0, start + r.length - r.size) for start in r.starts)
    bars = [Series("from its start", first, rows, "strips", notes, base=r.starts)]
    if any(wrapped):
        bars.append(Series("round the circle", wrapped, rows, "strips", notes, base=(0.0,) * len(rows)))
    some = "" if len(r.shown) == r.blocks else f" {len(r.shown)} of {r.blocks} blocks are shown."
    about = (
        f"Which of the {r.size} positions of the epitome each block of {r.length} takes, axis {r.axis}. "
        f"A block that runs past the end goes on at the beginning, in the second colour.{some}"
    )
    title = f"{r.layer}, axis {r.axis}: what each block takes"
    return Chart(key, title, about, "position in the epitome", "", tuple(bars), False, table, (0.0, float(r.size)))


def _moved(run: Run, r: Routing, key: str, table: Table) -> Chart:
    series = []
    for block in r.shown[:: -(-len(r.shown) // MAX_LINES)]:
        column = r.shown.index(block)
        ys = tuple(row[column] for row in r.moved)
        notes = tuple(f"block {block}, epoch {e}: {y:.2f}" for e, y in zip(r.epochs, ys, strict=True))
        series.append(Series(f"block {block}", r.epochs, ys, "line", notes))
    about = f"Starts of {len(series)} blocks before training (epoch 0) and after each epoch, in positions of {r.size}."
    title = f"{r.layer}, axis {r.axis}: how the starts moved"
    return Chart(key, title, about, "epoch", "start (position)", tuple(series), table=table)


def _starts_table(run: Run, r: Routing) -> Table:
    columns = (Column("block", "whole"), Column("start", "number"), Column("before training", "number"))
    began = r.moved[0] if r.moved else (None,) * len(r.shown)
    ends: Callable[[float | None], float | None] = lambda v: None if v is None else round(v, 3)  # noqa: E731
    rows = tuple((i, ends(s), ends(b)) for i, s, b in zip(r.shown, r.starts, began, strict=True))
    return Table(f"starts-{r.layer}-{r.axis}", f"Starts of {r.layer}, axis {r.axis}", columns, rows)
