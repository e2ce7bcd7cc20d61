"""`deploy`: whole models in both strategies, the report, the parity guard, and what must stay as it was."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch import deploy
from epitorch.cost import Reason, count
from epitorch.deploy import Deployment, ParityError
from epitorch.deploy.reuse_layers import ReuseConv, ReuseLayer
from epitorch.errors import ConversionError, InputError, StartsError
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan
from epitorch.nn import EpitomeConv2d, EpitomeLayer, EpitomeLinear, IndexLearner
from epitorch.plans import LayerPlan, Plan

STRATEGIES = ("dense", "reuse")


def relative(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """MobileNetV2 at c = 0.18 after a few training passes: moved starts, running statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = mobilenetv2(10, cifar=True, stem_stride=2)
        epitorch.convert_(model, mobilenetv2_plan(model, 0.18, last_conv=True))
        for layer in model.modules():
            if isinstance(layer, EpitomeLayer):
                layer.set_starts(
                    {
                        axis: value + 2 * torch.rand_like(value) - 1 if value.numel() else value
                        for axis, value in layer.starts().items()
                    }
                )
        with torch.no_grad():
            for _ in range(2):
                model(torch.randn(4, 3, 32, 32))
    return model.train()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_mobilenetv2(trained: nn.Module, strategy: Any, dtype: torch.dtype, tolerance: float) -> None:
    model = copy.deepcopy(trained).to(dtype)
    net = deploy(model, torch.randn(1, 3, 32, 32, dtype=dtype), strategy)
    x = torch.randn(4, 3, 32, 32, dtype=dtype)  # other images than the example
    with torch.no_grad():
        expected = model.eval()(x)
        assert relative(expected, net(x)) < tolerance
        for layer in net.modules():  # negative control
            if isinstance(layer, ReuseLayer):
                layer.epitome.mul_(1.01)
            elif isinstance(layer, nn.Conv2d):
                layer.weight.mul_(1.01)
        assert relative(expected, net(x)) > 100 * tolerance


