"""A small network for 8x8 images, so that the demo trains in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from epitorch.errors import InputError, explain


def digits_cnn(num_classes: int = 10, *, channels: int = 1, widths: Sequence[int] = (16, 32, 48, 64)) -> nn.Sequential:
    """Return a plain network of 3x3 convolutions (with batch norm and ReLU), mean pooling and a classifier.

    Args:
        num_classes: Number of classes.
        channels: Channels of the images.
        widths: Filters of the convolutions; the second and every later even one halves the image.

    Returns:
        The network; its convolutions are the modules `conv1`, `conv2`, ...

    Raises:
        InputError: If a size is not a whole number above 0, or there are no widths.
    """
    sizes = (num_classes, channels, *widths)
    if not widths or not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(
            explain(
                "this network cannot be built",
                expected="num_classes, channels and at least one width, whole numbers above 0",
                got=f"num_classes={num_classes!r}, channels={channels!r}, widths={list(widths)!r}",
                where="digits_cnn",
            )
        )
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
