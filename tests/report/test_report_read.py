"""Which runs are found, what they are called, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from epitorch.errors import CheckpointError, InputError
from epitorch.report import collect
from epitorch.report._read import clean, find_runs
from epitorch.results import load_results, save_results


def labels(*paths: Path) -> list[str]:
    return [run.label for run in collect(paths).runs]


def test_a_folder_of_runs_a_run_and_a_results_file_are_found(runs: Path) -> None:
    assert labels(runs) == ["tiny/dense", "tiny/epitome", "tiny/narrow"]
    assert labels(runs / "narrow", runs / "dense") == ["tiny/narrow", "tiny/dense"]
    assert labels(runs / "dense" / "results.json") == ["tiny/dense"]


def test_a_run_named_twice_counts_once(runs: Path) -> None:
    assert labels(runs, runs / "dense", runs / "dense") == ["tiny/dense", "tiny/epitome", "tiny/narrow"]


def test_runs_come_in_the_order_of_the_results_beside_them(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "all")
    order = ["narrow", "dense", "epitome"]
    save_results(tmp_path / "all" / "results.json", [load_results(runs / n / "results.json")[0] for n in order])
    assert labels(tmp_path / "all") == [f"tiny/{name}" for name in order]


def test_runs_of_one_name_are_told_apart(runs: Path, tmp_path: Path) -> None:
    (result,) = load_results(runs / "dense" / "results.json")
    for place, seed in (("a", 0), ("b", 1), ("c", 1)):
        save_results(tmp_path / place / "results.json", replace(result, seed=seed))
    found = labels(tmp_path)
    assert found == ["tiny/dense, seed 0", "tiny/dense, seed 1", "tiny/dense, seed 1 (2)"]


def test_an_unfinished_run_shows_what_there_is(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "epitome", tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    (run,) = collect([tmp_path / "run"]).runs
    assert run.state == "unfinished"
    assert run.name == "tiny/epitome"  # the checkpoint knows
    assert run.result is None
    assert len(run.curves.loss) == len(run.curves.heldout) == 2
    assert len(run.layers) == 4
    assert any("not finished" in note for note in run.notes)


def test_an_epoch_that_was_done_again_counts_once(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    rows = "epoch,train_loss,heldout_accuracy\n1,2.5,0.1\n,9,\n2,2.0,0.2\n2,1.5,nan\n"
    (tmp_path / "run" / "logs" / "metrics.csv").write_text(rows)
    (run,) = collect([tmp_path / "run"]).runs
    assert run.curves.loss == (2.5, 1.5)
    assert run.curves.heldout == (0.1, None)


def test_a_run_that_only_began_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (run,) = collect([tmp_path / "run"]).runs
    assert (run.state, run.name, run.layers, run.params) == ("unfinished", "run", (), None)
    assert any("No checkpoint" in note for note in run.notes)


def test_a_run_without_a_test_says_that_the_held_out_data_stand_in(runs: Path, tmp_path: Path) -> None:
    (result,) = load_results(runs / "dense" / "results.json")
    accuracy = replace(result.accuracy, test=None, test_images=0)
    save_results(tmp_path / "results.json", replace(result, accuracy=accuracy))
    made = collect([tmp_path])
    assert any("No test accuracy" in note for note in made.runs[0].notes)
    (method,) = made.methods
    assert (method.measured, method.accuracy) == ("held-out", result.accuracy.heldout[-1])


def test_a_checkpoint_alone_has_layers_and_no_accuracy(runs: Path) -> None:
    (run,) = collect([runs / "epitome" / "checkpoint"]).runs
    assert run.state == "checkpoint"
    assert run.params == load_results(runs / "epitome" / "results.json")[0].parameters.total
    assert any("without a run" in note for note in run.notes)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"runs": [3]}', '{"format": 1}', "\x00"])
def test_damaged_results_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InputError, match="expected"):
        find_runs([tmp_path])


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run here"):
        find_runs([tmp_path])
    with pytest.raises(InputError, match="nothing of this name"):
        find_runs([tmp_path / "missing"])
    with pytest.raises(InputError, match="nothing to report"):
        find_runs([])


def test_a_damaged_checkpoint_is_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "epitome", tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        collect([tmp_path / "run"])


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 1, "epochs": [0], "layers": {"a": 3}}'])
def test_damaged_starts_are_refused(content: str, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "epitome", tmp_path / "run")
    (tmp_path / "run" / "starts.json").write_text(content)
    with pytest.raises(InputError, match=r"starts\.json"):
        collect([tmp_path / "run"])


def test_starts_that_were_not_recorded_are_a_note(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "epitome", tmp_path / "run")
    (tmp_path / "run" / "starts.json").unlink()
    (run,) = collect([tmp_path / "run"]).runs
    assert any("was not recorded" in note for note in run.notes)
    assert run.routing
    assert all(routing.moved == () for routing in run.routing)


def test_names_lose_what_no_page_can_hold() -> None:
    assert clean("a\x00b\ud800c\nd") == "a\ufffdb\ufffdc\ufffdd"
    assert len(clean("x" * 500)) == 120
    assert clean("Größe <b>") == "Größe <b>"


def test_a_benchmark_meets_runs_by_name_and_folder(runs: Path, tmp_path: Path) -> None:
    row = {
        "runtime": "torch",
        "batch": 1,
        "milliseconds": 2.0,
        "quartiles": [1.5, 2.5],
        "speedup": 1.0,
        "stored": 100,
        "runs_as": "",
    }
    models = [str(runs / "dense"), "recipe:tiny/narrow", str(runs / "epitome" / "checkpoint"), "another"]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [{"model": model, **row} for model in models]}))
    made = collect([runs], bench=[path])
    assert [row.method for row in made.latencies] == ["tiny/dense", "tiny/narrow", "tiny/epitome", None]
    assert any("another" in note for note in made.notes)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"rows": 3}', '{"rows": [{}]}', '{"rows": [{"model": "m", "quartiles": [1]}]}']
)
def test_a_damaged_benchmark_is_refused(content: str, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(content)
    with pytest.raises(InputError, match=r"bench\.json"):
        collect([runs], bench=[tmp_path / "bench.json"])
