"""A run that was ended at any moment goes on to the same final weights, bit by bit."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from run_helpers import KillAt, Killed, quiet, rank_free_recipe, tiny_recipe
from safetensors.torch import load_file

from epitorch.checkpoint import load_checkpoint
from epitorch.errors import CheckpointError, InputError, TrainingError
from epitorch.results import RunResult
from epitorch.training.recipe import Recipe
from epitorch.training.run import train
from epitorch.training.state import AtomicCheckpointIO

STATE = "lightning/last.ckpt"


def everything(index: str = "learner") -> Recipe:
    """Whatever draws random numbers or keeps a state of its own, in one recipe: 3 epochs of 6 steps of 2 batches."""
    return rank_free_recipe(
        index,
        epochs=3,
        dropout=0.2,
        epitome={"freeze_last_epochs": 1},
        batch_size=100,
        accumulate=2,
        optimizer="rmsproptf",
        peak_lr=0.01,
        schedule="step",
        warmup_epochs=0.5,
        decay_epochs=0.7,
        decay_rate=0.8,
        ema_decay=0.9,
        mixup=0.2,
        cutmix=1.0,
        label_smoothing=0.1,
    )


def run(recipe: Recipe, out: Path, **options: Any) -> RunResult:
    return train(recipe, "digits", out, **{"console": quiet(), "accelerator": "cpu", **options})


def weights(out: Path) -> dict[str, bytes]:
    """Every tensor of the final checkpoint, bit by bit."""
    tensors = load_file(out / "checkpoint" / "model.safetensors")
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def log(out: Path) -> str:
    return (out / "train.log").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunResult, dict[str, bytes]]]:
    """The uninterrupted runs."""
    made = {}
    for index in ("learner", "direct"):
        out = tmp_path_factory.mktemp(index)
        made[index] = (run(everything(index), out), weights(out))
    return made


@pytest.mark.parametrize(
    ("index", "kill", "every"),
    [
        ("learner", {"step": 2}, 1),
        ("learner", {"step": 5}, 1),
        ("learner", {"step": 9}, 4),  # the state is older than the moment
        ("learner", {"step": 6}, 1),  # the last step of an epoch
        ("learner", {"heldout": 1}, 2),  # while the held-out images are evaluated
        ("learner", {"step": 15}, 2),  # the map is frozen
        ("direct", {"step": 15}, 2),  # frozen starts are parameters
        ("direct", {"step": 10}, None),  # states at the ends of epochs only
        ("learner", {"step": 18}, None),
    ],
)
def test_the_rest_gives_the_same_numbers(
    index: str, kill: dict[str, int], every: int | None, whole: Any, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        run(everything(index), tmp_path, callbacks=[KillAt(**kill)], checkpoint_steps=every)
    assert not (tmp_path / "results.json").exists()
    assert (tmp_path / STATE).is_file()
    result = run(everything(index), tmp_path)
    assert "goes on with the unfinished run" in log(tmp_path)
    assert weights(tmp_path) == whole[index][1]
    expected = whole[index][0]
    assert result.loss == expected.loss
    assert result.accuracy == expected.accuracy
    assert len(result.seconds.epochs) == len(result.seconds.epochs_training) == 3


def test_twice_interrupted(whole: Any, tmp_path: Path) -> None:
    for step in (4, 13):
        with pytest.raises(Killed):
            run(everything(), tmp_path, callbacks=[KillAt(step)], checkpoint_steps=1)
    run(everything(), tmp_path)
    assert weights(tmp_path) == whole["learner"][1]


def test_another_seed_of_the_rest_would_show(whole: Any, tmp_path: Path) -> None:
    """The negative control: one batch of other random numbers changes the final weights."""

    class Disturb(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                torch.manual_seed(1)  # dropout of this batch

    run(everything(), tmp_path, callbacks=[Disturb()])
    assert weights(tmp_path) != whole["learner"][1]


def test_random_numbers_drawn_by_others_change_nothing(whole: Any, tmp_path: Path) -> None:
    class Draws(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            torch.rand(3)

    run(everything(), tmp_path, callbacks=[Draws()])
    assert weights(tmp_path) == whole["learner"][1]


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import pytorch_lightning as pl
from epitorch import cli
from epitorch.training import recipe, run
from test_resume import everything

class Waits(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == {step}:
            print("ready", flush=True)
            sys.stdin.readline()

real = run.train
run.train = lambda *a, **k: real(*a, callbacks=[Waits()], **k)
recipe.load_recipe = lambda name: everything()
sys.exit(cli.main("train any --data digits --accelerator cpu --checkpoint-steps 2 --out".split() + [{out!r}]))
"""


