"""ResNet-20 for CIFAR-10."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epitorch.cost import count
from epitorch.errors import InputError
from epitorch.models.resnet import resnet20
from epitorch.models.resolve import build_model


def literal(net: nn.Module, x: Tensor, stride: int) -> Tensor:
    """The network in eval mode, written out from its table."""
    state = net.state_dict()

    def conv_norm(x: Tensor, conv: str, norm: str, stride: int) -> Tensor:
        x = F.conv2d(x, state[f"{conv}.weight"], stride=stride, padding=1)
        mean, var, scale, shift = (
            state[f"{norm}.{key}"][:, None, None] for key in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    x = conv_norm(x, "conv1", "bn1", stride).clamp_min(0)
    for stage in (1, 2, 3):
        for block in range(3):
            at, step = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = conv_norm(x, f"{at}.conv1", f"{at}.bn1", step).clamp_min(0)
            y = conv_norm(y, f"{at}.conv2", f"{at}.bn2", 1)
            if step == 2:
                x = torch.cat([x[:, :, ::2, ::2], torch.zeros_like(y[:, : x.shape[1]])], 1)
            x = (x + y).clamp_min(0)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


@torch.no_grad()
@pytest.mark.parametrize("width, stride", [(16, 1), (5, 2)])
def test_the_network_is_the_one_of_the_paper(width: int, stride: int) -> None:
    torch.manual_seed(0)
    net = resnet20(width=width, stem_stride=stride)
    x = torch.randn(4, 3, 32, 32)
    net(x)  # running statistics of its own
    got = net.eval()(x)
    torch.testing.assert_close(got, literal(net, x, stride))
    other = literal(net, x.flip(1), stride)
    assert (got - other).abs().max() > 1e-3


def test_sizes() -> None:
    cost = count(build_model("epitorch:resnet20"), torch.zeros(1, 3, 32, 32))
    convs = 3 * 16 * 9 + 9 * (6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
    assert cost.params == convs + 2 * (16 * 7 + 32 * 6 + 64 * 6) + 650 == 269_722
    halved = count(build_model("epitorch:resnet20", {"stem_stride": 2}), torch.zeros(1, 3, 32, 32))
    assert (halved.params, halved.madds - 640) == (cost.params, (cost.madds - 640) / 4)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"width": 8.0}, {"num_classes": True}, {"stem_stride": -1}])
def test_wrong_sizes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot be built"):
        resnet20(**wrong)
