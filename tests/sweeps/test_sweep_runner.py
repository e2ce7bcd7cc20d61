"""What a sweep runs, keeps, refuses and says; Ray is stood in for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from sweep_helpers import FakeCluster, console, fake_result, fake_run, write_sweep, written

from epitorch.errors import InputError
from epitorch.results import save_results
from epitorch.sweeps.file import load_sweep
from epitorch.sweeps.jobs import Budget, Job, command_of, jobs_of, state_of
from epitorch.sweeps.methods import methods_of
from epitorch.sweeps.progress import Reporter
from epitorch.sweeps.sweep import SweepReport, run_sweep
from epitorch.training.recipe import load_recipe

SWEEP = "recipes: [tiny/dense, tiny/wide]\nseeds: [0, 1]\nreference: dense\n"
SOUNDS = "recipes: [sound/one, sound/two]\nseeds: [0, 1]\nfolds: [1, 2]\nreference: one\n"
ALL = ["dense-seed0", "wide-seed0", "dense-seed1", "wide-seed1"]


def go(text: str = SWEEP, **options: Any) -> SweepReport:
    path = write_sweep(Path("s.yaml"), text)
    options.setdefault("console", console())
    return run_sweep(load_sweep(path), "digits", "out", command=["epitorch", "sweep", "s.yaml"], **options)


def test_every_run_is_made_once_and_summed_up_in_pairs(recipes: Path, cluster: FakeCluster) -> None:
    shown = console()
    report = go(console=shown)
    assert cluster.names == ALL
    assert cluster.most == 2
    assert report.failed == ()
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary == report.summary
    assert (summary["complete"], summary["seeds"], summary["folds"]) == (True, [0, 1], [])
    assert {label: row["n"] for label, row in summary["methods"].items()} == {"dense": 2, "wide": 2}
    assert [(row["first"], row["second"], row["n"]) for row in summary["differences"]] == [("wide", "dense", 2)]
    assert len(json.loads(Path("out/runs.json").read_text())) == 4
    assert "| wide - dense | -1.00 | 0.00 | 2 |" in Path("out/summary.md").read_text()
    assert "rehearsal" not in Path("out/summary.md").read_text()
    for against in ("madds", "params"):
        assert Path(f"out/accuracy-{against}.svg").read_text().startswith("<?xml")
        assert Path(f"out/accuracy-{against}.png").read_bytes().startswith(b"\x89PNG")
    assert "4 runs, 0 finished before" in written(shown)
    assert "done wide-seed1 in 0 s; 0 left" in written(shown)


def test_the_command_of_a_run_is_trains(recipes: Path, cluster: FakeCluster) -> None:
    go(SOUNDS, max_steps=5, seeds=[3], folds=[2], methods=["two"])
    out = Path("out/two-fold2-seed3")
    words = [
        "train",
        "sound/two",
        "--data",
        "digits",
        "--seed",
        "3",
        "--out",
        str(out),
        "--fold",
        "2",
        "--max-steps",
        "5",
    ]
    assert cluster.commands == [words]
    assert "Stopped after 5 steps a run: a rehearsal, no result." in Path("out/summary.md").read_text()


def test_a_mapping_of_references_is_not_given_up_for_the_first_method(recipes: Path, cluster: FakeCluster) -> None:
    """Where the chosen methods leave all references out, lists fall back on the first method."""
    text = "recipes: [tiny/dense, tiny/wide, tiny/epitome]\nseeds: [0]\nreference: "
    chosen = ["wide", "epitome"]
    assert go(text + "{dense: [wide, epitome]}", methods=chosen).summary["differences"] == []
    (row,) = go(text + "dense", methods=chosen).summary["differences"]
    assert (row["first"], row["second"]) == ("epitome", "wide")


def test_replaced_values_are_written_and_trained(recipes: Path, cluster: FakeCluster) -> None:
    go("recipe: tiny/dense\nset: {training.epochs: 3}\n")
    (command,) = cluster.commands
    assert command[1] == "out/recipes/dense.yaml"
    assert load_recipe(command[1]).training.epochs == 3


def test_what_is_finished_is_kept_and_the_rest_goes_on(recipes: Path, cluster: FakeCluster) -> None:
    cluster.broken = "wide"
    report = go()
    assert [failed.job.name for failed in report.failed] == ["wide-seed0", "wide-seed1"]
    assert report.summary["complete"] is False
    assert list(report.summary["methods"]) == ["dense"]
    cluster.broken, cluster.commands = "", []
    assert go().summary["complete"] is True
    assert cluster.names == ["wide-seed0", "wide-seed1"]
    cluster.commands = []
    shown = console()
    assert go(console=shown).summary["complete"] is True
    assert cluster.names == []
    assert "all 4 runs were finished before" in written(shown)


def test_a_failed_run_is_told_with_its_last_error_and_log(recipes: Path, cluster: FakeCluster) -> None:
    cluster.broken = "dense-seed0"
    shown = console()
    (failed,) = go(console=shown).failed
    assert failed.problem == "exit code 1, error: it broke (see out/dense-seed0.log)"
    assert "failed dense-seed0: exit code 1, error: it broke" in written(shown)
    assert cluster.names == ALL


def test_a_run_whose_recipe_is_changed_meanwhile_has_failed(recipes: Path, cluster: FakeCluster) -> None:
    recipe = recipes / "recipes/tiny/dense.yaml"
    start = cluster.start

    def edits(command: list[str], folder: str, log: str) -> int:
        recipe.write_text(recipe.read_text() + "\n")
        return start(command, folder, log)

    cluster.start = edits  # type: ignore[method-assign,assignment]
    (failed,) = go("recipe: tiny/dense").failed
    assert "was changed while the sweep was at work" in failed.problem


def test_a_run_that_another_process_finished_has_not_failed(recipes: Path, cluster: FakeCluster) -> None:
    cluster.outcome = lambda handle: "exit code 2"  # type: ignore[method-assign]
    assert go().failed == ()


# ---- what folders hold ----


def job_of(text: str = "recipe: tiny/dense") -> Job:
    return jobs_of(methods_of(load_sweep(write_sweep(Path("s.yaml"), text))), Path("out"))[0]


def begin(job: Job, **changes: Any) -> None:
    began = {"recipe_sha256": job.method.recipe.sha256, "seed": job.seed, "max_steps": None, "data": "digits"}
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "run.json").write_text(json.dumps({**began, **changes}))


def test_folders_are_told_apart(recipes: Path) -> None:
    job, budget = job_of(), Budget("digits")
    assert state_of(job, budget) == "new"
    begin(job)
    assert state_of(job, budget) == "unfinished"
    for changes in ({"recipe_sha256": "x"}, {"seed": 1}, {"max_steps": 3}, {"data": "elsewhere"}):
        begin(job, **changes)
        assert state_of(job, budget) == "changed"
    begin(job)
    save_results(job.folder / "results.json", fake_result(job.method.recipe, 0, 0.5))
    assert state_of(job, budget) == "finished"
    assert state_of(job, Budget("digits", max_steps=3)) == "changed"
    save_results(job.folder / "results.json", fake_result(job.method.recipe, 1, 0.5))
    assert state_of(job, budget) == "changed"


def test_a_result_of_another_fold_is_not_taken(recipes: Path) -> None:
    job, budget = job_of("recipe: sound/one\nfolds: [2]"), Budget("digits")
    begin(job)
    save_results(job.folder / "results.json", fake_result(job.method.recipe, 0, 0.5, fold=1))
    assert state_of(job, budget) == "changed"
    save_results(job.folder / "results.json", fake_result(job.method.recipe, 0, 0.5, fold=2))
    assert state_of(job, budget) == "finished"


def test_an_unfinished_run_goes_on_with_the_path_it_was_given(recipes: Path) -> None:
    job = job_of()
    begin(job, data=str(recipes / "data"))
    budget = Budget("data/../data")
    assert state_of(job, budget) == "unfinished"
    assert command_of(job, budget, overwrite=False)[3] == str(recipes / "data")


def test_changed_recipes_are_refused_or_begun_anew(recipes: Path, cluster: FakeCluster) -> None:
    go()
    recipe = recipes / "recipes/tiny/dense.yaml"
    recipe.write_text(recipe.read_text().replace("0.1", "0.2"))
    cluster.commands = []
    with pytest.raises(
        InputError, match=r"(?s)2 of 4 folders hold a run of another.*dense-seed0, dense-seed1.*--overwrite"
    ):
        go()
    assert cluster.commands == []
    assert go(overwrite=True).summary["complete"] is True
    assert cluster.names == ["dense-seed0", "dense-seed1"]
    assert all("--overwrite" in command for command in cluster.commands)


def test_results_and_logs_are_copied_where_asked(recipes: Path, cluster: FakeCluster) -> None:
    report = go(results=Path("res"))
    assert report.folder == Path("res")
    assert Path("res/summary.md").is_file()
    assert not Path("out/summary.md").exists()
    kept = Path("res/runs/dense-seed0/results.json")
    assert kept.read_bytes() == Path("out/dense-seed0/results.json").read_bytes()


# ---- one at a time, and being stopped ----


def test_a_second_sweep_in_the_same_folder_is_refused(recipes: Path, cluster: FakeCluster) -> None:
    Path("out").mkdir()
    with FileLock("out/.driver.lock"), pytest.raises(InputError, match="another sweep is at work"):
        go()
    assert go().summary["complete"] is True


def test_ctrl_c_stops_the_runs_in_order_and_the_rest_is_made_later(recipes: Path, cluster: FakeCluster) -> None:
    cluster.interrupt_after = 2
    shown = console()
    with pytest.raises(KeyboardInterrupt):
        go(console=shown)
    assert (len(cluster.commands), cluster.stopped) == (3, 2)
    assert "stopped; the same command goes on" in written(shown)
    cluster.interrupt_after, cluster.commands = None, []
    assert go().summary["complete"] is True
    assert cluster.names == ["wide-seed1"]  # the fake's runs are finished when they begin


def test_sigterm_stops_the_runs_in_order(recipes: Path, cluster: FakeCluster) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ended = cluster.ended

    def terminated(handles: list[int], seconds: float) -> list[int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return ended(handles, seconds)

    cluster.ended = terminated  # type: ignore[method-assign,assignment]
    with pytest.raises(SystemExit) as caught:
        go()
    assert caught.value.code == 128 + signal.SIGTERM
    assert (len(cluster.commands), cluster.stopped) == (2, 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_does_not_fit_is_refused_before_anything_runs(recipes: Path, cluster: FakeCluster) -> None:
    with pytest.raises(InputError, match="there is no method 'tall'"):
        go(methods=["tall"])
    with pytest.raises(InputError, match="cannot choose the fold"):
        go(folds=[1])
    assert (cluster.commands, Path("out").exists()) == ([], False)


def test_the_time_left_is_that_of_the_runs_that_are_left() -> None:
    now = [0.0]
    shown = console()
    reporter = Reporter(5, 1, lambda: 2, shown, lambda: now[0])
    with reporter.shown():
        reporter.begun("a")
        reporter.begun("b")
        now[0] = 600.0
        reporter.ended("a", None)
        reporter.ended("b", "broke")
    lines = written(shown).splitlines()
    assert lines[0].endswith("5 runs, 1 finished before")
    assert lines[3].endswith("done a in 600 s; 3 left, about 15 min")
    assert lines[4].endswith("failed b: broke; 2 left, about 10 min")


def test_the_summary_of_the_drivers_folders_is_taken_over(recipes: Path, cluster: FakeCluster) -> None:
    """A driver that was begun with other means left these folders, one of them unfinished."""
    for name, seed, fold in (("one", 0, 1), ("two", 0, 1), ("one", 0, 2)):
        folder = f"out/{name}-fold{fold}-seed{seed}"
        fake_run(
            ["train", f"sound/{name}", "--data", "digits", "--seed", str(seed), "--fold", str(fold), "--out", folder]
        )
    report = go(SOUNDS, seeds=[0])
    assert cluster.names == ["two-fold2-seed0"]
    (row,) = report.summary["differences"]
    assert (row["n"], row["folds"]) == (2, 2)
