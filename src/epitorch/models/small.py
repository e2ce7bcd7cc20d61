"""A small network for 8x8 images, so that the demo trains in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def digits_cnn(num_classes: int = 10, *, channels: int = 1, widths: Sequence[int] = (32, 64, 96, 128)) -> nn.Sequential:
    """Return a plain network of 3x3 convolutions (with batch norm and ReLU), mean pooling and a classifier.

    Args:
        num_classes: Number of classes.
        channels: Channels of the images.
        widths: Filters of the convolutions; the second and every later even one halves the image.

    Returns:
        The network; its convolutions are the modules `conv1`, `conv2`, ...
    """
    net = nn.Sequential()
    for i, (before, after) in enumerate(zip((channels, *widths), widths, strict=False), start=1):
        stride = 2 if i % 2 == 0 else 1
        net.add_module(f"conv{i}", nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False))
        net.add_module(f"norm{i}", nn.BatchNorm2d(after))
        net.add_module(f"relu{i}", nn.ReLU(inplace=True))
    net.add_module("pool", _MeanPool())
    net.add_module("classifier", nn.Linear(widths[-1], num_classes))
    return net


class _MeanPool(nn.Module):
    """Mean over the image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))  # shape: (N, C)
