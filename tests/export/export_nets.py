"""Networks to export, with starts anywhere on the circle."""

from __future__ import annotations

import torch
from torch import nn

from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLayer, EpitomeLinear


def moved(model: nn.Module) -> nn.Module:
    """Starts anywhere on the circle, running statistics and affine parameters of a trained network; eval mode."""
    for layer in model.modules():
        if isinstance(layer, EpitomeLayer):
            sizes = layer.spec.start_sizes
            starts = layer.starts().items()
            layer.set_starts({axis: torch.rand_like(value) * max(sizes[axis]) for axis, value in starts})
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight, layer.bias, layer.running_mean):
                assert tensor is not None
                nn.init.normal_(tensor, 0.5, 0.2)
            assert layer.running_var is not None
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return model.eval()


def two_axes() -> nn.Module:
    return nn.Sequential(
        EpitomeConv2d(3, 16, 3, padding=1, epitome_shape=(6, 3, 3, 3)),  # product map
        nn.BatchNorm2d(16),
        nn.ReLU(),
        EpitomeConv2d(16, 16, 3, stride=2, epitome_shape=(16, 6, 3, 3)),  # wrapping
        nn.BatchNorm2d(16),
        EpitomeConv2d(16, 24, 1, bias=False, epitome_shape=(8, 8, 1, 1), group_length=2),  # both
        nn.BatchNorm2d(24),
        EpitomeConvTranspose2d(24, 8, 2, stride=2, epitome_shape=(12, 4, 2, 2)),
    )


def made_in_the_graph() -> nn.Module:
    return nn.Sequential(
        EpitomeConv2d(3, 32, 3, padding=1, epitome_shape=(16, 3, 3, 3), channel_starts="grid"),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        EpitomeConv2d(32, 32, 3, epitome_shape=(16, 16, 5, 5), spatial_starts="out"),
        EpitomeConv2d(32, 16, 3, epitome_shape=(4, 16, 4, 4)),  # product map of a kernel with spatial starts
        EpitomeConv2d(16, 32, 1, groups=2, epitome_shape=(4, 8, 1, 1)),  # each group has a copy of the filters
    )


def fine() -> nn.Module:
    return nn.Sequential(
        EpitomeConv2d(3, 200, 1, epitome_shape=(24, 3, 1, 1), block_out=1),
        nn.ReLU(),
        EpitomeConv2d(200, 8, 1, epitome_shape=(8, 24, 1, 1), block_in=1),
    )


def one_axis() -> nn.Module:
    return nn.Sequential(
        EpitomeConv1d(4, 16, 3, epitome_shape=(8, 4, 3)), nn.ReLU(), EpitomeConv1d(16, 4, 3, epitome_shape=(4, 4, 3))
    )


def linear() -> nn.Module:
    return nn.Sequential(
        EpitomeLinear(8, 32, epitome_shape=(8, 8)), nn.ReLU(), EpitomeLinear(32, 6, epitome_shape=(6, 8))
    )


NETS = {
    "two_axes": (two_axes, (3, 9, 9)),
    "made_in_the_graph": (made_in_the_graph, (3, 9, 9)),
    "fine": (fine, (3, 4, 4)),
    "one_axis": (one_axis, (4, 12)),
    "linear": (linear, (8,)),
}
