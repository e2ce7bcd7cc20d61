"""The networks of the paper's tables, counted. On the meta device: nothing is computed, every start is fractional."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import epitorch
from epitorch.cost import count
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan
from epitorch.plans import Plan


@dataclass(frozen=True)
class Counted:
    """Totals of one network.

    Args:
        params: Epitomes, routing maps and all that stays.
        madds: Executed, every start between two positions.
        interpolation: Part of `madds`.
        madds_paper: The paper's formula, corrected.
        conv_madds: Executed by convolutions alone.
        layers: Parameters, and multiply-adds without interpolation, by name.
    """

    params: int
    madds: int
    interpolation: int
    madds_paper: int
    conv_madds: int
    layers: dict[str, tuple[int, int]]

    @property
    def plain(self) -> int:
        """Multiply-adds without the interpolation."""
        return self.madds - self.interpolation

    def to_dict(self) -> dict[str, int]:
        """The totals as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "layers"}


def counted(build: Callable[[], nn.Module], size: int) -> Counted:
    """Count one network on a square image.

    Args:
        build: Makes the network; called under the meta device.
        size: Height and width in pixels.
    """
    with torch.device("meta"):
        cost = count(build(), torch.zeros(1, 3, size, size))
    convolutions = sum(layer.madds for layer in cost.layers if layer.operation == "convolution")
    layers = {layer.name: (layer.params, layer.madds - layer.madds_interpolation) for layer in cost.layers}
    return Counted(cost.params, cost.madds, cost.madds_interpolation, cost.madds_paper, convolutions, layers)


# ---- MobileNetV2 ----


def imagenet_narrow(c: float) -> nn.Module:
    """Make "MobileNetV2-c*": hidden channels narrowed."""
    return mobilenetv2(hidden_width=c)


def imagenet_epitome(c: float) -> nn.Module:
    """The paper's plan on the full network."""
    model = mobilenetv2()
    epitorch.convert_(model, mobilenetv2_plan(model, c, index="fixed"))
    return model


def width_multiplier(width: float) -> nn.Module:
    """MobileNetV2 with the width multiplier of its own paper."""
    return torchvision.models.mobilenet_v2(weights=None, width_mult=width)


def cifar_narrow(c: float, last: float) -> nn.Module:
    """For 32x32 images, last convolution narrowed too."""
    return mobilenetv2(10, cifar=True, hidden_width=c, last_width=last)


def cifar_epitome(c: float, classifier: float | None = None) -> nn.Module:
    """The paper's plan for CIFAR-10."""
    model = mobilenetv2(10, cifar=True)
    epitorch.convert_(model, mobilenetv2_plan(model, c, last_conv=True, classifier=classifier, index="fixed"))
    return model


def cifar_classifier_only() -> nn.Module:
    """The dense network with nothing but its classifier halved."""
    model = mobilenetv2(10, cifar=True)
    whole = mobilenetv2_plan(model, 1.0, classifier=0.5, index="fixed")
    epitorch.convert_(model, Plan({"classifier.1": whole.layers["classifier.1"]}))
    return model


# ---- EfficientNet ----


def efficientnet(variant: str, c: float | None) -> nn.Module:
    """torchvision's EfficientNet; with `c`, its blocks' 1x1 convolutions as the paper does MobileNetV2's."""
    model: Any = torchvision.models.get_model(f"efficientnet_{variant}", weights=None)
    if c is not None:
        epitorch.convert_(model, epitorch.efficientnet_plan(model, c, index="fixed"))
    return model


# ---- other tools, and what conventions add ----


def small_network() -> nn.Sequential:
    """The worked example: 3x32x32 in, 10 numbers out."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.Conv2d(16, 32, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


@dataclass(frozen=True)
class Tools:
    """One network in three tools, as each of them prints it."""

    ours: int
    torch_flops: int
    fvcore_total: int
    fvcore_by_operator: dict[str, int]
    fvcore_by_module: dict[str, int]
    torch_by_module: dict[str, int]


def in_three_tools(model: nn.Module, size: int) -> Tools:
    """Run `epitorch.count`, torch's flop counter and fvcore on one image of the given size."""
    example = torch.zeros(1, 3, size, size)
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    per_module = {name.partition(".")[2]: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    analysis = _fvcore(model, example)
    operators = {name: int(n) for name, n in sorted(analysis.by_operator().items())}
    modules = {name: int(n) for name, n in analysis.by_module().items()}
    total = counter.get_total_flops()
    return Tools(count(model, example).madds, total, int(analysis.total()), operators, modules, per_module)


def _fvcore(model: nn.Module, example: torch.Tensor) -> Any:
    logging.getLogger("fvcore").setLevel(logging.ERROR)  # it names each operator that it does not know
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of tracing, which fvcore rests on
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(model, example)
        analysis.total()
    return analysis


@dataclass(frozen=True)
class Elements:
    """Outputs of layers that our convention counts as nothing, per sample."""

    batch_norm: int
    activation: int
    bias: int


def elements(build: Callable[[], nn.Module], size: int) -> Elements:
    """Count output elements of normalisations, activations and layers with bias."""
    totals = {"batch_norm": 0, "activation": 0, "bias": 0}

    def seen(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.BatchNorm2d):
            totals["batch_norm"] += output.numel()
        elif isinstance(module, nn.ReLU6):
            totals["activation"] += output.numel()
        elif getattr(module, "bias", None) is not None:
            totals["bias"] += output.numel()

    with torch.device("meta"), torch.no_grad():
        model = build().eval()
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(seen)
        model(torch.zeros(1, 3, size, size))
    return Elements(**totals)


BY_HAND = {
    "0": (16, 3, 3, 3, 16, 16),
    "3": (16, 1, 3, 3, 16, 16),
    "6": (32, 16, 1, 1, 16, 16),
    "9": (10, 32),
}
"""Multiply-adds of the worked example's layers as factors: filters, inputs, kernel, output positions."""


def by_hand(name: str) -> tuple[str, int]:
    """The arithmetic of one layer, and its result."""
    return "·".join(map(str, BY_HAND[name])), math.prod(BY_HAND[name])
