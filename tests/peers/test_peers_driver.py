"""Which runs a part has, in which order they are made, and what is kept of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import driver
from benchmarks.peers.driver import Settings, make
from benchmarks.peers.jobs import RESULT, Job, jobs_of
from benchmarks.peers.parts import PARTS, part_named, smoke
from filelock import FileLock

from epitorch.errors import InputError

# Stands for a run: writes the result that it is given, or dies where there is none.
SCRIPT = "import sys, pathlib; r = sys.argv[2]; r and pathlib.Path(sys.argv[1]).write_text(r); sys.exit(not r)"


class Runs:
    """What was begun, and how runs of some methods end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.failing: set[str] = set()
        self.dying: set[str] = set()

    def command(self, job: Job, full: bool) -> list[str]:
        self.begun.append(job.name)
        done = {"status": "done", "accuracy": 0.5, "params": 1, "file_bytes": 2}
        found = {"status": "failed", "error": "E: no"} if job.method in self.failing else done
        text = "" if job.method in self.dying else json.dumps({"identity": job.identity(), **found})
        return [sys.executable, "-S", "-c", SCRIPT, str(job.folder / RESULT), text]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(driver, "command_of", made.command)
    return made


def jobs(out: Path, *methods: str, **others: Any) -> list[Job]:
    return jobs_of(smoke(PARTS["a"]), "DATA", out, methods=methods, smoke=True, **others)


def names(found: list[Job]) -> list[str]:
    return [job.name for job in found]


def test_what_a_run_needs_comes_before_it(tmp_path: Path) -> None:
    assert names(jobs(tmp_path, "kmeans", "epitome-int8", "tucker")) == [
        "start-own-seed0",
        "tucker-params-0.5-seed0",
        "epitome-params-0.5-seed0",
        "epitome-int8-params-0.5-seed0",
        "dense-own-seed0",
        "kmeans-bytes-0.125-seed0",
    ]
    for job in jobs_of(PARTS["a"], "DATA", tmp_path):
        known = names(jobs_of(PARTS["a"], "DATA", tmp_path))
        assert all(known.index(other.name) < known.index(job.name) for other in job.needed())


def test_every_method_of_a_part_has_runs_at_its_budgets(tmp_path: Path) -> None:
    for name in PARTS:
        part = part_named(name, full=True)
        found = jobs_of(part, "DATA", tmp_path)
        assert {job.method for job in found} - {"start"} == set(part.methods)
        assert {job.seed for job in found} == set(part.seeds)
        assert len(set(names(found))) == len(found)


def test_without_training_nothing_begins_from_trained_networks(tmp_path: Path) -> None:
    found = jobs_of(PARTS["b"], "DATA", tmp_path, methods=("torch-pruning", "kmeans"), seeds=(0,))
    assert "start" not in {job.method for job in found}
    assert names(found)[-1] == "kmeans-bytes-0.125-seed0"
    assert "dense-own-seed0" in names(found)


def test_unknown_methods_and_those_left_out_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs training"):
        jobs_of(PARTS["b"], "DATA", tmp_path, methods=("width",))
    with pytest.raises(InputError, match="did you mean 'tucker'"):
        jobs_of(PARTS["a"], "DATA", tmp_path, methods=("tuker",))


def test_finished_runs_are_kept_and_copied(tmp_path: Path, runs: Runs) -> None:
    settings = Settings(tmp_path / "results", jobs=2)
    assert make(jobs(tmp_path, "kmeans"), settings) == []
    assert runs.begun == ["dense-own-seed0", "kmeans-bytes-0.125-seed0"]
    assert make(jobs(tmp_path, "kmeans", "tucker"), settings) == []
    assert runs.begun[2:] == ["start-own-seed0", "tucker-params-0.5-seed0"]
    kept = {file.name for file in (tmp_path / "results" / "a").iterdir()}
    assert kept == {"dense-own-seed0.json", "kmeans-bytes-0.125-seed0.json", "tucker-params-0.5-seed0.json"}


def test_a_result_of_other_settings_is_made_anew(tmp_path: Path, runs: Runs) -> None:
    settings = Settings(tmp_path / "results")
    make(jobs(tmp_path, "dense"), settings)
    whole = jobs_of(PARTS["a"], "DATA", tmp_path, methods=("dense",), seeds=(0,))
    assert whole[0].result() is None
    make(whole, settings)
    assert runs.begun == ["dense-own-seed0"] * 2
    assert whole[0].result() is not None


def test_a_failed_method_is_a_result_that_can_be_tried_again(tmp_path: Path, runs: Runs) -> None:
    runs.failing = {"dense"}
    assert make(jobs(tmp_path, "dense"), Settings(tmp_path / "results")) == []
    assert make(jobs(tmp_path, "dense"), Settings(tmp_path / "results")) == []
    assert runs.begun == ["dense-own-seed0"]
    assert json.loads((tmp_path / "results/a/dense-own-seed0.json").read_text())["status"] == "failed"
    runs.failing = set()
    make(jobs(tmp_path, "dense"), Settings(tmp_path / "results", retry=True))
    assert json.loads((tmp_path / "results/a/dense-own-seed0.json").read_text())["status"] == "done"


def test_a_run_that_dies_is_named_and_so_are_those_that_need_it(tmp_path: Path, runs: Runs) -> None:
    runs.dying = {"dense"}
    broken = make(jobs(tmp_path, "kmeans", "tucker"), Settings(tmp_path / "results"))
    assert [line.split(" ")[0] for line in broken] == ["dense-own-seed0", "kmeans-bytes-0.125-seed0"]
    assert "tucker-params-0.5-seed0" in runs.begun


def test_one_driver_at_a_time(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "a").mkdir()
    with FileLock(tmp_path / "a" / ".driver.lock"), pytest.raises(InputError, match="another driver"):
        make(jobs(tmp_path, "dense"), Settings(tmp_path / "results"))
    assert runs.begun == []


def test_the_command_line_makes_the_same_run(tmp_path: Path) -> None:
    from benchmarks.peers.__main__ import _parser, _part

    job = jobs(tmp_path, "tucker")[-1]
    command = driver.command_of(job, full=False)
    arguments = _parser().parse_args(command[command.index("one") :])
    again = Job(
        _part(arguments.part, arguments), arguments.method, arguments.budget, arguments.seed, "DATA", tmp_path, True
    )
    assert again.identity() == job.identity()
    assert again.folder == job.folder
