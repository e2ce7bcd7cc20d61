"""Every method meets its budget exactly, and what it writes is what it reads."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.peers.budgets import Budget
from benchmarks.peers.methods import METHODS, Task, code_lines, user_lines
from benchmarks.peers.methods.kmeans import load_shared, share_weights
from benchmarks.peers.networks import built
from benchmarks.peers.parts import PARTS, Part, part_named
from safetensors import safe_open
from torch import nn

import epitorch
from epitorch.training.recipe import parse_recipe
from epitorch.training.starting import first_model

needs_pruning = pytest.mark.skipif(
    importlib.util.find_spec("torch_pruning") is None, reason="torch-pruning is not installed"
)
needs_low_rank = pytest.mark.skipif(
    importlib.util.find_spec("tltorch") is None, reason="tensorly-torch is not installed"
)


def task(part: Part, kind: str, share: float, **others: Any) -> Task:
    example = torch.zeros(1, *part.shape)
    settings = {"start": Path("nowhere"), **others}
    return Task(part.base, part.arguments, part.init, example, Budget(kind, share), part.skip, 0, dict, **settings)


def cost_of_changes(asked: Task, changes: dict[str, Any]) -> int:
    sections = {"model": {"name": asked.base, "arguments": dict(asked.arguments)}, **changes}
    sound = {"sound": dict(PARTS["c"].recipe["sound"])} if asked.base == "epitorch:soundnet8" else {}
    recipe = parse_recipe({**sections, **sound, "training": {"epochs": 1, "peak_lr": 0.1}}, source="test")
    cost = epitorch.count(first_model(recipe, asked.example).model, asked.example)
    return cost.params if asked.budget.kind == "params" else cost.madds


def check(size: int, asked: Task) -> None:
    assert 0.97 * asked.limit <= size <= asked.limit


@pytest.mark.parametrize("share", [0.5, 0.25, 0.125])
@pytest.mark.parametrize(
    "name",
    ["width", "width-positions", "wsnet", "epitome", "epitome-positions", "epitome-fixed", "epitome-partial"],
)
def test_parameters_are_met(name: str, share: float) -> None:
    asked = task(PARTS["a"], "params", share)
    make = METHODS[name].changes
    assert make is not None
    check(cost_of_changes(asked, make(asked)), asked)


@pytest.mark.parametrize("name", ["width", "width-positions", "wsnet", "epitome"])
def test_multiply_adds_are_met(name: str) -> None:
    asked = task(PARTS["a"], "madds", 0.5)
    make = METHODS[name].changes
    assert make is not None
    check(cost_of_changes(asked, make(asked)), asked)


@needs_low_rank
@pytest.mark.parametrize("name", ["tucker", "tucker-positions"])
def test_low_rank_meets_its_budget(name: str) -> None:
    asked = task(PARTS["a"], "params", 0.25)
    prepare = METHODS[name].prepare
    assert prepare is not None
    check(asked.size(prepare(asked.dense(), asked)[0]), asked)


def test_the_limit_is_a_share_of_the_dense_network() -> None:
    dense = epitorch.count(PARTS["a"] and task(PARTS["a"], "own", 1.0).dense(), torch.zeros(1, 3, 32, 32))
    assert task(PARTS["a"], "params", 0.25).limit == dense.params // 4
    assert task(PARTS["a"], "madds", 0.25).limit == dense.madds // 4
    assert task(PARTS["a"], "bytes", 0.25, dense_bytes=1001).limit == 250


@pytest.mark.parametrize("name", ["width", "width-positions", "wsnet", "epitome", "epitome-positions"])
@pytest.mark.parametrize("share", [0.5, 0.125])
def test_sound_networks_meet_theirs(name: str, share: float) -> None:
    part = PARTS["c"]
    sound = {**part.recipe["sound"], "sample_rate": 8000, "clip_seconds": 0.5}
    asked = task(replace(part, recipe={**part.recipe, "sound": sound}), "params", share)
    make = METHODS[name].changes
    assert make is not None
    check(cost_of_changes(asked, make(asked)), asked)


def test_wsnet_on_sound_repeats_its_inputs_unshifted() -> None:
    part = PARTS["c"]
    asked = task(part, "params", 0.25)
    wsnet, epitome = METHODS["wsnet"].changes, METHODS["epitome"].changes
    assert wsnet is not None
    assert epitome is not None
    fixed = wsnet(asked)["epitome"]
    assert fixed["index"] == "fixed"
    assert all(layer["group_length"] == layer["epitome_shape"][1] for layer in fixed["layers"].values())
    assert "group_length" not in epitome(asked)["epitome"]["layers"]["conv5"]
    assert fixed["layers"]["conv7"]["epitome_shape"][:2] == [1, 512 // 4]


def test_shares_by_positions_keep_the_layers_on_large_maps() -> None:
    """Channels go with the fourth root of 256, 64 and 16 positions: 2, 1.4 and 1 times, none beyond its own number."""
    asked = task(PARTS["a"], "params", 0.25)
    made = METHODS["width-positions"].changes
    assert made is not None
    out = {name: layer["out"] for name, layer in made(asked)["model"]["arguments"]["layers"].items()}
    assert out["fc"] == 10
    assert out["layer1.0.conv1"] / 16 == pytest.approx(2 * out["layer3.0.conv1"] / 64, abs=0.05)
    assert out["layer2.0.conv1"] / 32 == pytest.approx(2**0.5 * out["layer3.0.conv1"] / 64, abs=0.05)


@pytest.mark.parametrize("name", ["width", "width-positions", "width-hidden"])
def test_narrow_mobilenets_meet_theirs(name: str) -> None:
    asked = task(PARTS["d"], "params", 0.25)
    make = METHODS[name].changes
    assert make is not None
    check(cost_of_changes(asked, make(asked)), asked)


def test_hidden_channels_alone_are_narrowed() -> None:
    make = METHODS["width-hidden"].changes
    assert make is not None
    arguments = make(task(PARTS["d"], "params", 0.25))["model"]["arguments"]
    assert arguments["hidden_width"] == arguments["last_width"] < 1


# ---- peers ----


def rebuilt(asked: Task, made: nn.Module, layers: dict[str, Any]) -> nn.Module:
    again = built(asked.base, asked.arguments, layers)
    again.load_state_dict(made.state_dict())
    return again


def outputs(model: nn.Module) -> torch.Tensor:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(x)


@needs_pruning
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind"), [("torch-pruning", "params"), ("torch-pruning-hidden", "madds")])
def test_pruned_networks_meet_the_budget_and_are_rebuilt(name: str, kind: str) -> None:
    torch.manual_seed(0)
    asked = task(PARTS["a"], kind, 0.5)
    prune = METHODS[name].prepare
    assert prune is not None
    made, layers = prune(asked.dense(), asked)
    check(asked.size(made), asked)
    torch.testing.assert_close(outputs(rebuilt(asked, made, layers)), outputs(made))
    whole = "layer1.0.conv2"
    assert (whole in layers) == (name == "torch-pruning" or layers[whole]["out"] == 16)


@needs_pruning
@pytest.mark.filterwarnings("ignore")
def test_pruning_takes_the_channels_of_least_magnitude() -> None:
    torch.manual_seed(0)
    asked = task(PARTS["a"], "params", 0.9)
    dense, prune = asked.dense(), METHODS["torch-pruning-hidden"].prepare
    assert prune is not None
    small = dense.get_submodule("layer3.2.conv1")
    small.weight.data[5] *= 0.01  # type: ignore[union-attr,operator]
    dense.get_submodule("layer3.2.conv2").weight.data[:, 5] *= 0.01  # type: ignore[union-attr,operator]
    kept = small.weight.detach().clone()
    made, _ = prune(dense, asked)
    after = made.get_submodule("layer3.2.conv1").weight
    assert not any(torch.equal(row, kept[5]) for row in after)
    assert any(torch.equal(row, kept[int(kept.flatten(1).norm(dim=1).argmax())]) for row in after)


@needs_low_rank
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind", "share"), [("tucker", "params", 0.25), ("cp", "params", 0.5)])
def test_low_rank_networks_meet_the_budget_and_are_rebuilt(name: str, kind: str, share: float) -> None:
    torch.manual_seed(0)
    asked = task(PARTS["a"], kind, share)
    factorize = METHODS[name].prepare
    assert factorize is not None
    made, layers = factorize(asked.dense(), asked)
    check(asked.size(made), asked)
    torch.testing.assert_close(outputs(rebuilt(asked, made, layers)), outputs(made))
    assert set(layers["layer1.0.conv1"]) == {name}
    assert "conv1" not in layers


@needs_low_rank
@pytest.mark.filterwarnings("ignore")
def test_singular_values_give_the_nearest_pair() -> None:
    from benchmarks.peers.methods.low_rank import _by_singular_values

    layer = nn.Conv2d(12, 20, 1, bias=True)
    x = torch.randn(1, 12, 3, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_by_singular_values(layer, 12)(x), layer(x), atol=1e-5, rtol=1e-4)
    halves = _by_singular_values(layer, 4)
    product = halves[1].weight.flatten(1) @ halves[0].weight.flatten(1)
    lost = torch.linalg.svdvals(layer.weight.detach().flatten(1))[4:].square().sum().sqrt()
    torch.testing.assert_close((product - layer.weight.flatten(1)).norm(), lost)


# ---- files ----


def trained() -> nn.Module:
    torch.manual_seed(0)
    return task(PARTS["a"], "own", 1.0).dense()


def dense_bytes() -> int:
    return 4 * sum(value.numel() for value in trained().state_dict().values())


@pytest.mark.parametrize("share", [0.25, 0.125])
def test_shared_weights_are_counted_as_stored(share: float, tmp_path: Path) -> None:
    asked = task(PARTS["a"], "bytes", share, dense_bytes=dense_bytes())
    model, file = share_weights(trained(), asked, tmp_path)
    check(file.stat().st_size, asked)
    again = load_shared(asked.dense(), file)
    assert torch.equal(outputs(again), outputs(model))
    assert not torch.equal(outputs(again), outputs(trained()))
    with safe_open(file, "pt") as opened:
        centres = {name[:-1]: opened.get_tensor(name) for name in opened.keys() if name.endswith("@")}  # noqa: SIM118
    for name, values in centres.items():
        assert set(again.state_dict()[name].unique().tolist()) <= set(values.tolist())
        assert len(values) <= 256


def test_each_weight_gets_its_nearest_centre(tmp_path: Path) -> None:
    asked = task(PARTS["a"], "bytes", 0.125, dense_bytes=dense_bytes())
    model, _ = share_weights(trained(), asked, tmp_path)
    old, new = (net.state_dict()["layer3.1.conv1.weight"].numpy().ravel() for net in (trained(), model))
    centres = np.unique(new)
    np.testing.assert_allclose(abs(old - new), abs(old[:, None] - centres).min(1), atol=1e-7)


@pytest.mark.filterwarnings("ignore")
def test_int8_files_run_and_are_small(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    samples = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    asked = replace(task(PARTS["a"], "own", 1.0), samples=lambda: samples)
    quantize = METHODS["int8"].finish
    assert quantize is not None
    model, file = quantize(trained(), asked, tmp_path)
    assert file.stat().st_size < 0.4 * dense_bytes()
    dense, small = outputs(trained()), outputs(model)
    assert 0 < float((dense - small).norm() / dense.norm()) < 0.2


# ---- what a user writes ----


def commented() -> int:
    """Two lines.

    No more.
    """
    # a comment

    values = [1, 2]
    return sum(values)


def test_lines_of_code_leave_out_what_is_said_about_it() -> None:
    assert code_lines(commented) == 3


def test_lines_of_a_recipe_count_where_there_is_no_code() -> None:
    changes = {"epitome": {"index": "direct", "budget": {"params": 1}}}
    assert user_lines(METHODS["epitome"], changes) == 3  # epitome:, index: direct, budget: {params: 1}
    assert user_lines(METHODS["dense"], {}) == 0
    assert user_lines(METHODS["kmeans"], {}) > 20


@pytest.mark.parametrize(
    "part", [*PARTS.values(), *(part_named(name, full=True) for name in PARTS)], ids=lambda p: p.name
)
def test_no_method_is_left_out_in_silence(part: Part) -> None:
    assert set(part.methods) | set(part.left_out) == set(METHODS) - {"start"}
    assert not set(part.methods) & set(part.left_out)
    assert 0 <= part.start_epochs <= part.epochs
