"""`epitorch plan` and `epitorch convert`: from a model's name to a checkpoint of the planned size."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from epitorch._arguments import amount
from epitorch.checkpoint import CheckpointConfig, load_checkpoint, save_checkpoint
from epitorch.cli import main
from epitorch.models.resolve import build_model
from epitorch.plans import Plan

DIGITS = "epitorch:digits_cnn --input 1,1,8,8"


def run(command: str) -> int:
    return main(shlex.split(command))


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_plan_convert_count(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / f"plan.{suffix}", tmp_path / "out"
    assert run(f"plan {DIGITS} --params 20k --out {file}") == 0
    printed = capsys.readouterr().out
    plan = Plan.load(file)
    assert str(plan) in printed
    assert f"written to {file}" in printed
    random = torch.get_rng_state()
    assert run(f"convert epitorch:digits_cnn --plan {file} --out {out}") == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert f"{len(plan.layers)} converted" in capsys.readouterr().out
    assert run(f"count {out} --input 1,1,8,8 --json") == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["params"] == plan.params
    assert 19_000 < counted["params"] <= 20_000
    assert counted["madds"] == plan.madds_fresh
    assert run(f"count {out} --json") == 0
    assert json.loads(capsys.readouterr().out) == counted  # the plan knows the size of the images


def test_convert_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"plan {DIGITS} --ratio 2 --out {tmp_path / 'plan.yaml'}")
    capsys.readouterr()
    run(f"convert epitorch:digits_cnn --plan {tmp_path / 'plan.yaml'} --out {tmp_path / 'out'} --json")
    layers = json.loads(capsys.readouterr().out)["layers"]
    converted = {layer["name"]: layer["epitome_shape"] for layer in layers if layer["left"] is None}
    planned = Plan.load(tmp_path / "plan.yaml").layers
    assert converted == {name: list(layer.epitome_shape) for name, layer in planned.items()}


def test_convert_depends_on_the_seed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"plan {DIGITS} --ratio 2 --out {tmp_path / 'plan.yaml'}")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(f"convert epitorch:digits_cnn --plan {tmp_path / 'plan.yaml'} --out {tmp_path / name} --seed {seed}")
    a, b, c = (load_checkpoint(tmp_path / name).model.state_dict() for name in "abc")
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not torch.equal(a["conv2.epitome"], c["conv2.epitome"])


def test_a_converted_checkpoint_can_be_planned_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"plan {DIGITS} --ratio 1.2 --skip conv4 classifier --out {tmp_path / 'plan.yaml'}")
    run(f"convert epitorch:digits_cnn --plan {tmp_path / 'plan.yaml'} --out {tmp_path / 'out'}")
    capsys.readouterr()
    assert run(f"plan {tmp_path / 'out'} --input 1,1,8,8 --ratio 1.2 --json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["left"]["conv2"] == "already_epitome"
    assert "conv4" in plan["layers"]


def test_a_dense_checkpoint_is_converted_near_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, plan = tmp_path / "dense", tmp_path / "plan.yaml"
    model = build_model("epitorch:digits_cnn")
    save_checkpoint(dense, model, CheckpointConfig("epitorch:digits_cnn", {}, None, None, None))
    assert run(f"plan {DIGITS} --ratio 2 --index fixed --out {plan}") == 0
    for init in ("fresh", "least_squares"):
        assert run(f"convert {dense} --plan {plan} --out {tmp_path / init} --init {init}") == 0
    assert "evenly spread starts" in capsys.readouterr().out
    name = next(iter(Plan.load(plan).layers))
    wanted = model.get_parameter(f"{name}.weight")

    def error(init: str) -> float:
        layer: Any = load_checkpoint(tmp_path / init).model.get_submodule(name)
        return float((layer.weight - wanted).detach().norm() / wanted.detach().norm())

    assert error("least_squares") < 0.95 < error("fresh")
    assert run(f"convert {tmp_path / 'fresh'} --plan {plan} --out {tmp_path / 'twice'}") == 2
    assert "converted already" in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()


def test_options_reach_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--madds 300k --policy front_heavy --form separable --axes out --index fixed --align 4"
    assert run(f"plan {DIGITS} {options} --json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["budget"]["kind"] == "madds"
    assert plan["totals"]["madds"] <= 300_000
    for layer in plan["layers"].values():
        assert layer["index"] == "fixed"
        assert layer["epitome_shape"][0] % 4 == 0


@pytest.mark.parametrize(
    ("text", "number"), [("2.1M", 2_100_000), ("300k", 300_000), ("1.2G", 1_200_000_000), ("77", 77), ("1e3", 1000)]
)
def test_numbers_with_a_suffix_are_exact(text: str, number: int) -> None:
    assert amount(text) == number


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"plan {DIGITS} --params 10", "the budget is too small"),
        (f"plan {DIGITS} --params 1G", "the budget is larger than the model"),
        (f"plan {DIGITS} --ratio 0.5", "ratio is not valid"),
        (f"plan {DIGITS} --ratio 2 --policy unifrom", "did you mean 'uniform'"),
        (f"plan {DIGITS} --ratio 2 --align 0", "align is not valid"),
        (f"plan {DIGITS} --ratio 2 --out {{tmp}}/plan.txt", "JSON or YAML"),
        ("plan epitorch:digits_cnn --ratio 2", "does not run on the example input"),
        ("plan epitorch:digit_cnn --ratio 2", "did you mean 'digits_cnn'"),
        ("convert epitorch:digits_cnn --plan {tmp}/none.yaml --out {tmp}/out", "the plan cannot be read"),
        ("convert epitorch:mobilenetv2 --plan {plan} --out {tmp}/out", "conv1: this is a plan for another model"),
        ("convert epitorch:digits_cnn --plan {bad} --out {tmp}/out", "layers.conv2.epitome_shape"),
        ("eval {converted} --data digits", "this checkpoint was never trained"),
    ],
)
def test_wrong_input_is_exit_code_2(
    command: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, bad, converted = tmp_path / "plan.yaml", tmp_path / "bad.yaml", tmp_path / "converted"
    run(f"plan {DIGITS} --ratio 2 --out {plan}")
    run(f"convert epitorch:digits_cnn --plan {plan} --out {converted}")
    bad.write_text("layers: {conv2: {epitome_shape: [4, 4.5, 3, 3]}}\n")
    capsys.readouterr()
    assert run(command.format(tmp=tmp_path, plan=plan, bad=bad, converted=converted)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err.splitlines()[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    ["plan m", "plan m --ratio x", "plan m --params 2.M1", "plan m --params 0.5", "plan m --params -3k", "convert m"],
)
def test_wrong_usage_is_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(command)
    assert caught.value.code == 2


def test_a_conversion_never_replaces_what_it_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder, plan = tmp_path / "run", tmp_path / "plan.yaml"
    dense = run_folder / "checkpoint"
    config = CheckpointConfig("epitorch:digits_cnn", {}, None, None, None)
    save_checkpoint(dense, build_model("epitorch:digits_cnn"), config)
    before = (dense / "model.safetensors").read_bytes()
    assert run(f"plan {DIGITS} --ratio 2 --out {plan}") == 0
    for source in (dense, run_folder):
        for out in (dense, run_folder):
            assert run(f"convert {source} --plan {plan} --out {out} --overwrite") == 2
            assert "would replace the model" in capsys.readouterr().err
    assert (dense / "model.safetensors").read_bytes() == before
    assert run(f"convert {dense} --plan {plan} --out {tmp_path / 'new'}") == 0
    assert run(f"convert {dense} --plan {plan} --out {tmp_path / 'new'}") == 2
    assert "has files already" in capsys.readouterr().err
    assert run(f"convert {dense} --plan {plan} --out {tmp_path / 'new'} --overwrite") == 0


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999999", "x"])
def test_a_seed_that_torch_does_not_take_is_wrong_input(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(f"convert epitorch:digits_cnn --plan p.yaml --out o --seed={seed}")
    assert caught.value.code == 2
    assert "expected a seed, a whole number from 0, got" in capsys.readouterr().err
