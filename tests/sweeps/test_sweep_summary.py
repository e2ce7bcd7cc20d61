"""Means, spreads and paired differences, by hand."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from sweep_helpers import fake_result

from epitorch.errors import InputError
from epitorch.results import RunResult, save_results
from epitorch.sweeps.file import load_sweep
from epitorch.sweeps.jobs import jobs_of
from epitorch.sweeps.methods import methods_of
from epitorch.sweeps.summary import markdown, pairs_of, summarize
from epitorch.sweeps.sweep import run_sweep
from epitorch.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]


def runs(name: str, tests: dict[int, float]) -> list[RunResult]:
    return [fake_result(load_recipe(f"tiny/{name}"), seed, test) for seed, test in tests.items()]


@pytest.mark.parametrize(
    ("references", "pairs"),
    [
        ({}, []),
        ({"b": "*"}, [("a", "b"), ("c", "b")]),
        ({"b": "*", "a": "*"}, [("c", "b"), ("c", "a"), ("b", "a")]),
        ({"a": "*", "b": "*"}, [("c", "a"), ("a", "b"), ("c", "b")]),
        ({"a": ["b", "x*"], "b": ["[cd]"]}, [("b", "a"), ("c", "b")]),
    ],
)
def test_which_methods_are_compared(references: dict[str, Any], pairs: list[tuple[str, str]]) -> None:
    assert sorted(pairs_of(["a", "b", "c"], references)) == sorted(pairs)


def test_differences_are_paired_by_seed(recipes: Path) -> None:
    """By hand: seeds 0 and 1 have 0.1 and 0.3; seed 2 has no partner."""
    both = {"dense": runs("dense", {1: 0.4, 0: 0.5}), "wide": runs("wide", {0: 0.6, 1: 0.7, 2: 0.9})}
    summary = summarize(both, {"dense": ["*"]}, total=6, command=["a", "b c"])
    (row,) = summary["differences"]
    assert (row["first"], row["second"], row["n"]) == ("wide", "dense", 2)
    assert row["mean"] == pytest.approx(0.2)
    assert row["standard_error"] == pytest.approx(sqrt(2 * 0.1**2) / sqrt(2))
    method = summary["methods"]["wide"]
    assert (method["n"], method["mean"]) == (3, pytest.approx(2.2 / 3))
    assert method["sd"] == pytest.approx(sqrt(((0.6 - 2.2 / 3) ** 2 + (0.7 - 2.2 / 3) ** 2 + (0.9 - 2.2 / 3) ** 2) / 2))
    assert (method["seeds"], method["by_seed"]) == ([0, 1, 2], [0.6, 0.7, 0.9])
    assert (summary["complete"], summary["seeds"], summary["command"]) == (False, [0, 1, 2], "a 'b c'")


def test_one_run_has_no_spread_and_methods_without_runs_are_left_out(recipes: Path) -> None:
    some = {"dense": runs("dense", {0: 0.5}), "wide": runs("wide", {0: 0.6}), "none": []}
    summary = summarize(some, {"dense": ["*"]}, total=3, command=["c"])
    assert (list(summary["methods"]), summary["methods"]["wide"]["sd"]) == (["dense", "wide"], None)
    assert summary["differences"][0]["standard_error"] is None
    assert "| wide | 60.00 | - | 1 | 2,000,000 | 10.0 | 0.500 |" in markdown(summary)
    assert "| wide - dense | +10.00 | - | 1 |" in markdown(summary)
    apart = {"dense": runs("dense", {0: 0.5}), "wide": runs("wide", {1: 0.6})}
    assert summarize(apart, {"dense": ["*"]}, total=2, command=["c"])["differences"] == []


def test_the_gap_between_learner_and_map_has_a_column_where_there_are_learners(recipes: Path) -> None:
    dense, wide = runs("dense", {0: 0.5}), runs("wide", {0: 0.6})
    learned = [replace(wide[0], accuracy=replace(wide[0].accuracy, test_learner=0.59, gap=-0.01))]
    text = markdown(summarize({"dense": dense, "wide": learned}, {"dense": ["*"]}, total=2, command=["c"]))
    assert "| train loss | learner - map |\n|---|---:|---:|---:|---:|---:|---:|---:|\n" in text
    assert "| wide | 60.00 | - | 1 | 2,000,000 | 10.0 | 0.500 | -1.00 |" in text
    assert "| dense | 50.00 | - | 1 | 2,000,000 | 10.0 | 0.500 | - |" in text
    assert "learner" not in markdown(summarize({"wide": wide}, {}, total=1, command=["c"]))


def without_test(result: RunResult, *heldout: float) -> RunResult:
    return replace(result, accuracy=replace(result.accuracy, test=None, heldout=list(heldout)))


def test_where_there_is_no_test_the_held_out_images_stand_in_and_that_is_said(recipes: Path) -> None:
    some = {"dense": [without_test(runs("dense", {0: 0.9})[0], 0.2, 0.4)], "wide": runs("wide", {0: 0.6})}
    summary = summarize(some, {"dense": ["*"]}, total=2, command=["c"])
    assert [row["measured_on"] for row in summary["methods"].values()] == ["held-out images", "test images"]
    assert summary["methods"]["dense"]["mean"] == 0.4
    assert summary["differences"][0]["mean"] == pytest.approx(0.2)
    assert "held-out images stand in: dense." in markdown(summary)
    assert "stand in" not in markdown(summarize({"wide": some["wide"]}, {}, total=1, command=["c"]))
    with pytest.raises(InputError, match="no accuracy"):
        summarize({"dense": [without_test(some["wide"][0])]}, {}, total=1, command=["c"])


def test_folds_are_paired_too_and_have_an_error_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the differences are 0.1 twice on fold 1 and 0.2 twice on fold 2."""
    monkeypatch.chdir(tmp_path)
    sweep = replace(load_sweep(ROOT / "sweeps/esc10.yaml"), folds=(1, 2))
    tests = {
        "baseline": {(1, 0): 0.9, (1, 1): 0.9, (2, 0): 0.9, (2, 1): 0.9},
        "wsnet-4x": {(1, 0): 0.5, (1, 1): 0.7, (2, 0): 0.4, (2, 1): 0.6},
        "epitome-4x": {(1, 0): 0.6, (1, 1): 0.8, (2, 0): 0.6, (2, 1): 0.8},
    }
    for job in jobs_of(methods_of(sweep), Path("runs")):
        test = tests[job.method.label][job.fold or 0, job.seed]
        save_results(job.folder / "results.json", fake_result(job.method.recipe, job.seed, test, job.fold))
    summary = run_sweep(sweep, "DIR", "runs", command=["c"]).summary
    assert (summary["complete"], summary["seeds"], summary["folds"]) == (True, [0, 1], [1, 2])
    method = summary["methods"]["wsnet-4x"]
    assert (method["n"], method["by_fold"], method["by_seed"]) == (
        4,
        pytest.approx([0.6, 0.5]),
        pytest.approx([0.45, 0.65]),
    )
    assert method["mean"] == pytest.approx(0.55)
    rows = {(row["first"], row["second"]): row for row in summary["differences"]}
    assert len(rows) == 3
    row = rows["epitome-4x", "wsnet-4x"]
    assert (row["n"], row["mean"]) == (4, pytest.approx(0.15))
    assert row["standard_error"] == pytest.approx(sqrt(4 * 0.05**2 / 3) / sqrt(4))
    assert row["standard_error_folds"] == pytest.approx(sqrt(2 * 0.05**2) / sqrt(2))
