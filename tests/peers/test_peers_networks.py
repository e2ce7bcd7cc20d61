"""Networks of other sizes as plain data."""

from __future__ import annotations

import copy

import pytest
import torch
from benchmarks.peers.networks import NAME, base_network, built, describe_channels, pair
from torch import nn

from epitorch.models.resolve import build_model

ARGUMENTS = {"num_classes": 10, "stem_stride": 2}


def half_resnet() -> nn.Module:
    dense = base_network("epitorch:resnet20", ARGUMENTS)
    layers = {
        name: {"out": 10 if name == "fc" else m.weight.shape[0] // 2}
        | ({"in": m.weight.shape[1] // (1 if m.weight.shape[1] == 3 else 2)} if m.weight.ndim > 1 else {})
        for name, m in dense.named_modules()
        if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear)
    }
    return built("epitorch:resnet20", ARGUMENTS, layers, init="kaiming_fan_out")


def test_half_of_all_channels_is_the_network_of_half_the_width() -> None:
    half, own = half_resnet(), base_network("epitorch:resnet20", {**ARGUMENTS, "width": 8})
    own.load_state_dict(half.state_dict())
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(half.eval()(x), own.eval()(x))
    with torch.no_grad():
        own.get_submodule("layer3.0.conv1").weight[0] += 1  # type: ignore[union-attr]
    assert not torch.allclose(half(x), own(x))


def test_convolutions_are_drawn_as_the_dense_network_draws_them() -> None:
    torch.manual_seed(0)
    weight = half_resnet().get_submodule("layer3.1.conv2").weight
    assert float(weight.detach().std()) == pytest.approx((2 / (32 * 9)) ** 0.5, rel=0.05)


def test_a_network_is_described_by_its_tensors(tmp_path: object) -> None:
    half = half_resnet()
    layers = describe_channels(half, base_network("epitorch:resnet20", ARGUMENTS))
    assert layers["layer2.0.conv1"] == {"out": 16, "in": 8}
    assert "conv1.bias" not in layers
    again = build_model(NAME, {"base": "epitorch:resnet20", "arguments": ARGUMENTS, "layers": layers})
    again.load_state_dict(half.state_dict())
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(again.eval()(x), half.eval()(x))


def test_depthwise_convolutions_stay_depthwise() -> None:
    arguments = {"num_classes": 10, "cifar": True}
    name = "features.2.conv.1.0"
    layers = {
        "features.2.conv.0.0": {"out": 40, "in": 16},
        "features.2.conv.0.1": {"out": 40},
        name: {"out": 40, "in": 1},
        "features.2.conv.1.1": {"out": 40},
        "features.2.conv.2": {"out": 24, "in": 40},
    }
    net = built("epitorch:mobilenetv2", arguments, layers)
    assert net.get_submodule(name).groups == 40
    assert net.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_a_pair_takes_the_place_of_a_layer() -> None:
    for layer, x in ((nn.Conv2d(8, 6, 1, 2), torch.randn(1, 8, 5, 5)), (nn.Linear(8, 6), torch.randn(1, 8))):
        assert pair(layer, 3)(x).shape == layer(x).shape


def test_the_dense_network_has_no_description() -> None:
    dense = base_network("epitorch:resnet20", ARGUMENTS)
    assert describe_channels(copy.deepcopy(dense), dense) == {}