def test_killed_by_the_system_in_the_middle_of_an_epoch(whole: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = SCRIPT.format(tests=str(Path(__file__).parent), out=str(out), step=9)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()  # type: ignore[union-attr]
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "results.json").exists()
    assert AtomicCheckpointIO().load_checkpoint(out / STATE)["global_step"] == 8
    run(everything(), out)
    assert weights(out) == whole["learner"][1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_state_of_that_step(number: int, whole: Any, tmp_path: Path) -> None:
    class Signals(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if (trainer.current_epoch, batch_idx) == (1, 2):  # the first of the two batches of step 7
                os.kill(os.getpid(), number)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(everything(), tmp_path, callbacks=[Signals()])
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / STATE)["global_step"] == 8  # that step is done first
    assert "the same command goes on from the state of step 8" in log(tmp_path)
    run(everything(), tmp_path)
    assert weights(tmp_path) == whole["learner"][1]


# ---- which runs go on ----


def stopped(out: Path, **options: Any) -> None:
    with pytest.raises(Killed):
        run(tiny_recipe(), out, callbacks=[KillAt(2)], checkpoint_steps=1, **options)


@pytest.mark.parametrize("options", [{"seed": 1}, {"max_steps": 5}, {"recipe": tiny_recipe("fixed")}])
def test_another_run_does_not_go_on_in_the_folder(options: dict[str, Any], tmp_path: Path) -> None:
    stopped(tmp_path)
    before = (tmp_path / STATE).read_bytes()
    recipe = options.pop("recipe", tiny_recipe())
    with pytest.raises(InputError, match="an unfinished run of this recipe, fold, seed, data"):
        run(recipe, tmp_path, **options)
    assert (tmp_path / STATE).read_bytes() == before


def test_overwrite_begins_anew(tmp_path: Path) -> None:
    stopped(tmp_path)
    run(tiny_recipe(), tmp_path, overwrite=True)
    assert "goes on" not in log(tmp_path)


def test_a_run_without_a_state_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tiny_recipe(), tmp_path, callbacks=[KillAt(2)])
    assert not (tmp_path / STATE).exists()
    run(tiny_recipe(), tmp_path)
    assert "goes on" not in log(tmp_path)
    with pytest.raises(InputError, match="has an earlier run"):  # and a finished one is left alone
        run(tiny_recipe(), tmp_path)


def test_a_run_killed_before_its_results_is_evaluated_only(tmp_path: Path) -> None:
    run(tiny_recipe(), tmp_path)
    before = weights(tmp_path)
    result = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").unlink()
    again = run(tiny_recipe(), tmp_path)
    assert weights(tmp_path) == before
    assert again.accuracy.test == result["accuracy"]["test"]


def test_metrics_of_both_parts_are_kept(tmp_path: Path) -> None:
    recipe = tiny_recipe(epochs=3)
    with pytest.raises(Killed):
        run(recipe, tmp_path, callbacks=[KillAt(50)])
    run(recipe, tmp_path)
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        epochs = [int(float(row["epoch"])) for row in csv.DictReader(file) if row["epoch"]]
    assert epochs == [1, 2, 3]


# ---- what goes wrong ----


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    stopped(tmp_path)
    (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"last\.ckpt") as caught:
        run(tiny_recipe(), tmp_path)
    assert "--overwrite" in str(caught.value)


def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"a": torch.ones(3)}, path)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        writer.save_checkpoint({"a": torch.zeros(3)}, path)
    assert torch.equal(writer.load_checkpoint(path)["a"], torch.ones(3))
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


class Limit(pl.Callback):
    """From a step on, the system lets no file grow beyond a size: as on a full disk, writing fails."""

    def __init__(self, step: int, size: int) -> None:
        self.step, self.size = step, size

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_disk_that_takes_no_more_is_reported_and_the_last_state_stays(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    recipe = tiny_recipe(epochs=2)
    try:
        with pytest.raises(TrainingError, match="could not be written at step 6") as caught:
            run(recipe, tmp_path, callbacks=[Limit(4, 6000)], checkpoint_steps=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the state of step 3 is still there" in str(caught.value)
    assert "last.ckpt" in str(caught.value)
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / STATE)["global_step"] == 3
    assert not list(tmp_path.rglob("*.tmp"))
    run(recipe, tmp_path)  # room again
    assert load_checkpoint(tmp_path).config.metrics["test_accuracy"] > 0


def test_a_loss_that_is_not_finite_keeps_the_state_before(tmp_path: Path) -> None:
    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                torch.nn.init.constant_(pl_module.model.classifier.bias, float("nan"))

    with pytest.raises(TrainingError, match="step 5 of epoch 0"):
        run(tiny_recipe(), tmp_path, callbacks=[Spoil()], checkpoint_steps=2)
    kept = AtomicCheckpointIO().load_checkpoint(tmp_path / STATE)
    assert kept["global_step"] == 4
    assert all(torch.isfinite(value).all() for value in kept["state_dict"].values())
    assert "goes on from the state of step 4" in log(tmp_path)


def test_spoilt_weights_do_not_replace_a_good_state(tmp_path: Path) -> None:
    class SpoilAfter(pl.Callback):
        """After a step whose loss was fine, before the state is written."""

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                torch.nn.init.constant_(pl_module.model.classifier.bias, float("inf"))

    with pytest.raises(TrainingError, match="after step 3 of epoch 0"):
        run(tiny_recipe(), tmp_path, callbacks=[SpoilAfter()], checkpoint_steps=2)
    kept = AtomicCheckpointIO().load_checkpoint(tmp_path / STATE)
    assert kept["global_step"] == 2
    assert all(torch.isfinite(value).all() for value in kept["state_dict"].values())
