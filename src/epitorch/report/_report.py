"""report(): runs in, one page out; figures and tables beside it if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from epitorch._files import write_atomic
from epitorch.deploy.report import Deployment
from epitorch.errors import InputError, explain
from epitorch.progress import progress as show_progress
from epitorch.report._cards import by_note, cards, made_by, notes
from epitorch.report._charts import layer_charts, overview_charts, routing_charts, training_charts
from epitorch.report._contents import all_tables, latency_table, methods_table, runs_table
from epitorch.report._data import Chart, Latency, Method, Run
from epitorch.report._draw import write_figures
from epitorch.report._layers import dense_weights, with_layers
from epitorch.report._methods import data_of, methods_of
from epitorch.report._page import Group, Section, page
from epitorch.report._read import describe, find_runs
from epitorch.report._tables import to_markdown, write_tables
from epitorch.report._timed import attach, load_bench
from epitorch.sweeps.published import PublishedPoint, published_points


@dataclass(frozen=True)
class Report:
    """What a report is about, and where it was written.

    Args:
        runs: As they were read.
        methods: Runs of one recipe together.
        latencies: Of the benchmarks.
        page: The HTML file.
        figures: SVG and PNG files.
        tables: Markdown, CSV and LaTeX files.
        notes: What is missing, beyond the runs' own notes.
        published: Results of other methods, drawn beside the runs.
    """

    runs: tuple[Run, ...]
    methods: tuple[Method, ...]
    latencies: tuple[Latency, ...]
    page: Path | None = None
    figures: tuple[Path, ...] = ()
    tables: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    published: tuple[PublishedPoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: methods, runs in short, the notes and the files."""
        files = {"page": str(self.page), "figures": [*map(str, self.figures)], "tables": [*map(str, self.tables)]}
        runs = [
            {"label": run.label, "name": run.name, "state": run.state, "notes": list(run.notes)} for run in self.runs
        ]
        methods = [asdict(method) for method in self.methods]
        return {"methods": methods, "runs": runs, "notes": list(self.notes), **files}

    def __str__(self) -> str:
        lines = [to_markdown(methods_table(self.methods, self.latencies)).rstrip()]
        lines += [f"{', '.join(labels)}: {note}" for note, labels in by_note(self.runs).items()] + list(self.notes)
        folders = sorted({str(path.parent) for path in (*self.figures, *self.tables)})
        return "\n".join([*lines, f"written to {', '.join([str(self.page), *folders])}"])


def collect(
    runs: Sequence[str | Path],
    *,
    bench: Sequence[str | Path] = (),
    deployments: Sequence[Deployment] = (),
    dense: str | Path | None = None,
    published: str | None = None,
    allow_factory: bool = False,
) -> Report:
    """Read what a report is made of; nothing is written.

    Args:
        runs: Folders of runs (finished or not) or of checkpoints, folders that hold such, results files.
        bench: What `epitorch bench --out` wrote.
        deployments: What `epitorch.deploy` left on networks of these runs; each goes to the runs of its architecture.
        dense: Folder of a checkpoint of the plain network, whose weights the generated ones are compared with.
        published: `cifar10` or `imagenet`: draw published results of other methods too.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: If there is no run, a file is damaged, or a report belongs to none of the runs.
    """
    found = find_runs(runs)
    described = describe(found)
    weights = None if dense is None else dense_weights(dense, allow_factory=allow_factory)
    firsts = _firsts(described)
    read = [
        with_layers(run, there, weights, allow_factory=allow_factory) if run.label in firsts else run
        for run, there in zip(described, found, strict=True)
    ]
    if weights is not None and not any(layer.error is not None for run in read for layer in run.layers):
        raise InputError(
            explain(
                "there is nothing to compare with the dense weights",
                expected="runs with epitome layers of the same names",
                got=f"layers {', '.join(list(weights)[:4])}, ...",
                where=str(dense),
            )
        )
    read = attach(read, deployments)
    latencies = [row for path in bench for row in load_bench(path, read)]
    more = [*_caveats(read, firsts), *_untimed(latencies, bench)]
    points = () if published is None else tuple(published_points(published))
    read = _repeated(read)
    return Report(tuple(read), tuple(methods_of(read)), tuple(latencies), notes=tuple(more), published=points)


def _firsts(runs: Sequence[Run]) -> set[str]:
    """One run of each method has its layers read: they differ little from seed to seed."""
    first: dict[str, Run] = {}
    for run in runs:
        best = first.get(run.name)
        if best is None or (best.state != "finished" and run.state == "finished"):
            first[run.name] = run
    return {run.label for run in first.values()}


def _repeated(runs: list[Run]) -> list[Run]:
    """Runs of one method have its role; a run without its layers knows it from its recipe alone."""
    known = {run.name: run for run in runs if run.epitomes is not None}
    return [
        replace(run, epitomes=known[run.name].epitomes) if run.epitomes is None and run.name in known else run
        for run in runs
    ]


def _caveats(runs: Sequence[Run], firsts: set[str]) -> list[str]:
    more = []
    if len(firsts) < len(runs):
        more.append("Of several runs of one method, the layers and routing maps are those of the first.")
    if len({data_of([run]) for run in runs if run.result is not None}) > 1:
        more.append("These runs are on different data: only what was measured on the same data is compared.")
    return more


