"""The scripts of `examples/`, each run on small data."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import onnx
import pytest

from sound_files import write_sounds

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [file.stem for file in FOLDER.glob("*.py") if f'example("{file.stem}")' not in text] == []


def test_plain_loop() -> None:
    assert example("plain_loop").main(["--epochs", "4"]) > 0.5  # ten classes


@pytest.mark.filterwarnings("ignore")
def test_lightning_module() -> None:
    assert 0 <= example("lightning_module").main(["--epochs", "1", "--batches", "2"]) <= 1


@pytest.mark.filterwarnings("ignore")
def test_huggingface_trainer() -> None:
    assert example("huggingface_trainer").main(["--steps", "60"]) > 0.5


def test_timm_to_budget(tmp_path: Path) -> None:
    options = ["--data", "digits", "--model", "resnet10t", "--params", "1000000", "--epochs", "1", "--batches", "2"]
    file = example("timm_to_budget").main([*options, "--out", str(tmp_path / "net.onnx")])
    onnx.checker.check_model(onnx.load(file))
    assert file.stat().st_size < 1.03 * 4_000_000 + 2**16 + 20 * 2**12  # as docs/export.md says


def test_audio_esc10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPITORCH_CACHE", str(tmp_path / "cache"))
    write_sounds(tmp_path / "data", clips=2)
    options = ["--data", str(tmp_path / "data"), "--epochs", "1", "--sample-rate", "8000", "--seconds", "0.5"]
    assert 0 <= example("audio_esc10").main(options) <= 1
