"""`epitorch export`: from a checkpoint to a checked file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from epitorch.checkpoint import CheckpointConfig, ModelInput, save_checkpoint
from epitorch.cli import main
from epitorch.conversion import convert_
from epitorch.export._onnx import run_onnx
from epitorch.models.resolve import build_model
from epitorch.plans import LayerPlan, Plan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def run(command: str) -> int:
    return main(shlex.split(command))


def checkpoint(folder: Path, *, trained: bool) -> nn.Module:
    plan = Plan({"conv2": LayerPlan((2, 4, 3, 3))})
    arguments = {"widths": [4, 4]}
    model = build_model("epitorch:digits_cnn", arguments)
    convert_(model, plan)
    seen = ModelInput((1, 8, 8), (0.3,), (0.4,), tuple(str(n) for n in range(10))) if trained else None
    save_checkpoint(
        folder, model, CheckpointConfig("epitorch:digits_cnn", arguments, plan, seen, 8 if trained else None)
    )
    return model.eval()


def test_export_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = checkpoint(tmp_path / "run", trained=True), tmp_path / "net.onnx"
    assert run(f"export {tmp_path / 'run'} --to onnx --out {out} --data digits --strategy size --json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == out.stat().st_size
    assert report["checked"] == [[1, 1, 8, 8], [3, 1, 8, 8]]
    x = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(out, [(x,)])[0][0], model(x), atol=1e-4, rtol=1e-4)
    assert run(f"export {tmp_path / 'run'} --to pt2 --out {tmp_path / 'net.pt2'}") == 0
    assert "difference to torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--to onx --out {tmp}/n.onnx", "to is not known"),
        ("--to openvino --out {tmp}/n.onnx", "out is not a file of this format"),
        ("--to onnx --out {tmp}/none/n.onnx", "the folder of the output is missing"),
        ("--to onnx --out {tmp}/n.onnx --data digits", "this checkpoint knows no images"),
        ("--to onnx --out {tmp}/n.onnx --input 1,1,8,8 --opset 3", "opset is not valid"),
        ("--to onnx --out {tmp}/n.onnx", "the model does not run on inputs of shapes [(1, 3, 224, 224)]"),
    ],
)
def test_wrong_input_is_exit_code_2(
    options: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "run", trained=False)
    assert run(f"export {tmp_path / 'run'} {options}".format(tmp=tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err.splitlines()[0]
    assert not list(tmp_path.glob("n.*"))


def test_an_input_that_the_model_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "run", trained=False)
    assert run(f"export {tmp_path / 'run'} --to onnx --out {tmp_path}/n.onnx --input 1,4,8,8") == 2
    err = capsys.readouterr().err
    assert "the model does not run on inputs of shapes [(1, 4, 8, 8)]" in err
    assert "dynamic=" not in err
    assert "got 4 channels instead" in err
