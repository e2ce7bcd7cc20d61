"""Whole runs of a few steps: what they write, that they can be stopped, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from rich.console import Console
from run_helpers import quiet, tiny_recipe

from epitorch.checkpoint import load_checkpoint
from epitorch.errors import DataError, InputError, TrainingError
from epitorch.results import RunResult, load_results
from epitorch.training import run as run_module
from epitorch.training.callbacks import StopOnSignal
from epitorch.training.evaluation import evaluate_checkpoint
from epitorch.training.run import train


def short(recipe: Any, out: Path, **options: Any) -> RunResult:
    return train(recipe, "digits", out, **{"max_steps": 2, "console": quiet(), **options})


@pytest.mark.parametrize("index", [None, "learner", "direct", "fixed"])
def test_a_run_writes_what_it_measured(index: str | None, tmp_path: Path) -> None:
    result = train(tiny_recipe(index), "digits", tmp_path, console=quiet(), command=["epitorch", "train"])
    assert load_results(tmp_path / "results.json") == [result]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"results.json", "checkpoint", "lightning", "logs", "train.log", "run.json", ".lock"} | (
        set() if index is None else {"starts.json"}
    )
    assert (tmp_path / "lightning" / "last.ckpt").is_file()
    assert any(path.name.startswith("events.out") for path in (tmp_path / "logs").iterdir())
    assert "heldout_accuracy" in (tmp_path / "logs" / "metrics.csv").read_text()
    assert "test accuracy" in (tmp_path / "train.log").read_text()
    assert result.command == ["epitorch", "train"]
    assert result.recipe_sha256 == tiny_recipe(index).sha256
    assert (result.accuracy.test_images, result.accuracy.heldout_images, result.accuracy.classes) == (360, 100, 10)
    assert (result.accuracy.test_learner is None) is (index != "learner")
    assert len(result.accuracy.heldout) == len(result.seconds.epochs) == len(result.seconds.epochs_training) == 1
    assert result.peak_memory_bytes.rss > 10_000_000
    assert result.environment["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert result.environment["threads"] == torch.get_num_threads()


def test_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    result = short(tiny_recipe("learner"), tmp_path)
    model = load_checkpoint(tmp_path).model
    learners = sum(p.numel() for m in model.modules() if hasattr(m, "learner") for p in m.learner.parameters())  # type: ignore[union-attr]
    starts = result.parameters.routing
    assert result.parameters.total == sum(p.numel() for p in model.parameters()) - learners + starts
    assert result.parameters.epitome == 4 * 4 * 9 + 8 * 4 * 9
    parts = result.parameters
    assert parts.total == parts.epitome + parts.routing + parts.other
    assert 0 < result.madds.interpolation < result.madds.executed


def test_eval_of_the_checkpoint_gives_the_run_s_accuracy(tmp_path: Path) -> None:
    result = train(tiny_recipe("learner", epochs=2), "digits", tmp_path, console=quiet())
    report = evaluate_checkpoint(tmp_path, "digits", accelerator="cpu")
    assert result.accuracy.test > 0.15  # it has learnt something
    assert (report.accuracy, report.accuracy_learner) == (result.accuracy.test, result.accuracy.test_learner)
    assert report.gap == result.accuracy.gap
    assert report.images == 360
    assert f"{100 * report.accuracy:.2f}%" in str(report)


def test_eval_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short(tiny_recipe("fixed"), tmp_path)
    monkeypatch.setattr("epitorch.progress.QUIET_SECONDS", -1.0)
    monkeypatch.setattr("epitorch.progress.LINE_SECONDS", -1.0)
    capsys.readouterr()
    evaluate_checkpoint(tmp_path, "digits", accelerator="cpu")
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("eval: 360 images")
    evaluate_checkpoint(tmp_path, "digits", accelerator="cpu", progress=False)
    assert capsys.readouterr().err == ""


def test_same_seed_same_run_another_seed_another_run(tmp_path: Path) -> None:
    recipe = tiny_recipe("learner")
    first = short(recipe, tmp_path / "a", seed=3)
    torch.rand(5)
    random.random()
    again = short(recipe, tmp_path / "b", seed=3)
    other = short(recipe, tmp_path / "c", seed=4)
    assert first.loss == again.loss
    assert first.accuracy == again.accuracy
    assert first.loss != other.loss


def test_global_random_state_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    level = pl_level()
    short(tiny_recipe(), tmp_path)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # type: ignore[index]  # noqa: NPY002
    assert pl_level() == level


def pl_level() -> int:
    import logging

    return logging.getLogger("pytorch_lightning").level


def test_the_test_images_are_read_once_after_the_last_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Epochs(pl.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            events.append("epoch")

    real = run_module.load_split

    def watched(path: Any, split: str, sound: Any) -> Any:
        events.append(split)
        return real(path, split, sound)

    monkeypatch.setattr(run_module, "load_split", watched)
    train(tiny_recipe(epochs=2), "digits", tmp_path, callbacks=[Epochs()], console=quiet())
    assert events == ["epoch", "epoch", "test"]


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"channels_last": True}, {"label_smoothing": 0.1}])
def test_other_arithmetic_runs(options: dict[str, Any], tmp_path: Path) -> None:
    result = short(tiny_recipe("learner", **options), tmp_path)
    assert result.recipe["training"].items() >= options.items()
    assert result.loss["train"][0] is not None
    assert load_checkpoint(tmp_path).model.conv1.weight.dtype == torch.float32  # type: ignore[union-attr]


def test_max_steps_bounds_the_steps(tmp_path: Path) -> None:
    result = short(tiny_recipe(epochs=3), tmp_path, max_steps=45)
    assert (result.data["epochs_run"], result.data["steps_run"]) == (2, 40)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_on_a_terminal_only(terminal: bool, tmp_path: Path) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, color_system=None, width=120)
    result = train(tiny_recipe(), "digits", tmp_path, console=console)
    if not terminal:
        assert shown.getvalue() == ""
        return
    last = [line for line in shown.getvalue().splitlines() if "tiny/dense" in line][-1]
    assert "20/20" in last
    assert f"epoch 1/1  loss {result.loss['train'][0]:.3f}" in last
    assert f"held-out {100 * result.accuracy.heldout[0]:.1f}%" in last


# ---- stopped ----


class Raises(pl.Callback):
    """Raises at the end of a step."""

    def __init__(self, error: BaseException, step: int = 2) -> None:
        self.error, self.step = error, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the disk is full")])
def test_a_stopped_run_leaves_a_usable_checkpoint(error: BaseException, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(type(error)):
        train(tiny_recipe("learner"), "digits", tmp_path, callbacks=[Raises(error)], console=quiet())
    assert not (tmp_path / "results.json").exists()
    assert load_checkpoint(tmp_path).config.metrics["stopped_at_step"] == 2
    assert evaluate_checkpoint(tmp_path, "digits", accelerator="cpu").images == 360
    assert "stopped at step 2" in (tmp_path / "train.log").read_text()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class Signals(pl.Callback):
    """Sends this process a signal when the training has ended, after the last look at signals."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_end(self, *_: Any) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_after_the_last_step_is_not_lost(number: int, error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        short(tiny_recipe(), tmp_path, callbacks=[Signals(number)])
    if error is SystemExit:
        assert caught.value.code == 143  # type: ignore[attr-defined]
    assert not (tmp_path / "results.json").exists()
    assert load_checkpoint(tmp_path).config.metrics["stopped_at_step"] == 2


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import pytorch_lightning as pl
from epitorch import cli
from epitorch.training import recipe, run
from run_helpers import tiny_recipe

