"""Whole runs, two steps long, on a tiny generated set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers import runs, trained
from benchmarks.peers.common import load_final
from benchmarks.peers.jobs import Job, jobs_of
from benchmarks.peers.methods import METHODS
from benchmarks.peers.parts import PARTS, smoke

from epitorch.errors import DataError, InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and the exporters: the library's own tests see them


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def jobs(out: Path, tiny: Path, *methods: str) -> list[Job]:
    return jobs_of(smoke(PARTS["a"]), str(tiny), out, methods=methods, smoke=True)


@pytest.fixture(scope="module")
def made(out: Path, tiny: Path) -> dict[str, dict[str, Any]]:
    found = jobs(out, tiny, "epitome-warm-distil", "kmeans", "epitome-int8")
    return {job.method: runs.run(job) for job in found}


def test_runs_measure_everything(made: dict[str, dict[str, Any]]) -> None:
    assert set(made) == {"start", "epitome-warm-distil", "epitome", "epitome-int8", "dense", "kmeans"}
    for result in made.values():
        assert result["status"] == "done", result.get("traceback")
        assert 0 <= result["accuracy"] <= 1
        assert result["images"] == 32
        assert result["train_seconds"] > 0
        assert result["uncounted"] == 0
    dense = made["dense"]
    assert (dense["params"], dense["limit"], dense["lines"]) == (269_722, None, 0)
    assert made["epitome-warm-distil"]["params"] <= made["epitome-warm-distil"]["limit"] == 134_861


def test_files_are_as_small_as_they_say(made: dict[str, dict[str, Any]], out: Path, tiny: Path) -> None:
    assert made["kmeans"]["file_bytes"] <= made["kmeans"]["limit"] == made["dense"]["file_bytes"] // 8
    assert made["epitome-int8"]["file_bytes"] < 0.4 * made["epitome"]["file_bytes"]
    for job in jobs(out, tiny, "kmeans", "epitome-int8"):
        file = made[job.method].get("file", "final/model.safetensors")
        assert (job.folder / file).stat().st_size == made[job.method]["file_bytes"]


def test_the_dense_part_of_the_epochs_is_counted(made: dict[str, dict[str, Any]]) -> None:
    alone = made["start"]["train_seconds"]
    assert made["epitome-warm-distil"]["train_seconds"] > alone


def test_a_finished_run_is_not_trained_again(
    made: dict[str, dict[str, Any]], out: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    job = jobs(out, tiny, "epitome-warm-distil")[0]
    monkeypatch.setattr(trained, "train", refuse)
    assert runs.run(job)["accuracy"] == made["start"]["accuracy"]
    (job.folder / "train" / "run.json").write_text("{}")
    assert runs.run(job)["status"] == "failed"


def test_other_first_weights_make_another_run(made: dict[str, dict[str, Any]], out: Path, tiny: Path) -> None:
    job = jobs(out, tiny, "epitome-warm-distil")[-1]
    before = trained._recipe(job, {}).sha256
    weights = job.other("start").folder / "train" / "checkpoint" / "model.safetensors"
    kept = weights.read_bytes()
    assert trained._recipe(job, {}).sha256 == before
    weights.write_bytes(kept + b" ")
    assert trained._recipe(job, {}).sha256 != before
    weights.write_bytes(kept)


def test_a_broken_method_is_a_result(
    made: dict[str, dict[str, Any]], out: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("no layers")

    job = jobs(out, tiny, "kmeans")[-1]
    monkeypatch.setattr(trained, "METHODS", {**METHODS, "kmeans": replace(METHODS["kmeans"], finish=broken)})
    result = runs.run(job)
    assert (result["status"], result["error"]) == ("failed", "ZeroDivisionError: no layers")
    assert "broken" in result["traceback"]
    assert json.loads((job.folder / "result.json").read_text()) == result


def test_missing_data_are_no_failure_of_the_method(tmp_path: Path) -> None:
    job = jobs(tmp_path, tmp_path / "nothing", "dense")[0]
    with pytest.raises((DataError, InputError)):
        runs.run(job)
    assert job.result() is None


def test_the_network_of_a_file_is_the_trained_one(made: dict[str, dict[str, Any]], out: Path, tiny: Path) -> None:
    job = jobs(out, tiny, "epitome")[0]
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        again = load_final(job).model(x)
        other = load_final(job.other("dense")).model(x)
    assert again.shape == (2, 10)
    assert not torch.allclose(again, other)


def test_other_outputs_of_a_file_are_seen(made: dict[str, dict[str, Any]], out: Path, tiny: Path) -> None:
    from benchmarks.peers.common import MethodError, check_same

    model, changed = (load_final(jobs(out, tiny, "dense")[0]).model for _ in range(2))
    check_same(model, changed, (3, 32, 32))
    with torch.no_grad():
        changed.fc.bias += 0.1  # type: ignore[union-attr,operator]
    with pytest.raises(MethodError, match="other outputs"):
        check_same(model, changed, (3, 32, 32))
