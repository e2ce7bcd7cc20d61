from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epitorch
from epitorch.cost import count
from epitorch.errors import ConversionError, InputError
from epitorch.models.audio import CONFIGURATIONS, SoundNet8, soundnet8, soundnet8_plan, wsnet_plan
from epitorch.models.resolve import build_model
from epitorch.nn import EpitomeConv1d
from epitorch.plans import planned_params
from epitorch.training.plans import recipe_plan
from epitorch.training.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEP = {1: 8, 2: 8, 3: 8, 4: 8, 5: 4, 6: 4, 7: 4, 8: 8}  # kernel / S in both configurations


def literal(net: SoundNet8, x: Tensor) -> Tensor:
    """The network in eval mode, written out from SoundNet's table."""
    state = net.state_dict()
    pools = {1: 8, 2: 8, 5: 4}
    for i, padding in enumerate((32, 16, 8, 4, 2, 2, 2), start=1):
        x = F.conv1d(x, state[f"conv{i}.weight"], stride=2, padding=padding)
        mean, var = state[f"norm{i}.running_mean"][:, None], state[f"norm{i}.running_var"][:, None]
        x = (x - mean) / (var + 1e-5).sqrt() * state[f"norm{i}.weight"][:, None] + state[f"norm{i}.bias"][:, None]
        x = x.clamp_min(0)
        if i in pools:
            x = F.max_pool1d(x, pools[i], ceil_mode=True)
    x = F.conv1d(x, state["conv8.weight"], state["conv8.bias"], stride=2, padding=4)
    return x.sum(-1) / x.shape[-1]


@torch.no_grad()
def test_the_network_is_the_one_of_the_table() -> None:
    net = soundnet8(7)
    x = torch.randn(3, 1, 9000)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0
    net(x)  # fresh statistics would let the signal vanish
    torch.testing.assert_close(net.eval()(x), literal(net, x), rtol=1e-4, atol=1e-5)
    before = net(x)
    net.conv5.weight.mul_(1.5)
    assert not torch.allclose(net(x), before, rtol=1e-3)


def test_parameters_and_multiply_adds_of_a_five_second_clip() -> None:
    net = build_model("epitorch:soundnet8", {"num_classes": 10})
    convolutions = [16 * 64, 32 * 32 * 16, 64 * 16 * 32, 128 * 8 * 64, 256 * 4 * 128, 512 * 4 * 256, 1024 * 4 * 512]
    norms = 2 * (16 + 32 + 64 + 128 + 256 + 512 + 1024)
    assert sum(p.numel() for p in net.parameters()) == sum(convolutions) + 10 * 8 * 1024 + 10 + norms
    assert 0.14e9 < count(net, torch.zeros(1, 1, 110_250)).madds < 0.15e9


@pytest.mark.parametrize("samples", [2048, 2049, 33_075])
def test_any_length_is_taken(samples: int) -> None:
    assert soundnet8(4).eval()(torch.randn(2, 1, samples)).shape == (2, 4)


@pytest.mark.parametrize("shape", [(1, 2, 4000), (1, 4000), (1, 1, 2047), (1, 1, 1, 4000)])
def test_what_is_no_waveform_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="waveforms of shape"):
        soundnet8(4)(torch.zeros(shape))


@pytest.mark.parametrize("classes", [0, -1, 2.0, True])
def test_a_wrong_number_of_classes_is_refused(classes: object) -> None:
    with pytest.raises(InputError, match="num_classes"):
        soundnet8(classes)  # type: ignore[arg-type]


# ---- WSNet ----


