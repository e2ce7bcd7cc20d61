"""Subclasses of torch's layers keep their own forward, on a generated weight."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epitorch
from epitorch import LayerPlan, Plan
from epitorch.conversion import EPITOME_CLASSES
from epitorch.nn import AdaptedLayer, EpitomeConv2d, EpitomeLayer


class Standardised(nn.Conv2d):
    """Weight standardisation with a gain of its own; reads its weight twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), 2.0))
        self.register_buffer("calls", torch.zeros(()))
        self.inner = nn.Linear(2, 2)
        self.note = ["shared"]

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) * self.gain
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class Doubled(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(features)


class Up(nn.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: Any = None) -> Tensor:
        return super().forward(input, output_size).relu()


def layers() -> dict[str, tuple[nn.Module, LayerPlan, Tensor]]:
    timm = pytest.importorskip("timm")
    from timm.layers import Conv2dSame, ScaledStdConv2d, StdConv2dSame

    assert timm
    image = torch.randn(2, 6, 9, 9, generator=torch.Generator().manual_seed(0))
    plan = LayerPlan((4, 6, 3, 3))
    return {
        "own": (Standardised(6, 8, 3, stride=2, padding=1), plan, image),
        "linear": (Doubled(6, 8), LayerPlan((4, 3), channel_starts="grid"), image.movedim(1, -1)),
        "up": (Up(6, 8, 3, stride=2), LayerPlan((3, 8, 3, 3)), image),
        "same": (Conv2dSame(6, 8, 3, stride=2), plan, image),
        "standardised same": (StdConv2dSame(6, 8, 3, stride=2), plan, image),
        "scaled": (ScaledStdConv2d(6, 8, 3, padding=1), plan, image),
    }


NAMES = ["own", "linear", "up", "same", "standardised same", "scaled"]


def converted(name: str, index: str = "learner") -> tuple[Any, nn.Module, Tensor]:
    """Model with the converted layer, the dense layer before, an input."""
    torch.manual_seed(1)
    dense, plan, x = layers()[name]
    model = nn.Sequential(copy.deepcopy(dense))
    report = epitorch.convert_(
        model, Plan({"0": LayerPlan(plan.epitome_shape, channel_starts=plan.channel_starts, index=index)})
    )  # type: ignore[arg-type]
    assert report.layers[0].note == "converted, its own forward kept"
    return model, dense, x


def with_weight(dense: nn.Module, weight: Tensor) -> nn.Module:
    """The dense layer itself, given another weight: what the converted one must compute."""
    twin: Any = copy.deepcopy(dense)
    with torch.no_grad():
        twin.weight.copy_(weight)
    return twin


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", ["learner", "direct", "fixed"])
def test_the_class_s_own_forward_runs_on_the_generated_weight(name: str, index: str) -> None:
    model, dense, x = converted(name, index)
    layer = model.eval()[0]
    assert isinstance(layer, AdaptedLayer)
    assert isinstance(layer, type(dense))
    assert "weight" not in dict(layer.named_parameters())
    torch.testing.assert_close(model(x), with_weight(dense, layer.weight)(x))
    with torch.no_grad():
        layer.epitome.mul_(1.5).add_(torch.rand_like(layer.epitome))
    assert not torch.allclose(model(x), with_weight(dense, dense.weight)(x), atol=1e-3)  # type: ignore[arg-type]
    torch.testing.assert_close(model(x), with_weight(dense, layer.weight)(x))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_epitome_learner_and_the_layer_s_own_parameters(name: str) -> None:
    model, _, x = converted(name)
    model(x).square().sum().backward()
    missing = [key for key, p in model.named_parameters() if p.grad is None and "inner" not in key]
    assert missing == []
    direct, _, _ = converted(name, "direct")
    direct(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in direct[0].routing_map.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_learner_s_starts_are_used_in_training_and_averaged(name: str) -> None:
    model, dense, x = converted(name)
    layer = model[0]
    with torch.no_grad():
        layer.learner.head.weight.normal_(std=3)
        layer.learner.head.bias.add_(1.0)
    before = {axis: value.clone() for axis, value in layer.starts().items()}
    seen = layer.learner(x)
    features = model(x)
    torch.testing.assert_close(features, with_weight(dense, layer._generate(seen))(x))
    moved = [axis for axis, value in layer.starts().items() if not torch.equal(value, before[axis])]
    assert moved
    assert layer._generated is None


@pytest.mark.parametrize("name", NAMES)
def test_to_dense_gives_the_class_back(name: str) -> None:
    model, dense, x = converted(name)
    wanted = model.eval()(x)
    back = epitorch.to_dense_(copy.deepcopy(model))
    assert type(back[0]) is type(dense)  # type: ignore[index]
    torch.testing.assert_close(back(x), wanted)
    assert list(back.state_dict()) == [f"0.{key}" for key in dense.state_dict()]
    assert set(vars(back[0])) == set(vars(dense))  # type: ignore[index]
    with torch.no_grad():
        back[0].weight.add_(1)  # type: ignore[index, operator]
    torch.testing.assert_close(model(x), wanted)  # nothing is shared with the copy


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["dense", "reuse"])
def test_deployed_and_counted(name: str, strategy: Any) -> None:
    model, dense, x = converted(name)
    model.eval()
    net = epitorch.deploy(model, x, strategy=strategy)
    torch.testing.assert_close(net(x), model(x))
    assert [row.strategy for row in net.deployment.layers] == ["folded"]  # type: ignore[union-attr]
    cost, before = epitorch.count(model, x), epitorch.count(nn.Sequential(dense), x)
    assert cost.madds == before.madds
    assert cost.params == before.params - dense.weight.numel() + model[0].spec.num_epitome + model[0].spec.num_starts  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_states(name: str) -> None:
    model, _, x = converted(name)
    wanted = model.eval()(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(twin[0]) is type(model[0])
        torch.testing.assert_close(twin(x), wanted)
        assert twin[0].epitome is not model[0].epitome
    other, _, _ = converted(name)
    with torch.no_grad():
        other[0].epitome.add_(1)
    assert not torch.allclose(other.eval()(x), wanted)
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(other(x), wanted)


def test_everything_of_the_layer_s_own_stays() -> None:
    dense = Standardised(6, 8, 3)
    dense.gain.requires_grad_(False)
    calls: list[str] = []
    dense.register_forward_hook(lambda *_: calls.append("hook"))
    model: Any = nn.Sequential(dense).double().eval()
    epitorch.convert_(model, Plan({"0": LayerPlan((4, 6, 3, 3))}))
    layer = model[0]
    assert (layer.gain is dense.gain, layer.inner is dense.inner, layer.note is dense.note) == (True, True, True)
    assert (layer.gain.requires_grad, layer.bias.requires_grad, layer.training) == (False, True, False)
    assert layer.epitome.dtype is torch.float64
    assert "weight" in dense._parameters  # the old layer is whole
    model(torch.zeros(1, 6, 3, 3, dtype=torch.float64))
    assert calls == ["hook"]
    assert "kernel_size=(3, 3)" in repr(layer)
    assert "epitome_shape=(4, 6, 3, 3)" in repr(layer)


def test_a_frozen_weight_freezes_the_epitome_only() -> None:
    dense = Standardised(6, 8, 3)
    dense.weight.requires_grad_(False)
    model: Any = nn.Sequential(dense)
    epitorch.convert_(model, Plan({"0": LayerPlan((4, 6, 3, 3))}))
    assert {n for n, p in model[0].named_parameters() if p.requires_grad} == {
        "bias",
        "gain",
        "inner.weight",
        "inner.bias",
    }


def test_a_failing_forward_leaves_no_weight_behind() -> None:
    model, _, _ = converted("own")
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 5, 9, 9))
    assert model[0]._generated is None


