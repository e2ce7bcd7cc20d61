"""The command line: exit codes, one clear line for wrong input, JSON, and help whose examples work."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from epitorch import __version__, cli
from epitorch.cli import main

ROOT = Path(__file__).parents[1]
TINY = """\
name: tiny
model: {name: "epitorch:digits_cnn", arguments: {widths: [4, 4]}}
epitome: {index: learner, layers: {conv2: {epitome_shape: [2, 4, 3, 3]}}}
data: {holdout: 100, crop_padding: 1, flip: false}
training: {epochs: 1, batch_size: 128, peak_lr: 0.1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def failing(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


def test_train_eval_count(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe), "--data", "digits", "--max-steps", "2", "--seed", "3"]) == 0
    assert f"written to {Path('runs/tiny/seed3')}" in capsys.readouterr().out
    written = json.loads((tmp_path / "runs/tiny/seed3/results.json").read_text())
    assert written["seed"] == 3
    assert main(["eval", "runs/tiny/seed3", "--data", "digits", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["accuracy"] == written["accuracy"]["test"]
    assert report["accuracy_learner"] == written["accuracy"]["test_learner"]
    assert main(["eval", "runs/tiny/seed3/checkpoint", "--data", "digits"]) == 0
    assert "with the learner" in capsys.readouterr().out
    assert main(["count", "runs/tiny/seed3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == written["parameters"]["total"]


def test_train_prints_json(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["train", str(recipe), "--data", "digits", "--max-steps", "1", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "results.json").read_text())


def test_overwriting_is_asked_for(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", str(recipe), "--data", "digits", "--max-steps", "1", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    capsys.readouterr()
    code, err = failing(capsys, *command)
    assert code == 2
    assert "--overwrite" in err
    assert main([*command, "--overwrite"]) == 0


def test_count_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "epitorch:digits_cnn", "--input", "1,1,8,8"]) == 0
    assert "47,194" in capsys.readouterr().out
    assert main(["count", "epitorch:digits_cnn", "--input", "1,1,8,8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == 47_194


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train nothing --data digits", "error: there is no recipe 'nothing'"),
        ("train {bad} --data digits", "unknown key 'training.epoch'; did you mean 'epochs'?"),
        ("train {good} --data {tmp}/none", "none: no data folder"),
        ("train {good} --data digits --seed -4", "seed is not valid"),
        ("train {good} --data digits --max-steps 0", "max_steps is not valid"),
        ("eval {tmp} --data digits", "there is no checkpoint here: config.json is missing"),
        ("eval {tmp}/none --data digits", "there is no checkpoint here"),
        ("count epitorch:mobilenet", "did you mean 'mobilenetv2'?"),
        ("count nonsense", "the model's name has no known form"),
        ("count epitorch:digits_cnn", "does not take an input of shape (1, 3, 224, 224)"),
        ("count epitorch:digits_cnn --input 8", "does not take an input of shape (8,)"),
    ],
)
def test_wrong_input_is_exit_code_2_and_one_clear_line(
    arguments: str, words: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(TINY.replace("epochs", "epoch"))
    filled = arguments.format(bad=bad, good=recipe, tmp=tmp_path)
    code, err = failing(capsys, *shlex.split(filled))
    assert code == 2
    assert err.startswith("error: ")
    assert words in err.splitlines()[0]
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    ["bogus", "train", "train x", "eval x", "count", "count m --input 1,x", "count m --input 0", "demo --seed x"],
)
def test_wrong_usage_is_exit_code_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(arguments))
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("the disk is full"), 1), (KeyboardInterrupt(), 130), (OSError(28, "no space"), 1)]
)
def test_failures_have_their_own_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise error

    monkeypatch.setitem(cli._COMMANDS, "count", fails)
    got, err = failing(capsys, "count", "x")
    assert got == code
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_a_refusal_of_the_system_names_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        open("/proc/nothing/here", "w")  # noqa: SIM115

    monkeypatch.setitem(cli._COMMANDS, "count", fails)
    code, err = failing(capsys, "count", "x")
    assert code == 1
    assert "/proc/nothing/here" in err.splitlines()[0]
    assert "No such file" in err


