from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest

from epitorch.errors import InputError
from epitorch.results import Accuracy, MAdds, Parameters, PeakMemory, RunResult, Seconds
from epitorch.training.folds import cross_validation, paired_difference


def run(name: str, fold: int, seed: int, test: float) -> RunResult:
    return RunResult(
        name=name,
        accuracy=Accuracy(test),
        parameters=Parameters(1, 1, 1, 3),
        madds=MAdds(1, 1, 1),
        seconds=Seconds(1.0, [1.0], [1.0]),
        peak_memory_bytes=PeakMemory(1),
        seed=seed,
        loss={"train": [0.5]},
        environment={},
        command=[],
        recipe={"sound": {"fold": fold}},
        recipe_text="",
        recipe_sha256="",
        data={},
        date="",
    )


A = [run("a", 1, 0, 0.5), run("a", 2, 0, 0.7), run("a", 1, 1, 0.6), run("a", 2, 1, 0.9)]
B = [run("b", 2, 1, 0.8), run("b", 1, 0, 0.3), run("b", 2, 0, 0.7), run("b", 1, 1, 0.6), run("b", 3, 0, 0.1)]


def test_mean_and_spread_over_folds_and_seeds() -> None:
    summary = cross_validation(A)
    assert (summary.name, summary.folds, summary.seeds, summary.n) == ("a", (1, 2), (0, 1), 4)
    assert summary.mean == pytest.approx(0.675)
    assert summary.sd == pytest.approx(sqrt((0.175**2 + 0.025**2 + 0.075**2 + 0.225**2) / 3))
    assert summary.by_fold == pytest.approx((0.55, 0.8))
    assert summary.by_seed == pytest.approx((0.6, 0.75))
    assert summary.sd_seeds == pytest.approx(0.15 / sqrt(2))


def test_differences_are_paired_by_fold_and_seed() -> None:
    """By hand: 0.2, 0 in fold 1 and 0, 0.1 in fold 2; fold 3 has no partner."""
    difference = paired_difference(A, B)
    assert (difference.first, difference.second, difference.n, difference.folds) == ("a", "b", 4, 2)
    assert difference.mean == pytest.approx(0.075)
    squares = (0.2 - 0.075) ** 2 + 0.075**2 + 0.075**2 + 0.025**2
    assert difference.standard_error == pytest.approx(sqrt(squares / 3) / 2)
    assert difference.standard_error_folds == pytest.approx(0.05 / sqrt(2) / sqrt(2))
    assert paired_difference(B, A).mean == pytest.approx(-0.075)


def test_one_run_has_no_spread() -> None:
    assert (cross_validation(A[:1]).sd, cross_validation(A[:1]).sd_seeds) == (None, None)
    difference = paired_difference(A[:1], B)
    assert (difference.standard_error, difference.standard_error_folds) == (None, None)


def test_what_cannot_be_summed_up_is_refused() -> None:
    with pytest.raises(InputError, match="no runs"):
        cross_validation([])
    with pytest.raises(InputError, match="runs of one recipe"):
        cross_validation([*A, *B])
    with pytest.raises(InputError, match="fold 1, seed 0 twice"):
        cross_validation([*A, A[0]])
    with pytest.raises(InputError, match="has no fold"):
        cross_validation([replace(A[0], recipe={"sound": None})])
    with pytest.raises(InputError, match=r"(?s)cannot be paired.*a: \[\(1, 0\)\]; b: \[\(3, 0\)\]"):
        paired_difference(A[:1], B[-1:])