def test_reuse_runs_every_compressed_layer_on_its_epitome(trained: nn.Module) -> None:
    net: Any = deploy(trained, torch.zeros(1, 3, 32, 32), "reuse")
    layers = {layer.name: layer.strategy for layer in net.deployment.layers}
    assert layers["features.2.conv.0.0"] == layers["features.18.0"] == "product_map"
    assert layers["features.2.conv.2"] == "wrapping"
    assert len(layers) == 33
    assert net.deployment.folded == ()
    kept = sum(value.numel() for value in net.state_dict().values() if value.is_floating_point())
    statistics = sum(b.numel() for n, b in trained.named_buffers() if "running_" in n)
    assert kept == count(trained, torch.zeros(1, 3, 32, 32)).params + statistics


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_learner_and_no_epitome_layer_is_left(trained: nn.Module, strategy: Any) -> None:
    net = deploy(trained, torch.zeros(1, 3, 32, 32), strategy)
    assert not any(isinstance(module, EpitomeLayer | IndexLearner) for module in net.modules())
    assert not any("learner" in key for key in net.state_dict())
    assert not any(module.training for module in net.modules())
    if strategy == "dense":
        assert set(net.state_dict()) == set(mobilenetv2(10, cifar=True).state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trained_model_stays_as_it_was(strategy: Any) -> None:
    model = nn.Sequential(EpitomeConv2d(3, 16, 3, epitome_shape=(4, 3, 3, 3)), nn.BatchNorm2d(16)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    net = deploy(model, torch.randn(2, 3, 5, 5, generator=torch.Generator()), strategy)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(module.training for module in model.modules())
    assert isinstance(model[0], EpitomeConv2d)
    assert model[0].learner is not None
    assert not model[0].routing_map.is_frozen
    assert torch.equal(torch.get_rng_state(), random)


def test_state_of_a_deployed_model_loads_into_the_trained_architecture() -> None:
    def build() -> nn.Module:
        return nn.Sequential(EpitomeConv2d(3, 16, 3, epitome_shape=(4, 3, 3, 3)), nn.BatchNorm2d(16))

    model, other, x = build(), build().eval(), torch.randn(2, 3, 5, 5)
    net = deploy(model, x)
    other.load_state_dict(net.state_dict(), strict=True)
    assert other[0].learner is None
    torch.testing.assert_close(other(x), model.eval()(x))


# ---- folding and its reasons ----

FOLDED = [
    ({"epitome_shape": (8, 8, 4, 4), "spatial_starts": "out"}, "no saving"),
    ({"epitome_shape": (8, 4, 4, 4), "channel_starts": "grid"}, "channel starts on pairs of blocks"),
    ({"epitome_shape": (8, 4, 3, 3), "channel_starts": "grid"}, "channel starts on pairs of blocks"),
    ({"epitome_shape": (16, 40), "flatten_kernel": True}, "flattened kernel mixes channels and space"),
    ({"epitome_shape": (16, 8, 2, 2), "spatial_starts": "in"}, "no saving"),
    ({"epitome_shape": (20, 8, 3, 3)}, "axis not compressed"),
    ({"epitome_shape": (12, 1, 3, 3), "groups": 8}, "groups need as many channels as the layer has"),
]


@pytest.mark.parametrize("options, reason", FOLDED)
def test_what_does_not_apply_is_folded_and_listed(options: dict[str, Any], reason: str) -> None:
    model = nn.Sequential(EpitomeConv2d(8, 16, 3, **options), nn.ReLU())
    x = torch.randn(2, 8, 6, 6)
    net: Any = deploy(model, x)
    (layer,) = net.deployment.folded
    assert (layer.name, layer.kind, layer.strategy, layer.reason) == ("0", "EpitomeConv2d", "folded", reason)
    assert layer.reason in Reason.__args__  # type: ignore[attr-defined]
    assert reason in str(net.deployment)
    assert type(net[0]) is nn.Conv2d
    with torch.no_grad():
        assert relative(model.eval()(x), net(x)) < 1e-5


def test_no_saving_is_folded() -> None:
    layer = EpitomeLinear(1, 8, epitome_shape=(7, 1))
    layer.set_starts({"out": torch.tensor([1.5, 4.5])})  # between positions: lerps cost more than they save
    net: Any = deploy(nn.Sequential(layer), torch.zeros(1, 1))
    assert net.deployment.layers[0].reason == "no saving"


class Branches(nn.Module):
    """One layer that never runs, one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.used = EpitomeLinear(8, 8, epitome_shape=(2, 8))
        self.idle = EpitomeLinear(8, 8, epitome_shape=(2, 8))
        self.again = nn.ModuleList([self.used])

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.again[0](self.used(x)), "parts": [x, (x,)]}


def test_layers_that_do_not_run_and_layers_with_two_names() -> None:
    model, x = Branches(), torch.randn(3, 8)
    net: Any = deploy(model, x)
    reasons = {layer.name: (layer.strategy, layer.reason) for layer in net.deployment.layers}
    assert reasons == {
        "used": ("product_map", "fewest operations"),
        "idle": ("folded", "not run by the example input"),
    }
    assert net.used is net.again[0]
    assert isinstance(net.used, ReuseLayer)
    assert type(net.idle) is nn.Linear
    torch.testing.assert_close(net(x)["logits"], model.eval()(x)["logits"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_single_layer_is_a_model(strategy: Any) -> None:
    layer = EpitomeConv2d(4, 32, 1, epitome_shape=(8, 4, 1, 1))
    x = torch.randn(1, 4, 3, 3)
    net: Any = deploy(layer, x, strategy)
    assert net.deployment.strategy == strategy
    torch.testing.assert_close(net(x), layer.eval()(x))


def test_a_model_without_epitomes_is_copied() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    net: Any = deploy(model, x)
    assert net is not model
    assert net.deployment.layers == ()
    assert torch.equal(net(x), model(x))


def test_user_hooks_stay() -> None:
    model = nn.Sequential(EpitomeLinear(4, 16, epitome_shape=(4, 4)))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    x = torch.randn(2, 4)
    for strategy in STRATEGIES:
        torch.testing.assert_close(deploy(model, x, strategy)(x), model.eval()(x))  # type: ignore[arg-type]


def test_whole_starts_run_without_interpolation() -> None:
    model = nn.Sequential(EpitomeConv2d(8, 32, 1, epitome_shape=(8, 8, 1, 1)))
    model[0].set_starts({"out": torch.tensor([0.5, 2.5, 4.5, 6.5])})
    x = torch.randn(1, 8, 4, 4)
    between: Any = deploy(model, x)
    model[0].snap_routing()
    whole: Any = deploy(model, x)
    assert whole.deployment.layers[0].madds == 8 * 8 * 16
    assert between.deployment.layers[0].madds == 8 * 8 * 16 + 2 * 32 * 16


def test_cost_counts_what_is_deployed(trained: nn.Module) -> None:
    x = torch.zeros(1, 3, 32, 32)
    net: Any = deploy(trained, x)
    costs = {layer.name: layer for layer in count(trained, x).layers}
    for layer in net.deployment.layers:
        assert (layer.strategy, layer.madds) == (costs[layer.name].strategy, costs[layer.name].madds)


# ---- report ----


def test_report_survives_copies_and_is_not_in_the_state() -> None:
    model = nn.Sequential(EpitomeLinear(4, 16, epitome_shape=(4, 4)), nn.Linear(16, 2))
    net: Any = deploy(model, torch.zeros(1, 4))
    assert isinstance(net.deployment, Deployment)
    assert copy.deepcopy(net).deployment == net.deployment
    assert pickle.loads(pickle.dumps(net)).deployment == net.deployment
    assert not any("deployment" in key for key in net.state_dict())
    with pytest.raises(AttributeError):
        net.deployment.strategy = "dense"


def test_report_is_a_table() -> None:
    model = nn.Sequential(
        EpitomeLinear(4, 16, epitome_shape=(4, 4)),
        EpitomeLinear(16, 8, epitome_shape=(4, 16), channel_starts="grid"),
    )
    net: Any = deploy(model, torch.zeros(1, 4))
    lines = str(net.deployment).splitlines()
    assert lines[0].split()[:2] == ["layer", "kind"]
    assert lines[0].endswith("declined")  # nothing was measured
    assert lines[2].endswith("pairs of blocks")
    assert "product_map" in lines[1]
    assert "folded" in lines[2]
    assert lines[3].startswith("1 reused, 1 folded; difference to the trained model")


def test_the_table_has_no_empty_column() -> None:
    net: Any = deploy(nn.Sequential(EpitomeLinear(4, 16, epitome_shape=(4, 4))), torch.zeros(1, 4))
    assert str(net.deployment).splitlines()[0].endswith("reason")
    (layer,) = net.deployment.layers
    timed = replace(net.deployment, layers=(replace(layer, seconds=(("folded", 2e-3),)),))
    head, row, *_ = str(timed).splitlines()
    assert head.endswith("measured")
    assert row.endswith("folded 2.000 ms")


# ---- what goes wrong ----


class Counter(nn.Module):
    """Its output depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = EpitomeLinear(4, 16, epitome_shape=(4, 4))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.layer(x) * self.runs


class Random(nn.Module):
    """Draws random numbers in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = EpitomeLinear(4, 16, epitome_shape=(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand(16)


class Shapeless(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return float(super().forward(x).sum())


def test_parity_guard() -> None:
    with pytest.raises(ParityError, match="does not compute what the trained one computes"):
        deploy(Counter(), torch.randn(2, 4))
    deploy(Random(), torch.randn(2, 4))  # both runs draw the same numbers
    with pytest.raises(ParityError, match="cannot be compared"):
        deploy(Shapeless(4, 2), torch.randn(2, 4))


def test_parity_guard_lets_nan_and_infinity_pass_where_both_have_them() -> None:
    model = nn.Sequential(EpitomeLinear(4, 16, epitome_shape=(4, 4)))
    x = torch.randn(2, 4)
    x[0, 0] = float("nan")
    net: Any = deploy(model, x)
    assert net.deployment.difference < 1e-5
    x[0, 0] = float("inf")
    net = deploy(model, x, "dense")
    assert net.deployment.difference < 1e-5


def test_infinities_that_cancel_are_noticed() -> None:
    """Interpolating between plus and minus infinity gives NaN, where the generated weight times infinity has a sign."""
    model = nn.Sequential(EpitomeLinear(4, 16, epitome_shape=(4, 4)))
    x = torch.randn(2, 4)
    x[0, 0] = float("inf")
    with pytest.raises(ParityError, match="does not compute"):
        deploy(model, x, "reuse")


def test_starts_that_are_not_finite() -> None:
    model = nn.Sequential(EpitomeLinear(4, 16, epitome_shape=(4, 4), index="fixed"))
    with torch.no_grad():
        model[0].starts()["out"][0] = float("nan")
    with pytest.raises(StartsError):
        deploy(model, torch.zeros(1, 4))


def test_unknown_strategy_suggests_the_near_one() -> None:
    with pytest.raises(InputError, match="did you mean 'reuse'"):
        deploy(nn.Linear(2, 2), torch.zeros(1, 2), "reus")  # type: ignore[arg-type]


def test_example_without_a_tensor() -> None:
    with pytest.raises(InputError, match="holds no tensor"):
        deploy(nn.Linear(2, 2), (3,))


class Amplifier(nn.Module):
    """Rounding of its convolution decides the digits of its output; `cast` hides that from a run in float64."""

    def __init__(self, gain: float, cast: bool = False) -> None:
        super().__init__()
        self.conv, self.gain, self.cast = nn.Conv2d(8, 64, 3), gain, cast

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.gain * self.conv(x))
        return y.float() if self.cast else y


def amplifier(gain: float, cast: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Amplifier(gain, cast)
    epitorch.convert_(model, Plan({"conv": LayerPlan((23, 8, 3, 3), index="direct")}))
    conv: Any = model.conv
    with torch.no_grad():
        conv.starts()["out"].add_(0.4)  # between positions: of whole ones nothing would round differently
    return model.eval()


def test_rounding_that_the_model_amplifies_is_no_mismatch() -> None:
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(0))
    net = epitorch.deploy(amplifier(1e3), x)
    assert 1e-4 < net.deployment.difference < 1e-2  # type: ignore[union-attr]
    assert epitorch.deploy(amplifier(1.0), x).deployment.difference < 1e-5  # type: ignore[union-attr]


@pytest.mark.parametrize("gain, cast", [(1e3, True), (1e6, False)])
def test_a_difference_that_float64_does_not_explain_is_one(gain: float, cast: bool) -> None:
    with pytest.raises(ParityError, match="does not compute"):
        epitorch.deploy(amplifier(gain, cast), torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", ["epitome", "bias"])
def test_a_derived_epitome_is_refused_by_name(name: str) -> None:
    """Weight normalisation makes the tensor in every pass: there is no parameter to take over."""
    net = nn.Sequential(EpitomeConv2d(8, 16, 3, epitome_shape=(8, 8, 3, 3)))
    x = torch.randn(1, 8, 5, 5)
    assert type(deploy(net, x, "reuse")[0]) is ReuseConv  # type: ignore[index]
    nn.utils.parametrize.register_parametrization(net[0], name, nn.Identity())
    with pytest.raises(ConversionError, match=f"0: '{name}' of this layer is made from other tensors"):
        deploy(net, x, "reuse")
    nn.utils.parametrize.remove_parametrizations(net[0], name)
    assert type(deploy(net, x, "reuse")[0]) is ReuseConv  # type: ignore[index]
