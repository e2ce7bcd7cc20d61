"""Loggers by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from run_helpers import quiet, tiny_recipe

from epitorch.cli import main
from epitorch.errors import InputError, MissingExtraError
from epitorch.training.loggers import NAMES, check_loggers
from epitorch.training.run import train

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}


def files(out: Path) -> set[str]:
    return {path.name.split(".")[0] for path in (out / "logs").iterdir()} if (out / "logs").is_dir() else set()


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["csv"], {"metrics"}), (["tensorboard"], {"events", "hparams"}), (["csv", "csv"], {"metrics"}), ([], set())],
)
def test_only_the_loggers_asked_for_write(names: list[str], expected: set[str], tmp_path: Path) -> None:
    train(tiny_recipe(), "digits", tmp_path, max_steps=2, console=quiet(), loggers=names)
    assert files(tmp_path) - {"hparams"} == expected - {"hparams"}


def test_csv_and_tensorboard_are_the_default(tmp_path: Path) -> None:
    train(tiny_recipe(), "digits", tmp_path, max_steps=2, console=quiet())
    assert {"metrics", "events"} <= files(tmp_path)


def test_an_unknown_logger(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        train(tiny_recipe(), "digits", tmp_path / "out", console=quiet(), loggers=["tensorbord"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_logger_whose_package_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    real = importlib.import_module

    def missing(module: str, *rest: Any) -> Any:
        if module == PACKAGES[name]:
            raise ModuleNotFoundError(f"No module named '{module}'", name=module)
        return real(module, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'epitorch\[loggers\]'"):
        check_loggers(["csv", name])


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", "digits/dense", "--data", "digits", "--out", str(tmp_path / "out"), "--logger", "wandb"])
    assert code == 2
    assert "'wandb' is needed here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_takes_the_options_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = f"train digits/dense --data digits --accelerator cpu --max-steps 3 --out {out} --logger csv".split()
    assert main([*arguments, "--checkpoint-steps", "1", "--devices", "1", "--nodes", "1"]) == 0
    assert files(out) == {"metrics"}
    assert "written to" in capsys.readouterr().out
    assert set(NAMES) == {"csv", "tensorboard", *PACKAGES}
