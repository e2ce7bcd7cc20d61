"""Ways in which the printed figures might have come about: searches, and networks that the paper does not name."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch import nn

from epitorch.models.mobilenetv2 import mobilenetv2, scaled
from reconcile_counts import Counted

# ---- which layers would have to be left out ----

GROUPS = {
    "stem": "stem",
    "first depthwise": "first block's depthwise",
    "first pointwise": "first block's 1x1",
    "expansions": "expansions",
    "depthwise": "depthwise",
    "projections": "projections",
    "last": "last convolution",
    "classifier": "classifier",
}


def group_of(name: str) -> str:
    """Group of a MobileNetV2 layer by its name in torchvision."""
    if name.startswith("classifier"):
        return "classifier"
    _, block, *rest = name.split(".")
    if block in ("0", "18"):
        return "stem" if block == "0" else "last"
    if block == "1":
        return "first depthwise" if rest[1] == "0" else "first pointwise"
    return {"0": "expansions", "1": "depthwise", "2": "projections"}[rest[1]]


Groups = dict[str, tuple[int, int]]


def by_group(network: Counted) -> Groups:
    """(parameters, multiply-adds without interpolation) of each group; normalisation is in none."""
    totals = dict.fromkeys(GROUPS, (0, 0))
    for name, (params, madds) in network.layers.items():
        before = totals[group_of(name)]
        totals[group_of(name)] = (before[0] + params, before[1] + madds)
    return totals


@dataclass(frozen=True)
class Subset:
    """Groups whose sum comes nearest to all printed rows, and by how much the worst row is missed."""

    groups: tuple[str, ...]
    worst: float


def closest_subset(rows: list[tuple[Groups, float]], which: int) -> Subset:
    """Try every combination of groups.

    Args:
        rows: For each printed row the groups of our network and the printed figure, in millions.
        which: 0 parameters, 1 multiply-adds.
    """

    def worst(groups: tuple[str, ...]) -> float:
        return max(abs(sum(parts[group][which] for group in groups) / 1e6 - printed) for parts, printed in rows)

    every = (groups for size in range(1, len(GROUPS) + 1) for groups in combinations(GROUPS, size))
    best = min(every, key=worst)
    return Subset(best, worst(best))


# ---- CIFAR-10: other strides, other shortcuts ----

STAGES = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
"""Expansion, channels and blocks of MobileNetV2's stages."""
OUR_STRIDES = (1, 1, 1, 2, 2, 1, 2, 1)


def cifar_madds(strides: tuple[int, ...], c: float) -> int:
    """Multiply-adds of MobileNetV2 for 32x32 images by a formula of its own.

    Args:
        strides: Of the stem and the seven stages.
        c: Share of the hidden channels and of the last convolution's 1280.
    """
    side, channels = 32 // strides[0], 32
    total = side**2 * 27 * channels
    for (expansion, width, blocks), first in zip(STAGES, strides[1:], strict=True):
        for stride in (first, *[1] * (blocks - 1)):
            hidden = channels if expansion == 1 else scaled(c, expansion * channels)
            total += 0 if expansion == 1 else side**2 * channels * hidden
            side = -(-side // stride)
            total += side**2 * hidden * (9 + width)
            channels = width
    last = scaled(c, 1280)
    return total + side**2 * channels * last + 10 * last


def closest_strides(dense: float, narrow: float) -> tuple[tuple[int, ...], float, float]:
    """Strides whose dense and narrow (0.18) networks come nearest to two printed figures, and both counts in M."""
    found = [(strides, *(cifar_madds(strides, c) / 1e6 for c in (1.0, 0.18))) for strides in product((1, 2), repeat=8)]
    return min(found, key=lambda one: abs(one[1] - dense) + abs(one[2] - narrow))


class WithShortcuts(nn.Module):
    """MobileNetV2 for CIFAR-10 with a 1x1 convolution on each stride-1 shortcut that changes the channels.

    A widely copied variant; the paper does not say which one it used.
    """

    def __init__(self) -> None:
        super().__init__()
        features: Any = mobilenetv2(10, cifar=True).features
        self.body = features
        self.shortcuts = nn.ModuleDict()
        for n, block in enumerate(features):
            if hasattr(block, "use_res_connect") and block.stride == 1 and not block.use_res_connect:
                sizes = [module for module in block.modules() if isinstance(module, nn.Conv2d)]
                wide = nn.Conv2d(sizes[0].in_channels, sizes[-1].out_channels, 1, bias=False)
                self.shortcuts[str(n)] = nn.Sequential(wide, nn.BatchNorm2d(wide.out_channels))
        self.classifier = nn.Linear(1280, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        for n, block in enumerate(self.body):
            name = str(n)
            x = block(x) + self.shortcuts[name](x) if name in self.shortcuts else block(x)
        return self.classifier(x.mean((2, 3)))