@pytest.mark.parametrize(
    ("module", "extra"),
    [("pytorch_lightning", "train"), ("yaml.nodes", "train"), ("sklearn", "demo"), ("timm", "models")],
)
def test_a_missing_package_says_which_extra(
    module: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setitem(cli._COMMANDS, "train", fails)
    code, err = failing(capsys, "train", "x", "--data", "digits")
    assert code == 2
    assert f"pip install 'epitorch[{extra}]'" in err


def test_another_missing_module_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise ModuleNotFoundError("No module named 'nothing'", name="nothing")

    monkeypatch.setitem(cli._COMMANDS, "count", fails)
    code, err = failing(capsys, "count", "x")
    assert (code, err) == (1, "error: No module named 'nothing'\n")


def test_debug_shows_where_an_error_came_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPITORCH_DEBUG", "1")
    code, err = failing(capsys, "count", "nonsense")
    assert code == 2
    assert "Traceback" in err
    monkeypatch.setenv("EPITORCH_DEBUG", "0")
    assert "Traceback" not in failing(capsys, "count", "nonsense")[1]


def test_foreign_factories_in_checkpoints_need_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from epitorch.checkpoint import CheckpointConfig, ModelInput, save_checkpoint
    from epitorch.models.resolve import build_model

    name = "epitorch.models.small:digits_cnn"
    model_input = ModelInput((1, 8, 8), (0.5,), (0.5,), tuple("0123456789"))
    save_checkpoint(tmp_path, build_model(name), CheckpointConfig(name, {}, None, model_input, 64))
    code, err = failing(capsys, "eval", tmp_path, "--data", "digits")
    assert code == 2
    assert "--allow-factory" in err
    assert main(["eval", str(tmp_path), "--data", "digits", "--allow-factory"]) == 0


def test_images_that_do_not_fit_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from epitorch.checkpoint import CheckpointConfig, ModelInput, save_checkpoint
    from epitorch.models.resolve import build_model

    model = build_model("epitorch:digits_cnn", {"channels": 3})
    for shape, classes, words in (
        ((3, 32, 32), tuple("0123456789"), "other shape"),
        ((1, 8, 8), tuple("abcdefghij"), "other classes"),
    ):
        model_input = ModelInput(shape, (0.5,) * shape[0], (0.5,) * shape[0], classes)  # type: ignore[arg-type]
        config = CheckpointConfig("epitorch:digits_cnn", {"channels": 3}, None, model_input, 64)
        save_checkpoint(tmp_path, model, config)
        code, err = failing(capsys, "eval", tmp_path, "--data", "digits")
        assert code == 2
        assert words in err.splitlines()[0]


# ---- help ----


COMMANDS = [
    *("demo", "train", "eval", "count", "plan", "convert", "export", "deploy", "bench"),
    *("sweep", "reproduce", "report", "push", "doctor", "completion"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "examples" in text
    assert len(examples(text)) >= 2
    assert "rites" in text  # what it writes, or that it writes nothing


def examples(text: str) -> list[list[str]]:
    whole = text.replace("\\\n", " ")
    lines = [line.split(">")[0].strip() for line in whole.splitlines() if line.strip().startswith("epitorch ")]
    return [shlex.split(line)[1:] for line in lines]


def test_examples_in_the_help_parse_and_name_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        for example in examples(capsys.readouterr().out):
            arguments = cli.parser().parse_args(example)
            if command == "train":
                from epitorch.training.recipe import load_recipe

                load_recipe(arguments.recipe)
            if command == "sweep":
                from epitorch.sweeps.file import load_sweep

                load_sweep(arguments.sweep)
            if command == "count":
                assert main(example) == 0
                capsys.readouterr()


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("demo", "train", "eval", "count", "plan", "convert", "sweep"))


def test_version_and_module_entry() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "epitorch", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == f"epitorch {__version__}"


def test_commands_leave_global_state_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
    main(["count", "epitorch:digits_cnn", "--input", "1,1,8,8"])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before[1:]
