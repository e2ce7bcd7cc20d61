"""The driver of the ESC-10 experiment: what it runs, keeps, and sums up."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

from epitorch.results import Accuracy, MAdds, Parameters, PeakMemory, RunResult, Seconds, save_results
from epitorch.training.recipe import load_recipe
from epitorch.training.recipe_sound import with_fold

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("esc10_driver", ROOT / "benchmarks" / "esc10.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.chdir(tmp_path)
    return module


def result(method: str, fold: int, seed: int, test: float) -> RunResult:
    recipe = with_fold(load_recipe(f"esc10/{method}"), fold)
    return RunResult(
        name=recipe.name,
        accuracy=Accuracy(test, heldout=[0.5], test_images=80),
        parameters=Parameters(1, 1, 1, 3),
        madds=MAdds(10, 10, 1),
        seconds=Seconds(9.0, [1.0], [1.0]),
        peak_memory_bytes=PeakMemory(1),
        seed=seed,
        loss={"train": [0.5]},
        environment={"git_commit": "abc"},
        command=["epitorch"],
        recipe=recipe.content(),
        recipe_text=recipe.text,
        recipe_sha256=recipe.sha256,
        data={"steps_run": 2, "epochs_run": 1},
        date="today",
    )


class Process:
    """Stands for `epitorch train`: writes its result at once, or fails where `broken` names the method."""

    started: list[str]
    broken: str

    def __init__(self, command: list[str], **_: Any) -> None:
        value = {key: command[command.index(key) + 1] for key in ("--fold", "--seed", "--out")}
        method, fold, seed = command[4].split("/")[1], int(value["--fold"]), int(value["--seed"])
        type(self).started.append(f"{method} {fold} {seed}")
        if method != self.broken:
            test = {"baseline": 0.5, "wsnet-4x": 0.6, "epitome-4x": 0.7}[method] + 0.01 * fold + 0.001 * seed
            save_results(Path(value["--out"]) / "results.json", result(method, fold, seed, test))

    def poll(self) -> int:
        return 0


def go(driver: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str, broken: str = "") -> tuple[int, list[str]]:
    Process.started, Process.broken = [], broken
    monkeypatch.setattr(driver.subprocess, "Popen", Process)
    monkeypatch.setattr(sys, "argv", ["esc10.py", "--data", "DIR", "--out", "runs", "--results", "res", *options])
    return driver.main(), Process.started


def test_runs_are_summed_up_in_pairs(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    code, started = go(driver, monkeypatch)
    assert code == 0
    assert len(started) == len(set(started)) == 30
    assert started[:3] == ["baseline 1 0", "wsnet-4x 1 0", "epitome-4x 1 0"]
    summary = json.loads(Path("res/summary.json").read_text())
    assert (summary["seeds"], summary["complete"]) == ([0, 1], True)
    assert "esc10.py --data DIR" in summary["command"]
    assert summary["methods"]["wsnet-4x"]["n"] == 10
    assert summary["methods"]["wsnet-4x"]["mean"] == pytest.approx(0.6305)
    differences = {(d["first"], d["second"]): d for d in summary["differences"]}
    first = differences["esc10/epitome-4x", "esc10/wsnet-4x"]
    assert (first["mean"], first["n"]) == (pytest.approx(0.1), 10)
    assert first["standard_error"] == pytest.approx(0, abs=1e-12)
    assert len(json.loads(Path("res/runs.json").read_text())) == 30
    assert "| epitome-4x | 73.05 |" in Path("res/summary.md").read_text()
    kept = Path("res/runs/epitome-4x-fold5-seed1/results.json")
    assert kept.read_bytes() == Path("runs/epitome-4x-fold5-seed1/results.json").read_bytes()


def test_what_is_finished_is_kept_and_the_rest_goes_on(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--folds", "1", "2", "--seeds", "0")
    code, started = go(driver, monkeypatch, *small, broken="epitome-4x")
    assert (code, len(started)) == (1, 6)
    assert json.loads(Path("res/summary.json").read_text())["complete"] is False
    assert go(driver, monkeypatch, *small) == (0, ["epitome-4x 1 0", "epitome-4x 2 0"])
    assert json.loads(Path("res/summary.json").read_text())["complete"] is True
    assert go(driver, monkeypatch, *small) == (0, [])


def test_a_result_of_another_recipe_text_is_not_kept(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--folds", "1", "--seeds", "0", "--methods", "baseline")
    assert go(driver, monkeypatch, *small)[1] == ["baseline 1 0"]
    old = replace(result("baseline", 1, 0, 0.5), recipe_sha256="of an earlier text")
    save_results(Path("runs/baseline-fold1-seed0/results.json"), old)
    assert go(driver, monkeypatch, *small)[1] == ["baseline 1 0"]


def test_folders_at_work_are_left_alone(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        driver.Job("baseline", "esc10/baseline", fold, 0, Path(f"runs/baseline-fold{fold}-seed0")) for fold in (1, 2)
    ]
    for job in jobs:
        job.folder.mkdir(parents=True)
    queue = list(jobs)
    with FileLock(jobs[0].folder / ".lock"):
        assert driver._next(queue) is jobs[1]
        assert driver._next(queue) is None
        assert queue == [jobs[0]]
    assert driver._next(queue) is jobs[0]


def test_a_second_driver_in_the_same_folder_stops(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs").mkdir()
    with FileLock("runs/.driver.lock"):
        assert go(driver, monkeypatch) == (2, [])
    assert go(driver, monkeypatch, "--methods", "baseline")[0] == 0
