"""The commands `deploy`, `doctor` and `completion`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from epitorch import _extras, doctor
from epitorch.cli import main

ROOT = Path(__file__).parents[1]
TINY = """\
name: tiny
model: {name: "epitorch:digits_cnn", arguments: {widths: [4, 8]}}
epitome: {index: direct, layers: {conv2: {epitome_shape: [4, 2, 3, 3]}}}
data: {holdout: 100, crop_padding: 1, flip: false}
training: {epochs: 1, batch_size: 128, peak_lr: 0.1}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "tiny.yaml").write_text(TINY)
    options = ["--data", "digits", "--out", str(folder / "run"), "--max-steps", "2"]
    assert main(["train", str(folder / "tiny.yaml"), *options]) == 0
    return folder / "run"


# ---- deploy ----


def test_deploy_prints_what_was_measured_and_writes_the_network(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPITORCH_CACHE", str(tmp_path / "cache"))
    file, report = tmp_path / "net.pt2", tmp_path / "report.json"
    assert main(["deploy", str(run), "--out", str(file), "--report", str(report), "--data", "digits", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (layer,) = printed["deployment"]["layers"]
    assert (layer["name"], printed["deployment"]["strategy"]) == ("conv2", "auto")
    assert set(layer["seconds"]) >= {"folded", layer["strategy"]}
    assert min(layer["seconds"].values()) > 0
    assert json.loads(report.read_text()) == printed["deployment"]
    assert printed["export"]["bytes"] == file.stat().st_size
    net = torch.export.load(file).module()
    assert net(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_deploy_without_files_prints_only(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPITORCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", str(run), "--no-measure", "--objective", "size"]) == 0
    out = capsys.readouterr().out
    assert "conv2" in out
    assert "difference to the trained model" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--runtime tflite", "torch | onnxruntime | openvino"),
        ("--objective speed", "latency | size"),
        ("--out net.onnx", "ends in .pt2"),
        ("--runtime openvino --out net.onnx", "ends in .xml"),
        ("--out none/net.pt2", "no such folder"),
        ("--report report.txt", "ends in .json"),
        ("--data digits", "--data has no effect"),
        ("--threads 0", "threads"),
        ("--input 1,3,8,8", "does not take an input of shape (1, 3, 8, 8)"),
    ],
)
def test_deploy_refuses_before_it_measures(
    options: str,
    words: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EPITORCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", str(run), *options.split()]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- doctor ----


def test_doctor_tells_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    again = doctor.diagnose().to_dict()
    assert {**found, "cache": None} == {**again, "cache": None}
    assert {**found["cache"], "free": 0} == {**again["cache"], "free": 0}  # others write, too
    assert found["torch"] == torch.__version__
    assert f"torch        {torch.__version__}" in page
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["packages"]["models"]["timm"] in page


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EPITORCH_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(doctor, "EXTRAS", {"train": {"no-such-package": "none"}})
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    page = str(doctor.diagnose())
    assert "missing: no-such-package (pip install 'epitorch[train]')" in page
    assert "onnxruntime  not installed" in page
    assert "NOT writable" in page


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del project["dev"], project["docs"]
    wanted = {
        extra: {name for line in lines if not (name := line.split(">")[0]).startswith("epitorch[")}
        for extra, lines in project.items()
    }
    got: dict[str, Any] = {extra: set(packages) for extra, packages in _extras.EXTRAS.items()}
    got["train"].remove("numpy")  # which others bring
    assert got == wanted


# ---- completion ----


def test_completion_knows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    commands = next(line for line in script.splitlines() if "subparsers=(" in line)
    assert {"train", "deploy", "reproduce", "doctor"} <= set(commands.split("(")[1].rstrip(")").split())
    assert "--no-measure" in script
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_completion_without_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "epitorch[train]" in capsys.readouterr().err
