"""Tables of the paper: their files, what is run for them, and how ours stands beside the paper's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sweep_helpers import FakeCluster, console, option

from epitorch.cli import main
from epitorch.errors import DataError, EpitorchError, InputError
from epitorch.sweeps.cluster import Cluster
from epitorch.sweeps.reproduce import SMOKE_BATCH, SMOKE_STEPS, TableReport, reproduce, smoke_values
from epitorch.sweeps.tables import load_table, table_folders
from epitorch.training.recipe import load_recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[2]
TABLE = """\
title: Digits
source: "table 1"
metric: top-1 accuracy in percent
data: the word digits
rows:
  - {name: narrow, label: "Narrow*", recipe: tiny/dense, short: tiny/wide,
     paper: {accuracy: 48.5, params: 1.9, note: odd}}
  - {name: ours, label: Ours, recipe: tiny/epitome, short: tiny/epitome, paper: {accuracy: null, madds: 12}}
"""
SOUND_TABLE = (
    TABLE.replace("tiny/dense", "sound/one").replace("tiny/wide", "sound/two").replace("tiny/epitome", "sound/two")
)


@pytest.fixture
def table(recipes: Path) -> Path:
    (recipes / "tables").mkdir()
    path = recipes / "tables" / "digits.yaml"
    path.write_text(TABLE)
    return path


def go(**options: Any) -> TableReport:
    options.setdefault("command", ["epitorch", "reproduce", "digits"])
    return reproduce(load_table("digits"), "digits", "out", console=console(), **options)


def test_short_runs_the_short_recipes_and_stands_beside_the_paper(table: Path, cluster: FakeCluster) -> None:
    report = go(effort="short", seeds=2)
    assert cluster.names == ["narrow-seed0", "ours-seed0", "narrow-seed1", "ours-seed1"]
    assert [command[1] for command in cluster.commands[:2]] == ["tiny/wide", "tiny/epitome"]
    data = json.loads(Path("out/table.json").read_text())
    assert data == report.data
    assert (data["name"], data["budget"], data["complete"]) == ("digits", "short", True)
    first, second = data["rows"]
    wanted = {"mean": pytest.approx(62), "sd": 0, "n": 2, "measured_on": "test images", "seeds": [0, 1], "folds": []}
    assert first["accuracy"] == wanted
    assert first["difference"]["accuracy"] == pytest.approx(13.5)
    assert first["difference"]["params"] == pytest.approx(0.1)
    assert first["difference"]["madds"] is None
    assert second["difference"] == {"accuracy": None, "params": None, "madds": pytest.approx(-2)}
    text = Path("out/table.md").read_text()
    assert "| Narrow* | 62.00 +- 0.00 (n = 2) | 48.50 | +13.50 |" in text
    assert "no target" in text
    assert "Narrow*: odd" in text
    assert "not complete" not in text


def test_full_runs_the_papers_recipes(table: Path, cluster: FakeCluster) -> None:
    go(effort="full", rows=["narrow"])
    assert cluster.names == ["narrow-seed0"]
    assert cluster.commands[0][1] == "tiny/dense"
    assert option(cluster.commands[0], "--max-steps") is None


def test_smoke_runs_a_few_small_steps_and_shows_no_accuracy(table: Path, cluster: FakeCluster) -> None:
    report = go(effort="smoke")
    assert {option(command, "--max-steps") for command in cluster.commands} == {str(SMOKE_STEPS)}
    recipe = load_recipe(cluster.commands[0][1])
    assert (recipe.training.batch_size, recipe.name) == (SMOKE_BATCH, "tiny/dense-smoke")
    assert all(row["accuracy"] is None and row["difference"]["accuracy"] is None for row in report.data["rows"])
    assert report.data["rows"][0]["params"] == 2.0
    assert "accuracy" not in report.text.split("\n", 2)[2]
    assert "62" not in report.text
    assert "means nothing" in report.text


def test_smoke_leaves_out_what_needs_a_gpu_or_time() -> None:
    heavy = {"batch_size": 256, "accumulate": 4, "compile": True, "precision": "fp16", "sync_batchnorm": True}
    data = {
        "name": "heavy",
        "model": {"name": "epitorch:digits_cnn"},
        "epitome": {"index": "learner", "c": 0.5, "freeze_last_epochs": 2, "snap": True},
        "training": {"epochs": 3, "peak_lr": 0.1, **heavy},
    }
    values = {value.key: value.value for value in smoke_values(parse_recipe(data, source="heavy"))}
    assert values == {
        "training.batch_size": 16,
        "training.accumulate": 1,
        "training.compile": False,
        "training.precision": "fp32",
        "training.sync_batchnorm": False,
        "data.holdout": 16,
        "epitome.freeze_last_epochs": 0,
        "epitome.snap": False,
    }
    data["training"] = {"epochs": 3, "peak_lr": 0.1, "batch_size": 4, "precision": "bf16"}
    data["data"] = {"holdout": 5}
    del data["epitome"]
    assert smoke_values(parse_recipe(data, source="light")) == []


def test_sounds_are_cross_validated(table: Path, cluster: FakeCluster) -> None:
    table.write_text(SOUND_TABLE)
    report = go(effort="short", rows=["ours"])
    assert cluster.names == [f"ours-fold{fold}-seed0" for fold in range(1, 6)]
    assert report.data["rows"][0]["accuracy"]["folds"] == [1, 2, 3, 4, 5]
    cluster.commands = []
    reproduce(load_table("digits"), "digits", "out2", effort="smoke", rows=["ours"], console=console())
    assert cluster.names == ["ours-fold1-seed0"]
    cluster.commands = []
    reproduce(load_table("digits"), "digits", "out3", effort="short", rows=["ours"], folds=[4], console=console())
    assert cluster.names == ["ours-fold4-seed0"]


def test_sounds_that_are_not_there_are_missed_before_anything_is_begun(table: Path, cluster: FakeCluster) -> None:
    table.write_text(SOUND_TABLE)
    Path("digits/audio/4-1.ogg").unlink()
    with pytest.raises(DataError, match=r"1 of 10 clips are missing[\s\S]*4-1\.ogg"):
        go(effort="short")
    assert cluster.commands == []
    assert not Path("out/table.json").exists()


@pytest.mark.parametrize(("seeds", "rows"), [("0", "narrow"), ("x", "narrow"), ("1", " , ")])
def test_numbers_and_names_that_do_not_fit_are_told_with_what_would(
    seeds: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "digits", "--data", "digits", "--seeds", seeds, "--rows", rows])
    words = f"expected a whole number from 1, got '{seeds}'" if seeds != "1" else "names with commas between them"
    assert words in capsys.readouterr().err


def test_a_row_that_fails_leaves_the_others_and_is_tried_again(table: Path, cluster: FakeCluster) -> None:
    cluster.broken = "narrow"
    report = go(effort="full")
    assert [failed.job.name for failed in report.failed] == ["narrow-seed0"]
    assert "not complete" in report.text
    assert report.data["rows"][1]["runs"] == 1
    cluster.broken, cluster.commands = "", []
    assert go(effort="full").data["complete"] is True
    assert cluster.names == ["narrow-seed0"]


def test_from_the_command_line_on_ray(table: Path, local_ray: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text(TABLE.replace("tiny/dense", "tiny/wide"))
    command = ["reproduce", "digits", "--data", "digits", "--rows", "ours", "--jobs", "1", "--cpus-per-run", "1"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "written to runs/reproduce/digits-smoke" in out
    assert "| Ours |" in out
    assert "means nothing" in out
    assert main([*command, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["runs"], row["accuracy"]) == (1, None)
    assert row["params"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("digit", "there is no table 'digit'; did you mean 'digits'?"),
        ("digits --rows our", "the table 'digits' has no row 'our'; did you mean 'ours'?"),
        ("digits --budget fast", "there is no such budget"),
        ("digits --folds 1", "cannot choose the fold"),
        ("digits --data gone", "gone: no data folder"),
        ("digits --data recipes", "recipes: no data set in this folder"),
    ],
)
def test_wrong_input_is_told(
    table: Path, cluster: FakeCluster, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "--data", "digits", *arguments.split()]) == 2
    assert cluster.commands == []
    err = capsys.readouterr().err
    assert words in err
    assert "expected: " in err
    assert cluster.commands == []
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title: Digits\n", "", "digits.yaml: 'title' has a value that does not fit"),
        ("metric:", "metrics:", "line 3: unknown key 'metrics'; did you mean 'metric'?"),
        ("accuracy: 48.5", "accuracy: 148.5", "line 7: 'rows.0.paper.accuracy' has a value that does not fit"),
        ("name: ours", "name: narrow", "two rows are called 'narrow'"),
        ("short: tiny/wide,", "", "the key 'rows.0.short' is missing"),
        ("params: 1.9", "parameters: 1.9", "line 7: unknown key 'rows.0.paper.parameters'"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_its_line(table: Path, old: str, new: str, words: str) -> None:
    assert old in TABLE
    table.write_text(TABLE.replace(old, new))
    with pytest.raises(EpitorchError) as caught:
        load_table("digits")
    assert words in str(caught.value)


def test_a_row_without_recipe_is_refused(table: Path, cluster: FakeCluster) -> None:
    table.write_text(TABLE.replace("tiny/epitome", "tiny/gone"))
    with pytest.raises(InputError, match=r"(?s)there is no recipe 'tiny/gone'.*asked by: the table's row 'ours'"):
        go()
    with pytest.raises(InputError, match="too few seeds"):
        go(seeds=0)


def test_every_table_of_the_repository_names_recipes_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for file in [file for folder in table_folders() for file in folder.glob("*.yaml")]:
        table = load_table(file)
        assert table.rows
        for row in table.rows:
            for name in (row.recipe, row.short):
                assert load_recipe(name).model.name
