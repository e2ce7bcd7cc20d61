"""The moving average of the weights, of epitome layers too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from run_helpers import quiet, tiny_recipe
from safetensors.torch import load_file
from torch import nn

from epitorch.nn import EpitomeConv2d, EpitomeLayer
from epitorch.training.averaging import WeightAverage
from epitorch.training.run import train

DECAY = 0.75


def network(index: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        EpitomeConv2d(3, 8, 3, epitome_shape=(4, 3, 3, 3), index=index, momentum=0.5),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    )


def walk(model: nn.Sequential, average: WeightAverage, steps: int) -> list[dict[str, Any]]:
    """Train with large steps of the starts; return the states that the average took in."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    states = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        average.update(model)
        states.append(copy.deepcopy(model.state_dict()))
    return states


def by_hand(states: list[dict[str, Any]], name: str) -> torch.Tensor:
    value = states[0][name].double()
    for state in states[1:]:
        value = DECAY * value + (1 - DECAY) * state[name].double()
    return value


@pytest.mark.parametrize("index", ["learner", "direct", "fixed"])
def test_every_floating_tensor_is_averaged_and_counters_are_copied(index: str) -> None:
    model = network(index)
    average = WeightAverage(model, DECAY)
    states = walk(model, average, 5)
    result = average.model.state_dict()
    assert result.keys() == states[-1].keys()
    for name, value in result.items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), by_hand(states, name), rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(value, states[-1][name])
    assert result["1.num_batches_tracked"] == 5
    assert not torch.allclose(result["0.epitome"], states[-1]["0.epitome"], rtol=1e-3)
    moved = not torch.allclose(states[0]["0.routing_map.out_starts"], states[-1]["0.routing_map.out_starts"])
    assert moved is (index != "fixed")


def test_the_average_generates_its_weight_from_its_own_epitome_and_map() -> None:
    model = network("learner")
    average = WeightAverage(model, DECAY)
    walk(model, average, 3)
    layer, twin = average.model[0], copy.deepcopy(model[0])  # type: ignore[index]
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.weight, twin.weight, rtol=0, atol=0)
    assert not torch.allclose(layer.weight, model[0].weight, rtol=1e-3)


@pytest.mark.parametrize("snap", [False, True])
@pytest.mark.parametrize("index", ["learner", "direct"])
def test_a_frozen_map_is_taken_over_as_it_is(index: str, snap: bool) -> None:
    model = network(index)
    average = WeightAverage(model, DECAY)
    walk(model, average, 4)
    layer = model[0]
    layer.snap_routing() if snap else layer.freeze_routing()
    walk(model, average, 2)
    copied = average.model[0]  # type: ignore[index]
    assert copied.routing_map.is_frozen
    assert bool(copied.routing_map.frozen)
    for axis, value in layer.starts().items():
        assert torch.equal(copied.starts()[axis], value)
        assert bool((value == value.round()).all()) is snap


def test_the_average_is_what_a_run_evaluates_and_keeps(tmp_path: Path) -> None:
    class Rebuild(pl.Callback):
        """The average once more, from the weights after each step."""

        def __init__(self) -> None:
            self.states: list[dict[str, Any]] = []

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step > len(self.states):
                self.states.append(copy.deepcopy(pl_module.model.state_dict()))

    rebuild = Rebuild()
    recipe = tiny_recipe("learner", ema_decay=DECAY, accumulate=2, channels_last=False)
    result = train(recipe, "digits", tmp_path, callbacks=[rebuild], console=quiet(), accelerator="cpu")
    assert len(rebuild.states) == 10
    kept = load_file(tmp_path / "checkpoint" / "model.safetensors")
    for name, value in kept.items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), by_hand(rebuild.states, name), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(kept["conv2.epitome"], rebuild.states[-1]["conv2.epitome"], rtol=1e-3)
    plain = train(
        tiny_recipe("learner", accumulate=2, channels_last=False),
        "digits",
        tmp_path / "plain",
        console=quiet(),
        accelerator="cpu",
    )
    assert result.loss["train"] == plain.loss["train"]  # training itself is not touched
    assert result.loss["heldout"] != plain.loss["heldout"]


def test_a_run_s_average_follows_the_frozen_map(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            pairs = zip(pl_module.model.modules(), pl_module.kept.modules(), strict=True)
            seen.extend((own, other) for own, other in pairs if isinstance(own, EpitomeLayer))

    recipe = tiny_recipe("learner", epochs=2, ema_decay=0.9, epitome={"freeze_last_epochs": 1, "snap": True})
    result = train(recipe, "digits", tmp_path, callbacks=[Look()], console=quiet(), accelerator="cpu")
    assert len(seen) == 2
    for own, other in seen:
        assert own is not other
        assert other.routing_map.is_frozen
        for axis, value in own.starts().items():
            assert torch.equal(other.starts()[axis], value)
    assert result.accuracy.test_learner is None
