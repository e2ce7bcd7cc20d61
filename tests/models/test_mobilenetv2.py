from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import nn

import epitorch
from epitorch.errors import ConversionError, InputError
from epitorch.models.mobilenetv2 import fit_mobilenetv2_plan, mobilenetv2, mobilenetv2_plan, scaled
from epitorch.nn import EpitomeConv2d
from epitorch.plans import planned_params


def params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def settled(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """In eval mode, batch norm statistics taken from `x`: a fresh network's outputs vanish (1e-9)."""
    for module in model.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    model(x)
    return model.eval()


def test_scaled_is_the_floor_and_safe_against_binary_fractions() -> None:
    assert [scaled(0.18, 96), scaled(0.29, 100), scaled(0.35, 40), scaled(0.001, 10)] == [17, 29, 14, 1]
    assert [scaled(0.18, 96, 8), scaled(0.5, 96, 8), scaled(0.01, 96, 8)] == [16, 48, 8]


def test_full_width_is_torchvisions_network() -> None:
    ours, theirs = mobilenetv2(10), torchvision.models.mobilenet_v2(num_classes=10)
    shapes = {name: p.shape for name, p in theirs.state_dict().items()}
    assert {name: p.shape for name, p in ours.state_dict().items()} == shapes
    x = torch.randn(4, 3, 64, 64)
    ours.load_state_dict(settled(theirs, x).state_dict())
    small = mobilenetv2(10, cifar=True)
    small.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs(x))
    assert not torch.allclose(small.eval()(x), theirs(x), rtol=0.1, atol=1e-3)


def test_parameter_counts_of_the_papers_cifar_networks() -> None:
    """The method's figures: 2.237 M dense, 0.405 M narrowed, 0.493 M epitomes at c = 0.18."""
    dense = mobilenetv2(10, cifar=True)
    assert params(dense) == 2_236_682
    assert params(mobilenetv2(10, cifar=True, hidden_width=0.18, last_width=0.18)) == 404_672
    assert planned_params(dense, mobilenetv2_plan(dense, 0.18, last_conv=True)) == 493_312


def test_narrowing_touches_hidden_channels_only() -> None:
    dense, narrow = mobilenetv2(10), mobilenetv2(10, hidden_width=0.5)
    for wide, thin in zip(dense.features, narrow.features, strict=True):
        convs = [[m for m in part.modules() if isinstance(m, nn.Conv2d)] for part in (wide, thin)]
        assert convs[0][-1].out_channels == convs[1][-1].out_channels
        if len(convs[0]) == 3:
            assert [c.out_channels for c in convs[1][:2]] == [int(0.5 * c.out_channels) for c in convs[0][:2]]
    assert params(narrow) < params(dense)


@pytest.mark.parametrize("cifar, stem_stride, side", [(False, None, 1), (True, None, 4), (True, 2, 2)])
def test_strides(cifar: bool, stem_stride: int | None, side: int) -> None:
    model = mobilenetv2(10, cifar=cifar, stem_stride=stem_stride).eval()
    assert model.features(torch.zeros(1, 3, 32, 32)).shape == (1, 1280, side, side)


@pytest.mark.parametrize("library", ["timm", "torchvision", "epitorch"])
def test_plan_converts_the_first_1x1_along_filters_and_the_second_along_inputs(library: str) -> None:
    torch.manual_seed(0)
    model = {
        "timm": lambda: timm.create_model("mobilenetv2_100", num_classes=10),
        "torchvision": lambda: torchvision.models.mobilenet_v2(num_classes=10),
        "epitorch": lambda: mobilenetv2(10, cifar=True),
    }[library]()
    report = epitorch.convert_(model, mobilenetv2_plan(model, 0.18))
    assert len(report.converted) == 32  # 16 blocks with an expansion
    for expansion, projection in zip(report.converted[::2], report.converted[1::2], strict=True):
        (wide, k), (k2, wide2) = expansion.weight_shape[:2], projection.weight_shape[:2]
        assert expansion.epitome_shape == (int(0.18 * wide), k, 1, 1)
        assert projection.epitome_shape == (k2, int(0.18 * wide2), 1, 1)
    reasons = sorted(layer.left for layer in report.left)
    assert reasons == sorted(["stem", "no_expansion", "last_conv", "classifier", *["depthwise"] * 17])
    x = torch.randn(8, 3, 32, 32)
    wanted = settled(model, x)(x)
    assert wanted.shape == (8, 10)
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(epitorch.to_dense_(model)(x), wanted, atol=1e-4, rtol=1e-4)


def test_last_convolution_classifier_and_group_length() -> None:
    model = mobilenetv2(10, cifar=True)
    report = epitorch.convert_(
        model, mobilenetv2_plan(model, 0.18, last_conv=True, classifier=0.5, group_length=8, index="fixed")
    )
    assert {layer.left for layer in report.left} == {"stem", "depthwise", "no_expansion"}
    assert model.features[-1][0].epitome.shape == (224, 320, 1, 1)
    assert model.classifier[1].epitome.shape == (10, 640)
    layers = [m for m in model.modules() if isinstance(m, EpitomeConv2d)]
    assert all(layer.spec.group_length == 8 and layer.learner is None for layer in layers)


@pytest.mark.parametrize("index", ["learner", "direct", "fixed"])
def test_fitted_plan_meets_a_total_from_below_within_one_step(index: str) -> None:
    model = mobilenetv2(10, cifar=True)
    plan, c = fit_mobilenetv2_plan(model, 404_672, last_conv=True, index=index)
    total = planned_params(model, plan)
    assert 404_672 - 500 < total <= 404_672  # the largest single step is 320 parameters
    assert 0.13 < c < 0.15
    epitorch.convert_(model, plan)
    assert epitorch.count(model, torch.zeros(1, 3, 32, 32)).params == total


def test_budgets_out_of_reach() -> None:
    model = mobilenetv2(10)
    with pytest.raises(ConversionError, match="at least"):
        fit_mobilenetv2_plan(model, 1000)
    plan, c = fit_mobilenetv2_plan(model, 10**9)
    assert c == 1.0
    assert planned_params(model, plan) == params(model)


@pytest.mark.parametrize("c", [0.0, -0.1, 1.5])
def test_bad_shares(c: float) -> None:
    with pytest.raises(ConversionError, match="0 < share <= 1"):
        mobilenetv2_plan(mobilenetv2(10), c)
    if c <= 0:
        with pytest.raises(InputError, match="above 0"):
            mobilenetv2(10, hidden_width=c)


def test_another_network_is_refused() -> None:
    with pytest.raises(ConversionError, match="MobileNetV2"):
        mobilenetv2_plan(torchvision.models.resnet18(), 0.5)