class Slow(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            print("ready", flush=True)
        time.sleep(0.02)

real = run.train
run.train = lambda *a, **k: real(*a, callbacks=[Slow()], **k)
recipe.load_recipe = lambda name: tiny_recipe("learner", epochs=1000)
sys.exit(cli.main(["train", "any", "--data", "digits", "--out", {out!r}, "--accelerator", "cpu"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_command_between_steps(number: int, code: int, tmp_path: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent), out=str(tmp_path / "out"))
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()  # type: ignore[union-attr]
        time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out" / "results.json").exists()
    assert load_checkpoint(tmp_path / "out").config.metrics["stopped_at_step"] >= 2


def test_a_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                torch.nn.init.constant_(pl_module.model.classifier.bias, float("nan"))

    with pytest.raises(TrainingError, match="step 1 of epoch 0"):
        short(tiny_recipe(), tmp_path, callbacks=[Spoil()], max_steps=4)
    assert not (tmp_path / "results.json").exists()
    assert not (tmp_path / "checkpoint").exists()  # NaN weights are of no use
    assert "not finite any more" in (tmp_path / "train.log").read_text()


# ---- refused, before anything is written ----


def test_results_are_not_overwritten_unasked(tmp_path: Path) -> None:
    short(tiny_recipe(), tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(InputError, match="has an earlier run"):
        short(tiny_recipe("fixed"), tmp_path)
    with pytest.raises(DataError):  # with leave to overwrite, but wrong data
        train(tiny_recipe(), tmp_path / "nowhere", tmp_path, overwrite=True)
    assert (tmp_path / "results.json").read_bytes() == before
    short(tiny_recipe("fixed"), tmp_path, overwrite=True)
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["name"] == "tiny/fixed"
    assert len([path for path in (tmp_path / "logs").iterdir() if "events" in path.name]) == 1


def test_the_checkpoint_of_a_stopped_run_is_not_lost_to_the_next(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(), "digits", tmp_path, callbacks=[Raises(KeyboardInterrupt())], console=quiet())
    before = (tmp_path / "checkpoint" / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="has an earlier run"):
        short(tiny_recipe(), tmp_path)
    assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() == before


def test_files_of_the_users_own_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="has an earlier run"):
        short(tiny_recipe(), tmp_path)
    assert (tmp_path / "logs" / "mine.txt").read_text() == "mine"


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    refused = []

    class StartsAnother(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            with pytest.raises(InputError, match="another run is at work") as caught:
                short(tiny_recipe("fixed"), tmp_path, overwrite=True)
            refused.append(str(caught.value))

    train(tiny_recipe(), "digits", tmp_path, callbacks=[StartsAnother()], max_steps=2, console=quiet())
    assert str(tmp_path) in refused[0]
    assert json.loads((tmp_path / "results.json").read_text())["name"] == "tiny/" + tiny_recipe().name.split("/")[1]
    short(tiny_recipe("fixed"), tmp_path, overwrite=True)  # free again


@pytest.mark.parametrize(("option", "value"), [("seed", -1), ("seed", 2**63), ("max_steps", 0)])
def test_numbers_out_of_range_are_refused(option: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{option} is not valid"):
        train(tiny_recipe(), "digits", tmp_path / "run", console=quiet(), **{option: value})  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_test_images_of_other_classes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    load = run_module.load_split

    def reversed_classes(path: Any, split: str, sound: Any) -> Any:
        arrays = load(path, split, sound)
        return replace(arrays, classes=arrays.classes[::-1]) if split == "test" else arrays

    monkeypatch.setattr(run_module, "load_split", reversed_classes)
    with pytest.raises(DataError, match="other classes"):
        short(tiny_recipe(), tmp_path)
    assert not (tmp_path / "results.json").exists()


def test_an_impatient_second_interrupt_does_not_cost_the_checkpoint() -> None:
    stop = StopOnSignal()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        stop.saving = True
        signal.raise_signal(signal.SIGINT)  # ignored while saving
        stop.saving = False
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.received == signal.SIGINT


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="/proc"):
        short(tiny_recipe(), Path("/proc/nothing/here"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accelerator": "tpu"}, "unknown accelerator"),
        ({"max_steps": 0}, "max_steps is not valid"),
        ({"seed": -1}, "seed is not valid"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        short(tiny_recipe(), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_fp16_needs_cuda(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fp16 training needs CUDA"):
        short(tiny_recipe(precision="fp16"), tmp_path / "out", accelerator="cpu")


@pytest.mark.parametrize(
    "arguments", [{"num_classes": 7}, {"channels": 3}, {"widths": []}, {"nonsense": 1}], ids=lambda a: next(iter(a))
)
def test_a_model_that_does_not_fit_the_data(arguments: dict[str, Any], tmp_path: Path) -> None:
    from dataclasses import replace

    recipe = tiny_recipe()
    recipe = replace(recipe, model=replace(recipe.model, arguments=arguments))
    with pytest.raises(InputError):
        short(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_output_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("mine")
    with pytest.raises(InputError, match="cannot write to the output"):
        short(tiny_recipe(), path)
    assert path.read_text() == "mine"