def wsnet_weight(epitome: Tensor, step: int, shape: tuple[int, ...]) -> Tensor:
    """Filter r is the window at r * step, half a step along, channels repeated; every number by itself."""
    weight = torch.zeros(shape)
    _, channels, length = epitome.shape
    for r in range(shape[0]):
        for c in range(shape[1]):
            for k in range(shape[2]):
                weight[r, c, k] = epitome[0, c % channels, (r * step + step // 2 + k) % length]
    return weight


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_weights_of_wsnet_are_windows_repeated_along_the_channels(number: int) -> None:
    model = soundnet8(10)
    epitorch.convert_(model, wsnet_plan(model, "printed"))
    layer = dict(model.named_modules())[f"conv{number}"]
    assert isinstance(layer, EpitomeConv1d)
    shape = tuple(layer.weight.shape)
    shape = (min(shape[0], 20), min(shape[1], 300), shape[2])  # loops are slow
    want = wsnet_weight(layer.epitome.detach(), STEP[number], shape)
    torch.testing.assert_close(layer.weight.detach()[: shape[0], : shape[1]], want, rtol=0, atol=0)
    wrong = wsnet_weight(layer.epitome.detach(), STEP[number] + 1, shape)
    assert not torch.allclose(layer.weight.detach()[: shape[0], : shape[1]], wrong)


def test_wsnet_learns_no_starts_but_every_epitome() -> None:
    model = soundnet8(10)
    epitorch.convert_(model, wsnet_plan(model))
    model(torch.randn(2, 1, 4000)).square().sum().backward()
    layers = [layer for layer in model.modules() if isinstance(layer, EpitomeConv1d)]
    assert len(layers) == 8
    assert all(layer.epitome.grad is not None and layer.epitome.grad.abs().sum() > 0 for layer in layers)
    assert all(layer.learner is None and not list(layer.routing_map.parameters()) for layer in layers)


@pytest.mark.parametrize("classes, config, ratio", [(10, "4x", 3.91), (10, "printed", 7.09), (50, "printed", 7.17)])
def test_ratios_of_the_configurations(classes: int, config: str, ratio: float) -> None:
    """The table says 4x: C = 8 in the last three layers, as printed, cannot give it; C = 4 does."""
    model = soundnet8(classes)
    plan = soundnet8_plan(model, config)
    dense = sum(model.get_submodule(name).weight.numel() for name in plan.layers)  # type: ignore[union-attr]
    kept = sum(torch.Size(layer.epitome_shape).numel() for layer in plan.layers.values())
    assert dense / kept == pytest.approx(ratio, abs=0.01)
    for i, (along, across) in CONFIGURATIONS[config].items():
        weight = model.get_submodule(f"conv{i}").weight
        epitome = torch.Size(plan.layers[f"conv{i}"].epitome_shape).numel()
        assert weight.numel() == along * across * epitome  # type: ignore[union-attr, operator]


# ---- epitomes ----


@pytest.mark.parametrize("index", ["learner", "direct"])
def test_starts_begin_as_wsnets_half_a_step_along_and_are_learned(index: str) -> None:
    model = soundnet8(10)
    epitorch.convert_(model, soundnet8_plan(model, index=index))  # type: ignore[arg-type]
    model.train()(torch.randn(2, 1, 4000)).square().sum().backward()
    for i, step in STEP.items():
        layer = model.get_submodule(f"conv{i}")
        assert isinstance(layer, EpitomeConv1d)
        starts = layer.starts()["spatial"][:, 0]
        want = torch.arange(len(starts)) * float(step) + step / 2
        torch.testing.assert_close(starts, want, rtol=1e-4, atol=1e-3)
        learned = layer.learner.head.bias if layer.learner else layer.starts()["spatial"]
        assert learned.grad is not None
        assert learned.grad.abs().sum() > 0


def test_turning_the_epitome_back_gives_the_starts_from_zero() -> None:
    """Why half a step changes nothing but the place of 0."""
    model = soundnet8(10)
    epitorch.convert_(model, wsnet_plan(model))
    layer = model.conv4
    assert isinstance(layer, EpitomeConv1d)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.starts()["spatial"].sub_(STEP[4] / 2)
        assert layer.starts()["spatial"][0] == 0
        assert not torch.allclose(layer.weight, before)
        layer.epitome.copy_(layer.epitome.roll(-(STEP[4] // 2), -1))
    torch.testing.assert_close(layer.weight.detach(), before)


@pytest.mark.parametrize("further", [2.35, 3.16, 1000.0])
def test_further_compression_is_uniform_and_keeps_filters_apart(further: float) -> None:
    model = soundnet8(10)
    first, plan = soundnet8_plan(model), soundnet8_plan(model, further=further)
    for name, layer in plan.layers.items():
        kernel = model.get_submodule(name).kernel_size[0]  # type: ignore[index, union-attr]
        longest = first.layers[name].epitome_shape[2] / further
        assert kernel <= layer.epitome_shape[2] < max(kernel, longest) + 1
        assert layer.epitome_shape[:2] == first.layers[name].epitome_shape[:2]
    epitorch.convert_(model, plan)
    for name in plan.layers:
        weight = model.get_submodule(name).weight  # type: ignore[union-attr]
        assert len(torch.unique(weight[:4].flatten(1), dim=0)) == 4  # type: ignore[index]
    if further < 1000:
        ratio = planned_params(soundnet8(10), first) / planned_params(soundnet8(10), plan)
        assert further * 0.9 < ratio < further


@torch.no_grad()
@pytest.mark.parametrize("kind", ["wsnet", "epitome"])
def test_deployed_networks_compute_the_same(kind: str) -> None:
    model = soundnet8(3)
    epitorch.convert_(model, wsnet_plan(model) if kind == "wsnet" else soundnet8_plan(model, further=2.35))
    x = torch.randn(2, 1, 4000)
    model.train()(x)
    model.eval()
    deployed = epitorch.deploy(model, x)
    torch.testing.assert_close(deployed(x), model(x), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(deployed(x.roll(1, -1)), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("further", [0.5, 0.0, float("nan")])
def test_an_epitome_is_not_made_longer(further: float) -> None:
    with pytest.raises(ConversionError, match="1 or more"):
        soundnet8_plan(soundnet8(10), further=further)


def test_other_models_and_configurations_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"unknown configuration.*did you mean 'printed'"):
        wsnet_plan(soundnet8(10), "printd")
    with pytest.raises(ConversionError, match=r"(?s)another model.*Sequential"):
        wsnet_plan(nn.Sequential(nn.Conv1d(1, 1, 3)))
    converted = soundnet8(10)
    epitorch.convert_(converted, wsnet_plan(converted))
    with pytest.raises(ConversionError, match="another model"):
        soundnet8_plan(converted)


# ---- recipes ----

ROWS = {
    "wsnet-4x": ("wsnet", "4x", 1.0),
    "wsnet-printed": ("wsnet", "printed", 1.0),
    "epitome-4x": ("learner", "4x", 1.0),
    "epitome-4x-direct": ("direct", "4x", 1.0),
    "epitome-printed": ("learner", "printed", 1.0),
    "epitome-4x-2.35x": ("learner", "4x", 2.35),
    "epitome-4x-3.16x": ("learner", "4x", 3.16),
}


@pytest.mark.parametrize("folder, classes", [("esc10", 10), ("esc50", 50)])
@pytest.mark.parametrize("row", [*ROWS, "baseline"])
def test_recipes_say_what_the_plans_say(folder: str, classes: int, row: str) -> None:
    recipe = load_recipe(RECIPES / folder / f"{row}.yaml")
    model = build_model(recipe.model.name, recipe.model.arguments)
    assert recipe.model.arguments == {"num_classes": classes}
    if row == "baseline":
        assert recipe.epitome is None
        return
    kind, config, further = ROWS[row]
    assert recipe.epitome is not None
    got = recipe_plan(model, recipe.epitome, torch.zeros(1, 1, 4000)).layers
    plan = soundnet8_plan(model, config, further=further, index="fixed" if kind == "wsnet" else kind)  # type: ignore[arg-type]
    want = wsnet_plan(model, config).layers if kind == "wsnet" else plan.layers
    forms = {name: (layer.form(), layer.spec(model.get_submodule(name)), layer.index) for name, layer in got.items()}
    assert forms == {n: (layer.form(), layer.spec(model.get_submodule(n)), layer.index) for n, layer in want.items()}


@pytest.mark.parametrize("folder", ["esc10", "esc50"])
def test_rows_of_a_table_differ_in_the_epitomes_only(folder: str) -> None:
    recipes = [load_recipe(file) for file in sorted((RECIPES / folder).glob("*.yaml"))]
    assert {recipe.name for recipe in recipes} == {f"{folder}/{row}" for row in [*ROWS, "baseline"]}
    for recipe in recipes[1:]:
        assert (recipe.model, recipe.data, recipe.sound) == (recipes[0].model, recipes[0].data, recipes[0].sound)
        assert recipe.training == recipes[0].training
