"""Dense counts against two tools that share nothing with `count`: torch's counter (2 per MAdd) and fvcore's (1)."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from epitorch.cost import count

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # fvcore scripts a loss on import, torch announces the end of that
    from fvcore.nn import FlopCountAnalysis

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # the same in torch 2.9
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # traced models compare shapes in Python
]

OPERATORS = {"conv": "convolution", "linear": "linear", "addmm": "linear"}
OPERATORS |= dict.fromkeys(("matmul", "mm", "bmm", "einsum"), "matrix product")


def torchs(model: nn.Module, example: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    return counter.get_total_flops() // 2


def fvcores(model: nn.Module, example: Tensor) -> Counter[str]:
    """By our kinds; what fvcore counts beyond them (norms, pooling, resizing) is left out."""
    logging.getLogger("fvcore").setLevel(logging.ERROR)  # it names each operator that it does not know
    kinds: Counter[str] = Counter()
    for operator, madds in FlopCountAnalysis(model, example).by_operator().items():
        if operator in OPERATORS:
            kinds[OPERATORS[operator]] += int(madds)
    return kinds


class Generator(nn.Sequential):
    """Transposed convolutions, one of them with groups."""

    def __init__(self) -> None:
        super().__init__(
            nn.ConvTranspose2d(3, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2, output_padding=1),
        )


class Waveform(nn.Sequential):
    """1-D convolutions and a classifier on every frame."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(1, 2), nn.Conv1d(192, 32, 9, stride=4), nn.ReLU(), nn.Linear(14, 5))


def segmentation() -> nn.Module:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)["out"]

    return Logits()


def torchvisions(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None)


NAMES = (
    "resnet18",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "densenet121",
    "mnasnet0_5",
    "regnet_y_400mf",
    "convnext_tiny",
    "swin_t",
)
BUILDERS: dict[str, Callable[[], nn.Module]] = {name: torchvisions(name) for name in NAMES}
BUILDERS |= {
    "lraspp": segmentation,
    "efficientnet_lite0": lambda: timm.create_model("efficientnet_lite0"),
    "resmlp": lambda: timm.create_model("resmlp_12_224", img_size=64),
    "generator": Generator,
    "waveform": Waveform,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_dense_counts_equal_torchs_and_fvcores(name: str) -> None:
    model, example = BUILDERS[name]().eval(), torch.zeros(1, 3, 64, 64)
    cost = count(model, example)
    assert cost.uncounted == ()
    assert cost.madds == cost.madds_dense == sum(cost.by_kind.values()) == torchs(model, example) > 0
    expected, ours = fvcores(model, example), Counter[str](cost.by_kind)
    assert ours["convolution"] == expected["convolution"]
    # fvcore says "linear" of every `F.linear`, `count` of the layers only
    products = ours["linear"] + ours["matrix product"]
    assert products == expected["linear"] + expected["matrix product"]


def test_the_comparison_can_fail() -> None:
    model = torchvision.models.mobilenet_v2(weights=None).eval()
    cost = count(model, torch.zeros(1, 3, 64, 64))
    assert cost.by_kind["convolution"] != fvcores(model, torch.zeros(1, 3, 64, 96))["convolution"]


def test_matrix_products_are_told_from_linear_layers() -> None:
    model: Any = torchvision.models.swin_t(weights=None).eval()
    example = torch.zeros(1, 3, 64, 64)
    kinds, expected = count(model, example).by_kind, fvcores(model, example)
    products = sum(
        entry.madds
        for entry in count(model, example).operators
        if entry.operator in ("bmm", "baddbmm")  # windows; qkv and proj are read by `F.linear`
    )
    assert products == expected["matrix product"] > 0
    assert kinds["matrix product"] > products
    assert kinds["linear"] < expected["linear"]


def test_fused_attention_equals_its_two_products() -> None:
    """fvcore has no formula for it, so the reference is the same attention written out."""
    tokens, width = 17, 12

    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x @ x.transpose(1, 2), -1) @ x

    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    example = torch.randn(2, tokens, width)
    written, fused = count(Written(), example), count(Fused(), example)
    assert written.by_kind == {"matrix product": 2 * tokens * tokens * width}
    assert fused.by_kind == {"attention": 2 * tokens * tokens * width}
    assert 2 * written.madds == fvcores(Written(), example)["matrix product"]
