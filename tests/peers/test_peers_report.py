"""The page says what the results say, and nothing where there are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import report
from benchmarks.peers.summary import Row, cost_of, front, load, rows_of, standard_error
from hypothesis import given
from hypothesis import strategies as st

ENVIRONMENT = {"cpu": "some CPU", "torch": "2.14"}


def result(method: str, budget: str, seed: int, accuracy: float, **others: Any) -> dict[str, Any]:
    return {
        "part": "a",
        "method": method,
        "budget": budget,
        "seed": seed,
        "status": "done",
        "accuracy": accuracy,
        "params": 1000,
        "madds": 2_000_000,
        "file_bytes": 4400,
        "train_seconds": 60.0,
        "peak_memory_bytes": 5e8,
        "lines": 8,
        "versions": {},
        "environment": ENVIRONMENT,
        "threads": 1,
        "command": f"python -m benchmarks.peers one --method {method}",
        "date": "2026-01-01",
        **others,
    }


RESULTS = [
    result("dense", "own", 0, 0.80),
    result("dense", "own", 1, 0.82),
    result("epitome", "params-0.5", 0, 0.79, params=500),
    result("epitome", "params-0.5", 1, 0.80, params=500),
    result("width", "params-0.5", 0, 0.70, params=500),
    {**result("cp", "params-0.5", 0, 0), "status": "failed", "error": "ValueError: no\nmore", "versions": {"x": "1.2"}},
]
TIMED = {"runtime": "openvino", "milliseconds": 2.0, "speedup_over_dense": 1.0}
TIMINGS = {
    "rows": [
        {**TIMED, "method": "dense", "budget": "own"},
        {**TIMED, "method": "epitome", "budget": "params-0.5", "milliseconds": 1.0, "speedup_over_dense": 2.1},
    ],
    "failures": [{"method": "width", "budget": "params-0.5", "runtime": "onnxruntime", "error": "RuntimeError: bad"}],
    "date": "2026-01-02",
    "rounds": 30,
    "clock": "processor time",
    "versions": {"openvino": "2026.4"},
}


def written(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "a"
    folder.mkdir(parents=True)
    for one in RESULTS:
        name = f"{one['method']}-{one['budget']}-seed{one['seed']}.json"
        (folder / name).write_text(json.dumps(one))
    (folder / "latency.json").write_text(json.dumps(TIMINGS))
    return tmp_path / "results"


def test_rows_are_paired_by_seed(tmp_path: Path) -> None:
    rows = {row.method: row for row in rows_of(*load(written(tmp_path) / "a"))}
    epitome = rows["epitome"]
    assert (epitome.seeds, epitome.score, epitome.lead) == ((0, 1), pytest.approx(79.5), pytest.approx(-1.5))
    assert epitome.error == pytest.approx(0.5)
    assert epitome.lead_error == pytest.approx(0.5)
    assert (rows["width"].lead, rows["width"].lead_error) == (pytest.approx(-10), None)
    assert epitome.milliseconds == {"openvino": 1.0}
    assert "cp" not in rows


def test_what_changes_the_file_alone_is_timed_as_what_it_was_made_of() -> None:
    found = [*RESULTS, result("kmeans", "bytes-0.25", 0, 0.8), result("epitome-int8", "params-0.5", 0, 0.79)]
    rows = {row.method: row for row in rows_of(found, TIMINGS)}
    assert rows["kmeans"].milliseconds == {"openvino": 2.0}
    assert rows["epitome-int8"].speedups == {"openvino": 2.1}


@pytest.mark.filterwarnings("ignore")
def test_the_page_is_written_from_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    page = report.write(written(tmp_path), tmp_path / "docs" / "peers.md")
    text = page.read_text(encoding="utf-8")
    cells = "79.50 ± 0.50 (2) | -1.50 ± 0.50 | 500 | 2.00 | 4.4 | - | 1.000 (2.10x) | 60 | 500 | 8"
    assert f"| epitome, learned starts | {cells} |" in text
    assert text.index("epitome, learned starts | 79.50") < text.index("width multiplier | 70.00")
    assert "failed with x 1.2: `ValueError: no`" in text
    assert "in onnxruntime: RuntimeError: bad" in text
    assert "width multiplier, hidden channels: left out" in text
    assert "some CPU" in text
    assert text.count("No runs are recorded yet.") == 4
    plot = tmp_path / "docs" / "peers-a.svg"
    first = plot.read_bytes()
    assert b"<svg" in first
    report.write(tmp_path / "results", page)
    assert plot.read_bytes() == first


def test_a_table_of_bytes_has_all_files_that_fit() -> None:
    sizes = {("epitome", "params-0.5"): 1100, ("kmeans", "bytes-0.25"): 1000, ("width", "params-0.5"): 1101}
    found = [result(*key, 0, 0.5, file_bytes=size) for key, size in sizes.items()] + RESULTS[:1]
    assert {r.method for r in report._within(rows_of(found, None), "bytes-0.25")} == {"epitome", "kmeans"}
    assert {r.method for r in report._within(rows_of(found, None), "params-0.5")} == {"epitome", "width"}


def row(score: float, params: int) -> Row:
    return Row("dense", "own", (0,), score, None, None, None, params, 1, 1, {}, {}, 0.0, None, 0)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=8))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    rows = [row(score, params) for score, params in points]
    best = front(rows, "params")
    assert max(rows, key=lambda r: (r.score, -r.params)) in best
    for one in rows:
        beaten = any(
            (r.score, -r.params) != (one.score, -one.params) and r.score >= one.score and r.params <= one.params
            for r in rows
        )
        assert (one in best) == (not beaten)


def test_what_was_not_timed_is_on_no_front_of_time() -> None:
    fast = replace(row(1, 1), milliseconds={"openvino": 1.0})
    assert front([fast, row(2, 1)], "openvino") == [fast]
    assert cost_of(row(2, 1), "openvino") is None


def test_one_value_has_no_standard_error() -> None:
    assert standard_error([1.0]) is None
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)
