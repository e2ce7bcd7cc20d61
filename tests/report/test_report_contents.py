"""Numbers of the report against numbers found in another way."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import epitorch
from epitorch.checkpoint import CheckpointConfig, load_checkpoint, save_checkpoint
from epitorch.errors import InputError
from epitorch.report import charts_of, collect, load_deployment, save_deployment
from epitorch.report._contents import moves, used
from epitorch.report._data import Column, Routing, Table
from epitorch.report._methods import methods_of
from epitorch.report._tables import to_csv, to_html, to_latex, to_markdown
from epitorch.results import load_results
from epitorch.training.starts import kept_of


def test_methods_are_compared_with_dense_and_narrow(runs: Path) -> None:
    accuracy = {n: load_results(runs / n / "results.json")[0].accuracy.test for n in ("dense", "narrow", "epitome")}
    methods = {method.name: method for method in collect([runs]).methods}
    assert {name: method.role for name, method in methods.items()} == {
        "tiny/dense": "dense",
        "tiny/narrow": "narrow",
        "tiny/epitome": "epitome",
    }
    found = methods["tiny/epitome"]
    assert found.to_dense == pytest.approx(accuracy["epitome"] - accuracy["dense"])
    assert found.to_narrow == pytest.approx(accuracy["epitome"] - accuracy["narrow"])
    assert methods["tiny/dense"].to_dense is None


def test_runs_of_a_method_have_mean_and_spread(runs: Path) -> None:
    (run,) = collect([runs / "dense"]).runs
    assert run.result is not None
    accuracies = (0.5, 0.6, 0.8)
    results = [replace(run.result, accuracy=replace(run.result.accuracy, test=value)) for value in accuracies]
    (method,) = methods_of([replace(run, label=str(i), result=result) for i, result in enumerate(results)])
    assert method.n == 3
    assert method.accuracy == pytest.approx(1.9 / 3)
    assert method.sd == pytest.approx(0.152752523)


def test_other_data_are_not_compared(runs: Path) -> None:
    made = collect([runs])
    dense, epitome, _ = made.runs
    assert dense.result is not None
    elsewhere = replace(dense, result=replace(dense.result, data={**dense.result.data, "train_images": 3}))
    (_, found) = methods_of([elsewhere, epitome])
    assert found.to_dense is None
    (_, found) = methods_of([dense, epitome])
    assert found.to_dense is not None


def test_layers_are_those_of_the_checkpoint(runs: Path) -> None:
    model = load_checkpoint(runs / "epitome").model
    (run,) = collect([runs / "epitome"]).runs
    layers = {layer.name: layer for layer in run.layers}
    for name in ("conv2", "conv3"):
        module = model.get_submodule(name)
        assert layers[name].before == module.weight.numel()
        starts = sum(value.numel() for value in module.starts().values())
        assert layers[name].after == module.epitome.numel() + starts
    assert not layers["conv1"].epitome
    assert layers["conv1"].before == layers["conv1"].after


def test_routing_maps_are_those_of_the_checkpoint_and_end_where_they_moved(runs: Path) -> None:
    model = load_checkpoint(runs / "epitome").model
    (run,) = collect([runs / "epitome"]).runs
    found = {(routing.layer, routing.axis): routing for routing in run.routing}
    starts = model.get_submodule("conv2").starts()["out"]
    torch.testing.assert_close(torch.tensor(found["conv2", "out"].starts), starts)
    spatial = model.get_submodule("conv3").starts()["spatial"]
    torch.testing.assert_close(torch.tensor(found["conv3", "spatial1"].starts), spatial[:, 1])
    assert (found["conv3", "spatial1"].size, found["conv3", "spatial1"].length) == (4, 3)
    for routing in found.values():
        assert routing.epochs == (0, 1, 2)
        assert routing.moved[-1] == pytest.approx(routing.starts, abs=1e-3)


def test_the_error_is_the_distance_to_the_dense_weight(runs: Path, tmp_path: Path) -> None:
    epitome, dense = (load_checkpoint(runs / name).model for name in ("epitome", "dense"))
    (run,) = collect([runs / "epitome"], dense=runs / "dense").runs
    errors = {layer.name: layer.error for layer in run.layers}
    with torch.no_grad():
        a, b = epitome.get_submodule("conv2").weight, dense.get_submodule("conv2").weight
        wanted = float((a - b).square().sum().sqrt() / b.square().sum().sqrt())
    assert errors["conv2"] == pytest.approx(wanted, rel=1e-5)
    assert errors["conv1"] is None
    epitorch.to_dense_(epitome)
    config = CheckpointConfig("epitorch:digits_cnn", {"widths": [8, 8, 16]}, None, None, None)
    save_checkpoint(tmp_path, epitome, config)
    (run,) = collect([runs / "epitome"], dense=tmp_path).runs  # its own weights
    assert all(layer.error == pytest.approx(0, abs=1e-6) for layer in run.layers if layer.epitome)


def test_weights_of_another_network_are_refused(runs: Path) -> None:
    with pytest.raises(InputError, match="another network"):
        collect([runs / "epitome"], dense=runs / "narrow")
    with pytest.raises(InputError, match="nothing to compare"):
        collect([runs / "narrow"], dense=runs / "dense")


def test_a_deployment_goes_to_the_run_of_its_architecture(runs: Path, tmp_path: Path) -> None:
    model = load_checkpoint(runs / "epitome").model
    deployment = epitorch.deploy(model, torch.zeros(1, 1, 8, 8), strategy="reuse").deployment
    timed = replace(deployment, layers=tuple(replace(row, seconds=(("folded", 2e-3),)) for row in deployment.layers))
    save_deployment(tmp_path / "deploy.json", timed)
    assert load_deployment(tmp_path / "deploy.json") == timed
    made = collect([runs], deployments=[timed])
    told = {layer.name: layer for run in made.runs if run.name == "tiny/epitome" for layer in run.layers}
    for row in timed.layers:
        assert (told[row.name].strategy, told[row.name].reason) == (row.strategy, row.reason)
    assert any(chart.key.startswith("time-") for chart in charts_of(made))
    with pytest.raises(InputError, match="belongs to none"):
        collect([runs / "dense"], deployments=[timed])


@pytest.mark.parametrize("content", ["", "[]", '{"format": 9}', '{"format": 1, "layers": [{"name": 1}]}'])
def test_a_damaged_deployment_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "deploy.json").write_text(content)
    with pytest.raises(InputError, match=r"deploy\.json"):
        load_deployment(tmp_path / "deploy.json")


def test_used_positions_and_moves_on_the_circle() -> None:
    routing = Routing("a", "out", 10, 3, 2, (0, 1), (9.0, 2.5), (0, 1), ((0.5, 2.0), (9.0, 2.5)))
    # 9, 0, 1 and, between two positions, 2, 3, 4, 5
    assert used(routing) == pytest.approx(0.7)
    assert moves(routing) == (1.0, 1.5)
    assert used(replace(routing, blocks=100)) is None
    assert moves(replace(routing, moved=())) == (None, None)


def test_a_block_past_the_end_goes_on_at_the_beginning(runs: Path) -> None:
    made = collect([runs / "epitome"])
    chart = next(chart for chart in charts_of(made) if chart.title == "conv2, axis out: what each block takes")
    first, wrapped = chart.series
    for start, length, rest in zip(first.base, first.x, wrapped.x, strict=True):
        assert start + length == pytest.approx(4)
        assert length + rest == pytest.approx(4)


def test_many_starts_are_thinned_evenly() -> None:
    assert kept_of(3) == [0, 1, 2]
    kept = kept_of(1000)
    assert (len(kept), kept[0], kept[-1]) == (64, 0, 999)
    assert len(set(kept)) == 64


# ---- tables ----

ODD = "=x|`<b>&_%$#{}~^\\"
TABLE = Table(
    "odd",
    "Odd <i>",
    (Column("name_1"), Column("share %", "percent"), Column("n", "whole"), Column("to", "points")),
    ((ODD, 0.12345, 1234567, -0.01), ("plain", None, 5, None)),
)


def test_markdown_keeps_its_columns() -> None:
    lines = to_markdown(TABLE).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].replace("-", "") == "|  | : | : | : |"
    assert all(set(cell.strip()) <= {"-", ":"} and "--" in cell for cell in lines[1].strip("|").split("|"))
    assert r"=x\|\`\<b\>&\_%$#{}~^\\" in lines[2]
    assert "12.35" in lines[2] or "12.34" in lines[2]
    assert "1,234,567" in lines[2]
    assert "-1.00" in lines[2]


def test_csv_has_values_and_no_formula() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows == [
        ["name_1", "share", "n", "to"],
        [f"'{ODD}", "0.12345", "1234567", "-0.01"],
        ["plain", "", "5", ""],
    ]


def test_latex_escapes_every_special_character() -> None:
    text = to_latex(TABLE)
    assert (
        r"=x|`\textless{}b\textgreater{}\&\_\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} & 12.3"
        in text
    )
    assert r"\begin{tabular}{lrrr}" in text
    assert text.count(r" \\") == 3


def test_html_names_the_scope_of_its_heads_and_escapes() -> None:
    text = to_html(TABLE)
    assert text.count('scope="col"') == 4
    assert text.count('scope="row"') == 2
    assert "<caption>Odd &lt;i&gt;</caption>" in text
    assert "<b>" not in text


def test_figures_and_tables_of_a_report(runs: Path, tmp_path: Path) -> None:
    from epitorch.report import report

    made = report(
        [runs / "dense", runs / "epitome"],
        tmp_path / "r.html",
        figures=tmp_path / "figures",
        tables=tmp_path / "tables",
        interactive=False,
        progress=False,
    )
    charts = charts_of(made)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"{chart.key}.{kind}" for chart in charts for kind in ("svg", "png")
    }
    assert {path.suffix for path in made.tables} == {".md", ".csv", ".tex"}
    assert "tiny/epitome" in (tmp_path / "tables" / "methods.md").read_text()
    svg = (tmp_path / "figures" / "accuracy-madds.svg").read_text()
    assert "tiny/epitome" in svg
    assert "#010203" not in svg
    assert (tmp_path / "figures" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    json.dumps(made.to_dict(), allow_nan=False)
    assert "written to" in str(made)