def _untimed(latencies: Sequence[Latency], bench: Sequence[str | Path]) -> list[str]:
    unknown = sorted({row.model for row in latencies if row.method is None})
    if not bench or not unknown:
        return []
    return [f"Timed, but none of these runs, so without an accuracy: {', '.join(unknown)}."]


def charts_of(report: Report) -> list[Chart]:
    """Return every figure of a report."""
    charts = [*overview_charts(report.methods, report.latencies, report.published), *training_charts(report.runs)]
    for i, run in enumerate(report.runs):
        charts += [*layer_charts(run, i), *routing_charts(run, i)]
    return charts


def report(
    runs: Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    figures: str | Path | None = None,
    tables: str | Path | None = None,
    bench: Sequence[str | Path] = (),
    deployments: Sequence[Deployment] = (),
    dense: str | Path | None = None,
    published: str | None = None,
    allow_factory: bool = False,
    interactive: bool = True,
    title: str = "epitorch report",
    progress: bool = True,
) -> Report:
    """Write one self-contained page on runs: nothing is fetched when it is opened, and it is below 6 MB.

    Args:
        runs: Folders of runs (finished or not) or of checkpoints, folders that hold such, results files.
        out: The page, `.html`, in a folder that exists; replaced if it is there, whole or not at all.
        figures: Folder for every figure as SVG and PNG.
        tables: Folder for every table as Markdown, CSV and LaTeX.
        bench: What `epitorch bench --out` wrote.
        deployments: What `epitorch.deploy` left on networks of these runs (`net.deployment`).
        dense: Folder of a checkpoint of the plain network, whose weights the generated ones are compared with.
        published: `cifar10` or `imagenet`: draw published results of other methods too.
        allow_factory: As for `load_checkpoint`.
        interactive: Put plotly's script into the page (4.8 MB); without it the figures are pictures.
        title: Of the page.
        progress: Say on standard error what is being done, once two seconds have passed.

    Returns:
        What was read, and the files.

    Raises:
        InputError: If there is no run, a file is damaged, or a report belongs to none of the runs.
        MissingExtraError: If matplotlib, or for an interactive page plotly, is not installed.
    """
    out = Path(out)
    _check_out(out, figures, tables)
    made = collect(
        runs, bench=bench, deployments=deployments, dense=dense, published=published, allow_factory=allow_factory
    )
    with show_progress("report", progress) as say:
        text = page(title, _about(made), _sections(made), interactive=interactive, say=say)
        write_atomic(out, text.encode("utf-8", "replace"))
        drawn = [] if figures is None else write_figures(charts_of(made), Path(figures), say)
    written = [] if tables is None else write_tables(all_tables(made.runs, made.methods, made.latencies), Path(tables))
    return replace(made, page=out, figures=tuple(drawn), tables=tuple(written))


def _check_out(out: Path, figures: str | Path | None, tables: str | Path | None) -> None:
    """Before anything is read."""
    if out.suffix not in (".html", ".htm") or out.is_dir() or not out.parent.is_dir():
        got = "a folder" if out.is_dir() else f"no folder {out.parent}" if not out.parent.is_dir() else out.name
        expected = "a file that ends in .html, in a folder that exists"
        raise InputError(explain("the page has no place", expected=expected, got=got, where=str(out)))
    for folder in (figures, tables):
        if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
            raise InputError(
                explain("no folder can be made here", expected="a folder", got="a file", where=str(folder))
            )


def _about(made: Report) -> str:
    finished = sum(run.state == "finished" for run in made.runs)
    there = f"{len(made.runs)} run{'s' if len(made.runs) != 1 else ''}"
    return there if finished == len(made.runs) else f"{there}, {finished} of them finished"


def _sections(made: Report) -> list[Section]:
    overview = tuple(overview_charts(made.methods, made.latencies, made.published))
    training = tuple(training_charts(made.runs))
    layers = tuple(
        Group(run.label, tuple(charts)) for i, run in enumerate(made.runs) if (charts := layer_charts(run, i))
    )
    no_layers = "None of these runs has epitome layers with a checkpoint to read them from."
    tables = [methods_table(made.methods, made.latencies), runs_table(made.runs)]
    tables += [latency_table(made.latencies)] if made.latencies else []
    return [
        Section("summary", "Summary", cards(made.methods, made.latencies) + notes(made.runs, made.notes)),
        Section("accuracy", "Accuracy and cost", "", (Group("", overview),), "No accuracy is known of these runs."),
        Section("training", "Training", "", (Group("", training),), "No run recorded its epochs."),
        Section("layers", "Layers", "", layers, no_layers),
        Section("routing", "Routing maps", "", _routing_groups(made.runs), no_layers, last=True),
        Section("runs", "Runs", made_by(made.runs), (), "", tuple(tables)),
    ]


def _routing_groups(runs: Sequence[Run]) -> tuple[Group, ...]:
    groups: list[Group] = []
    for i, run in enumerate(runs):
        charts = routing_charts(run, i)
        for rank, layer in enumerate(dict.fromkeys(routing.layer for routing in run.routing)):
            own = tuple(chart for chart in charts if chart.title.startswith(f"{layer}, axis "))
            groups.append(Group(f"{run.label}: {layer}", own, closed=bool(groups), rank=rank))
    return tuple(groups)
