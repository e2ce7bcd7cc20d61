"""Results: round trips, strict reading, and the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epitorch import _files
from epitorch.errors import InputError
from epitorch.results import (
    Accuracy,
    MAdds,
    Parameters,
    PeakMemory,
    RunResult,
    Seconds,
    aligned,
    load_results,
    result_from_json,
    result_to_json,
    results_table,
    results_to_json,
    save_results,
)

RESULT = RunResult(
    name="cifar10-short/dense",
    accuracy=Accuracy(0.71234, None, None, [0.5, 0.7], None, [0.4, 0.65], 10_000, 5_000, 10),
    parameters=Parameters(0, 0, 2_236_682, 2_236_682),
    madds=MAdds(27_000_000, 27_000_000, 0),
    seconds=Seconds(12.34, [6.0, 6.1], [5.0, 5.1]),
    peak_memory_bytes=PeakMemory(1_000_000, None),
    seed=0,
    loss={"train": [1.5, None]},
    environment={"torch": "2.14.1"},
    command=["epitorch", "train"],
    recipe={"model": {"name": "epitorch:mobilenetv2"}},
    recipe_text="model: ...",
    recipe_sha256="0" * 64,
    data={"path": "digits"},
    date="2026-01-01T00:00:00+00:00",
)
LEARNT = replace(RESULT, name="epitome", accuracy=replace(RESULT.accuracy, test_learner=0.7, gap=-0.01234), seed=11)


@pytest.mark.parametrize("results", [RESULT, [RESULT], [RESULT, LEARNT]])
def test_round_trip(results: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    save_results(path, results)
    assert load_results(path) == ([results] if isinstance(results, RunResult) else results)
    assert json.loads(path.read_text()) == results_to_json(results)


def test_one_result_is_flat() -> None:
    data = results_to_json(RESULT)
    assert data["accuracy"]["test"] == 0.71234
    assert data["format"] == 1
    assert [run["name"] for run in results_to_json([RESULT, LEARNT])["runs"]] == ["cifar10-short/dense", "epitome"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"accuracy": None},
        {"accuracy": {"tset": 0.5}},
        {"parameters": {"total": 5}},
        {"unknown": 1},
        {"madds": 7},
    ],
)
def test_what_is_not_a_result_is_refused(change: dict[str, Any]) -> None:
    data = {**result_to_json(RESULT), **change}
    with pytest.raises(InputError, match="here"):
        result_from_json(data, where="here")


@pytest.mark.parametrize("key", ["seed", "recipe_sha256", "accuracy"])
def test_missing_keys_are_refused(key: str) -> None:
    data = result_to_json(RESULT)
    del data[key]
    with pytest.raises(InputError):
        result_from_json(data)


@pytest.mark.parametrize("content", ["", "[]", "{", "3", '{"runs": [1]}'])
def test_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        load_results(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_results(tmp_path / "results.json")


def test_numbers_that_json_cannot_hold_leave_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    save_results(path, RESULT)
    with pytest.raises(ValueError, match="JSON compliant"):
        save_results(path, replace(RESULT, loss={"train": [float("nan")]}))
    assert load_results(path) == [RESULT]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    save_results(path, RESULT)

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(_files.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_results(path, LEARNT)
    assert load_results(path) == [RESULT]
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_table_by_hand() -> None:
    assert results_table([RESULT]) == "\n".join(
        [
            "| run                 | test % | held-out % | parameters |      MAdds | seconds | seed |",
            "| ------------------- | -----: | ---------: | ---------: | ---------: | ------: | ---: |",
            "| cifar10-short/dense |  71.23 |      70.00 |  2,236,682 | 27,000,000 |    12.3 |    0 |",
        ]
    )


def test_table_shows_the_learner_where_there_is_one() -> None:
    lines = results_table([RESULT, LEARNT]).splitlines()
    assert len({len(line) for line in lines}) == 1
    column = [cell.strip() for cell in lines[0].split("|")].index("with learner %")
    assert [line.split("|")[column].strip() for line in lines[2:]] == ["-", "70.00"]


def test_table_without_held_out_numbers() -> None:
    bare = replace(RESULT, accuracy=Accuracy(0.5))
    assert results_table([bare]).splitlines()[2].split("|")[3].strip() == "-"


def test_narrow_columns_have_a_rule_that_markdown_takes() -> None:
    assert aligned([["a", "b"], ["x", "1"]]).splitlines() == ["| a  |  b |", "| -- | -: |", "| x  |  1 |"]
