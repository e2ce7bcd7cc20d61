"""What the page is made of, as plain data: runs, layers, routing maps, charts and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from epitorch.results import RunResult

State = Literal["finished", "unfinished", "checkpoint"]
Cell = str | int | float | None
ColumnKind = Literal["text", "whole", "number", "percent", "points", "ms"]
Mode = Literal["points", "line", "bars", "strips"]


@dataclass(frozen=True)
class Curves:
    """Numbers after each epoch; losses as they are, accuracies as fractions. Empty where they were not measured."""

    loss: tuple[float | None, ...] = ()
    heldout_loss: tuple[float | None, ...] = ()
    train: tuple[float | None, ...] = ()
    heldout: tuple[float | None, ...] = ()
    heldout_learner: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One layer with a weight.

    Args:
        name: Qualified name.
        kind: Class name.
        epitome: It has an epitome.
        before: Parameters of the plain layer with the same weight.
        after: Parameters that it keeps.
        madds: Executed per sample.
        madds_dense: Of the plain layer.
        strategy: How it runs: of the deployment report where there is one, else as `count` assumes.
        error: Relative Frobenius distance of the generated weight to the dense one.
        seconds: Of one pass, by strategy, where they were measured.
        reason: Why this strategy, of the deployment report.
    """

    name: str
    kind: str
    epitome: bool
    before: int
    after: int
    madds: int
    madds_dense: int
    strategy: str
    error: float | None = None
    seconds: tuple[tuple[str, float], ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Routing:
    """The starts on one axis of one layer's epitome.

    Args:
        layer: Its name.
        axis: "out", "in", "spatial0", "spatial1", ...
        size: Positions of the epitome on this axis, a circle.
        length: Positions that a block takes.
        blocks: How many there are.
        shown: Which of them follow.
        starts: Of those, in positions.
        epochs: At which the starts were recorded; 0 is before training.
        moved: For each of those epochs the starts of the blocks shown.
    """

    layer: str
    axis: str
    size: int
    length: int
    blocks: int
    shown: tuple[int, ...]
    starts: tuple[float, ...]
    epochs: tuple[int, ...] = ()
    moved: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Run:
    """One run, or a checkpoint that no run is known of.

    Args:
        label: Unique on the page.
        name: Of the recipe, or of the model.
        places: What a benchmark may call it: names and folders.
        state: Finished, unfinished or a checkpoint alone.
        result: What a finished run measured.
        epitomes: Whether it has epitome layers; None where that is not known.
        params: That it keeps; None where they are not known.
        madds: Executed per sample, likewise.
        curves: Of training.
        layers: With a weight.
        routing: Of every axis that has starts.
        notes: What is missing, and why.
    """

    label: str
    name: str
    places: tuple[str, ...]
    state: State
    result: RunResult | None
    epitomes: bool | None
    params: int | None
    madds: int | None
    curves: Curves
    layers: tuple[Layer, ...] = ()
    routing: tuple[Routing, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Latency:
    """A row of a benchmark.

    Args:
        model: As the benchmark calls it.
        method: Of the report, where one is meant.
        runtime: "torch", "onnxruntime", ...
        batch: Samples in a pass.
        milliseconds: Of a pass, median.
        quartiles: Of it.
        speedup: Over the benchmark's first network.
        stored: Bytes of the file.
        runs_as: How the epitome layers run.
    """

    model: str
    method: str | None
    runtime: str
    batch: int
    milliseconds: float
    quartiles: tuple[float, float]
    speedup: float
    stored: int
    runs_as: str


@dataclass(frozen=True)
class Method:
    """Runs of one recipe together.

    Args:
        name: Of the recipe.
        role: "epitome", "dense" (the largest plain network), "narrow" (a smaller plain one) or "" (not known).
        n: Finished runs.
        accuracy: Mean, a fraction; None where nothing was measured.
        sd: Standard deviation over the runs; None for one.
        measured: What the accuracy was measured on: "test" or "held-out".
        params: That it keeps.
        madds: Executed per sample.
        to_dense: Accuracy minus that of the dense network.
        to_narrow: Accuracy minus that of the narrow network nearest in parameters.
        dense: Name of the one.
        narrow: Name of the other.
    """

    name: str
    role: str
    n: int
    accuracy: float | None
    sd: float | None
    measured: str
    params: int | None
    madds: int | None
    to_dense: float | None = None
    to_narrow: float | None = None
    dense: str | None = None
    narrow: str | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, and how its cells are written. CSV has the values as they are."""

    head: str
    kind: ColumnKind = "text"


@dataclass(frozen=True)
class Table:
    """A table: `key` names its files."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Series:
    """One line, group of points or set of bars.

    Args:
        name: For the legend.
        x: Values; of bars and strips their lengths.
        y: Values; of bars and strips the names of their rows.
        mode: How it is drawn.
        notes: What a pointer over each point tells.
        spread: Half the length of the error bar at each point.
        base: Where each strip begins.
        faint: Drawn dashed and thin, behind the others.
        group: Series of one group share a colour; default the name.
    """

    name: str
    x: tuple[Any, ...]
    y: tuple[Any, ...]
    mode: Mode
    notes: tuple[str, ...] = ()
    spread: tuple[float | None, ...] = ()
    base: tuple[float, ...] = ()
    faint: bool = False
    group: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure without its looks: the page, PNG and SVG are drawn from it.

    Args:
        key: Names its files and places.
        title: Above it.
        about: What it shows, for those who do not see it.
        x_title: Of the axis.
        y_title: Of the axis.
        series: What is drawn.
        log_x: The axis is logarithmic.
        table: The same as numbers.
        x_range: Limits, where they are not those of the data.
    """

    key: str
    title: str
    about: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    log_x: bool = False
    table: Table | None = None
    x_range: tuple[float, float] | None = None
