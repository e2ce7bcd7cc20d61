"""`starts.json`: how the starts of a run moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import KillAt, Killed, quiet, tiny_recipe

from epitorch.checkpoint import load_checkpoint
from epitorch.training.run import train
from epitorch.training.starts import MOST_MOMENTS, StartsLog

GROUPED = {"layers": {"conv3": {"epitome_shape": [8, 4, 4, 3], "spatial_starts": "grid", "channel_starts": "grid"}}}


def recorded(folder: Path) -> Any:
    return json.loads((folder / "starts.json").read_text())


def test_the_last_row_is_the_routing_map_that_was_kept(tmp_path: Path) -> None:
    train(tiny_recipe("direct", epochs=2, epitome=GROUPED), "digits", tmp_path, console=quiet())
    data = recorded(tmp_path)
    assert data["epochs"] == [0, 1, 2]
    assert list(data["layers"]) == ["conv3"]
    layer = load_checkpoint(tmp_path).model.get_submodule("conv3")
    rows, starts = data["layers"]["conv3"], layer.starts()  # type: ignore[operator]
    assert list(rows) == ["out", "in", "spatial0"]  # the second spatial axis is as long as the kernel
    for axis in ("out", "in"):
        torch.testing.assert_close(torch.tensor(rows[axis][-1]), starts[axis].flatten(), atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.tensor(rows["spatial0"][-1]), starts["spatial"].flatten(), atol=1e-3, rtol=0)
    assert rows["in"][0] != rows["in"][-1]


def test_a_dense_run_records_none(tmp_path: Path) -> None:
    train(tiny_recipe(None), "digits", tmp_path, console=quiet(), max_steps=1)
    assert not (tmp_path / "starts.json").exists()


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_that_goes_on_keeps_what_was_recorded(lost: bool, tmp_path: Path) -> None:
    recipe = tiny_recipe("learner", epochs=3, batch_size=256)
    train(recipe, "digits", tmp_path / "whole", console=quiet())
    options: dict[str, Any] = {"console": quiet(), "checkpoint_steps": 1}
    with pytest.raises(Killed):
        train(recipe, "digits", tmp_path / "cut", callbacks=[KillAt(step=9)], **options)
    assert recorded(tmp_path / "cut")["epochs"] == [0, 1]
    if lost:
        (tmp_path / "cut" / "starts.json").write_text("damaged")
    train(recipe, "digits", tmp_path / "cut", **options)
    whole, cut = recorded(tmp_path / "whole"), recorded(tmp_path / "cut")
    assert cut["epochs"] == ([2, 3] if lost else [0, 1, 2, 3])
    for name, axes in whole["layers"].items():
        for axis, rows in axes.items():
            assert cut["layers"][name][axis] == rows[-len(cut["epochs"]) :]


def test_rows_after_the_saved_state_are_dropped(tmp_path: Path) -> None:
    class Trainer:
        global_step, current_epoch, max_epochs = 5, 1, 3

    data = {"format": 1, "epochs": [0, 1, 2], "layers": {"a": {"out": [[0.0], [1.0], [2.0]]}}}
    (tmp_path / "starts.json").write_text(json.dumps(data))
    log = StartsLog(tmp_path / "starts.json")
    log.on_train_start(Trainer(), None)  # type: ignore[arg-type]
    assert log.rows == {0: {"a": {"out": [0.0]}}, 1: {"a": {"out": [1.0]}}}


def test_a_long_run_records_some_epochs_and_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        global_step, current_epoch, max_epochs = 0, 0, 3 * MOST_MOMENTS + 2

    log, trainer, asked = StartsLog(tmp_path / "starts.json"), Trainer(), []
    monkeypatch.setattr(log, "_record", lambda epoch, module: asked.append(epoch))
    log.on_train_start(trainer, None)  # type: ignore[arg-type]
    for trainer.current_epoch in range(trainer.max_epochs):  # noqa: B020
        log.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    assert asked[:3] == [0, 4, 8]
    assert asked[-1] == trainer.max_epochs
    assert len(asked) <= MOST_MOMENTS + 2