def test_a_part_inside_a_converted_layer_is_converted_too() -> None:
    model: Any = nn.Sequential(Standardised(6, 8, 3))
    epitorch.convert_(model, Plan({"0": LayerPlan((4, 6, 3, 3)), "0.inner": LayerPlan((1, 2))}))
    assert isinstance(model[0], AdaptedLayer)
    assert isinstance(model[0].inner, EpitomeLayer)


def test_clashing_attributes_are_refused_by_name() -> None:
    dense: Any = Standardised(6, 8, 3)
    dense.momentum = 0.5
    with pytest.raises(epitorch.errors.ConversionError, match=r"0: .*attributes of its own") as error:
        epitorch.convert_(nn.Sequential(dense), Plan({"0": LayerPlan((4, 6, 3, 3))}))
    assert "momentum" in str(error.value).splitlines()[2]


def test_exact_types_are_not_adapted() -> None:
    assert all(not issubclass(kind, AdaptedLayer) for kind in EPITOME_CLASSES.values())
    model: Any = nn.Sequential(nn.Conv2d(6, 8, 3))
    epitorch.convert_(model, Plan({"0": LayerPlan((4, 6, 3, 3))}))
    assert type(model[0]) is EpitomeConv2d


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    model, _, x = converted("same")
    model.train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(twin[0].starts(), model[0].starts())


# ---- weights that are read without calling the layer ----


def test_the_output_projection_of_attention_takes_direct_starts() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0))
    with pytest.raises(epitorch.errors.ConversionError, match="read without calling it") as error:
        epitorch.convert_(model, Plan({"0.self_attn.out_proj": LayerPlan((4, 8))}))
    assert "0.self_attn.out_proj" in str(error.value)
    epitorch.convert_(model, Plan({"0.self_attn.out_proj": LayerPlan((4, 8), index="direct")}))
    layer, x = model[0].self_attn.out_proj, torch.randn(2, 3, 8)
    model(x).square().sum().backward()
    assert layer.epitome.grad.abs().sum() > 0
    assert layer.routing_map["out"].grad.abs().sum() > 0
    wanted = model.eval()(x)
    net = epitorch.deploy(model, x, strategy="reuse")
    torch.testing.assert_close(net(x), wanted)
    torch.testing.assert_close(epitorch.to_dense_(model)(x), wanted)
