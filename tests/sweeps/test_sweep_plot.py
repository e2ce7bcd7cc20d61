"""The plots of sweeps and the published points in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epitorch.errors import InputError
from epitorch.sweeps.plot import Point, accuracy_plot, points_of, summary_plots
from epitorch.sweeps.published import published_points

OURS = [Point("narrow", 91.0, 0.2, 3, 17.1, 0.405), Point("epitome", 92.0, None, 1, 21.2, 0.493)]
SUMMARY = {
    "methods": {
        "a": {"mean": 0.5, "sd": 0.01, "n": 2, "madds_executed": 3_000_000, "parameters": 500_000},
        "b": {"mean": 0.6, "sd": None, "n": 1, "madds_executed": 4_000_000, "parameters": 600_000},
    }
}


@pytest.mark.parametrize(("dataset", "least"), [("imagenet", 20), ("cifar10", 5)])
def test_published_points_are_plausible_and_have_sources(dataset: str, least: int) -> None:
    points = published_points(dataset)
    assert len(points) >= least
    assert len({(point.method, point.label) for point in points}) == len(points)
    assert len({(p.accuracy, p.madds, p.params, p.method) for p in points}) == len(points)
    assert all(point.source.startswith("the paper, ") for point in points)
    assert all(50 < point.accuracy < 100 and 10 < point.madds < 500 for point in points)
    assert all(point.params is None or 0.1 < point.params < 10 for point in points)


def test_published_points_stand_in_the_paper() -> None:
    """Every number of a table, as it is printed there."""
    paper = Path(__file__).resolve().parents[3] / "shared" / "paper" / "neural-epitome-search.tex"
    if not paper.is_file():
        pytest.skip(f"no paper at {paper}")
    printed = set(re.findall(r"\d+\.?\d*", paper.read_text(encoding="utf-8")))
    for dataset in ("imagenet", "cifar10"):
        for point in published_points(dataset):
            if " table" in point.source:
                assert {f"{point.accuracy:g}", f"{point.accuracy:.2f}"} & printed, point
                assert f"{point.madds:g}" in printed, point
                assert {f"{point.params:g}", f"{point.params:.1f}", f"{point.params:.2f}"} & printed, point


def test_there_is_no_other_data_set() -> None:
    with pytest.raises(InputError, match=r"no published results on 'imagenett'; did you mean 'imagenet'\?"):
        published_points("imagenett")


def test_runs_and_published_points_are_drawn_with_their_names(tmp_path: Path) -> None:
    published = published_points("cifar10")
    files = accuracy_plot(OURS, tmp_path / "new" / "plot", published=published, title="CIFAR-10")
    assert [file.name for file in files] == ["plot.svg", "plot.png"]
    text = files[0].read_text()
    assert files[1].read_bytes().startswith(b"\x89PNG")
    for words in (
        "narrow (n = 3)",
        "epitome (n = 1)",
        "runs made here",
        "AutoSlim",
        "CIFAR-10",
        "multiply-adds",
        "0.7 M",
    ):
        assert words in text
    without = accuracy_plot(OURS, tmp_path / "other")[0].read_text()
    assert "AutoSlim" not in without
    assert [text.count('id="axes_'), without.count('id="axes_')] == [2, 1]


def test_published_points_do_not_squeeze_the_runs(tmp_path: Path) -> None:
    """The runs lie as far apart with published points as without, in a panel of their own."""
    across = {}
    for name, published in (("with", published_points("cifar10")), ("without", [])):
        text = accuracy_plot(OURS, tmp_path / name, published=published)[0].read_text().partition('id="legend_1"')[0]
        at = [float(x) for x in re.findall(r'x="([\d.]+)" y="[\d.]+" style="fill: #\w+; stroke: #000000', text)]
        assert len(at) == len(OURS)
        across[name] = max(at) - min(at)
    assert across["with"] == pytest.approx(across["without"], rel=0.2)


def test_no_two_of_many_methods_look_alike(tmp_path: Path) -> None:
    points = [Point(f"method {k}", 50.0 + k, None, 1, 1.0 + k, 1.0) for k in range(25)]
    text = accuracy_plot(points, tmp_path / "many")[0].read_text()
    marks = re.findall(r'<use xlink:href="#(\w+)" x="[\d.]+" y="[\d.]+" style="fill: (#\w+); stroke: #000000', text)
    assert len(set(marks)) == len(points)


def test_a_point_without_parameters_is_left_out_of_that_plot(tmp_path: Path) -> None:
    published = published_points("imagenet")
    for against, there in (("madds", True), ("params", False)):
        text = accuracy_plot([], tmp_path / against, against=against, published=published)[0].read_text()  # type: ignore[arg-type]
        assert (">EfficientNet<" in text) is there
        assert ">FBNet<" in text


def test_the_same_plot_is_the_same_file(tmp_path: Path) -> None:
    one, two = (accuracy_plot(OURS, tmp_path / name)[0].read_bytes() for name in ("a", "b"))
    other = accuracy_plot(OURS[:1], tmp_path / "c")[0].read_bytes()
    assert one == two
    assert one != other


def test_a_summary_is_drawn_against_both_costs(tmp_path: Path) -> None:
    assert points_of(SUMMARY) == [Point("a", 50.0, 1.0, 2, 3.0, 0.5), Point("b", 60.0, None, 1, 4.0, 0.6)]
    files = summary_plots(SUMMARY, tmp_path, title="both")
    assert sorted(file.name for file in files) == sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 4
    assert "parameters (millions)" in (tmp_path / "accuracy-params.svg").read_text()


@pytest.mark.parametrize("costs", [(2.236682, 2.23669), (0.5, 8.0), (1.0, 900.0), (0.01, 1e7), (0.0, 1.0), (3.0, 3.0)])
def test_costs_close_and_far_apart_have_a_few_numbers(tmp_path: Path, costs: tuple[float, float]) -> None:
    points = [Point(f"at {cost}", 50.0, None, 1, cost, 1.0) for cost in costs]
    text = accuracy_plot(points, tmp_path / "plot")[0].read_text()
    across = text.partition('id="matplotlib.axis_1"')[2].partition('id="matplotlib.axis_2"')[0]
    numbers = re.findall(r">([\d.+e\N{MINUS SIGN}-]+)</text>", across)
    assert 2 <= len(numbers) <= 12
    assert len(set(numbers)) == len(numbers)


def test_published_points_alone_name_no_runs_and_labels_are_no_formulas(tmp_path: Path) -> None:
    text = accuracy_plot([], tmp_path / "alone", published=published_points("cifar10"))[0].read_text()
    assert "runs made here" not in text
    odd = accuracy_plot([Point("a $ b $", 50.0, None, 1, 1.0, 1.0)], tmp_path / "odd")[0].read_text()
    assert "a $ b $" in odd


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to draw"):
        accuracy_plot([], tmp_path / "x")
    with pytest.raises(InputError, match="no such axis"):
        accuracy_plot(OURS, tmp_path / "x", against="time")  # type: ignore[arg-type]
