"""What a fused stage computes, as plain data: no module, no kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Activation = Literal["identity", "relu", "relu6", "silu", "hardswish"]
ACTIVATIONS: tuple[Activation, ...] = ("identity", "relu", "relu6", "silu", "hardswish")
Kind = Literal["block", "stem", "pointwise"]
KINDS: tuple[Kind, ...] = ("block", "stem", "pointwise")


@dataclass(frozen=True)
class Taps:
    """Every expanded channel meets two channels of a circle: a row of `A_out` or of `A_in` (method section 1).

    Args:
        lower: Channel that gets the share `1 - fraction`, int64, shape (C,).
        fraction: Share of the channel `group` further on, shape (C,).
        size: Channels on the circle.
        group: Super-index length g, 1 without.
    """

    lower: Tensor
    fraction: Tensor
    size: int
    group: int = 1

    @property
    def upper(self) -> Tensor:
        """Channel that gets the share `fraction`, shape (C,)."""
        return (self.lower + self.group) % self.size

    @classmethod
    def identity(cls, channels: int) -> Taps:
        """Every channel meets itself."""
        return cls(torch.arange(channels), torch.zeros(channels, dtype=torch.float64), channels)


@dataclass(frozen=True)
class Settings:
    """The numbers of one stage that are no tensors.

    Args:
        kind: "block" is an inverted residual, with or without its first 1x1; "stem" a plain convolution;
            "pointwise" a 1x1.
        stride: Of the depthwise convolution or the stem.
        padding: Likewise, zeros on every side.
        activations: After the first 1x1, after the depthwise, at the end. A stem or pointwise has the last only.
        residual: Add the input to the output.
        group_in: Super-index length of the first 1x1's filters.
        group_out: Super-index length of the last 1x1's inputs.
    """

    kind: Kind
    stride: int = 1
    padding: int = 0
    activations: tuple[Activation, Activation, Activation] = ("identity", "identity", "identity")
    residual: bool = False
    group_in: int = 1
    group_out: int = 1

    def encode(self) -> list[int]:
        """As integers, for operators."""
        numbers = [ACTIVATIONS.index(name) for name in self.activations]
        rest = [self.stride, self.padding, *numbers, int(self.residual), self.group_in, self.group_out]
        return [KINDS.index(self.kind), *rest]

    @classmethod
    def decode(cls, numbers: list[int]) -> Settings:
        """Back from integers."""
        kind, stride, padding, first, second, third, residual, group_in, group_out = numbers
        names = (ACTIVATIONS[first], ACTIVATIONS[second], ACTIVATIONS[third])
        return cls(KINDS[kind], stride, padding, names, bool(residual), group_in, group_out)


@dataclass(frozen=True)
class Stage:
    """One stage with its tensors. Batch norms are folded into `scale`, `shift`, `depthwise` and `project`.

    Args:
        settings: Everything else.
        expand: Epitome of the first 1x1, shape (O, I), or None: the depthwise runs on the input.
        taps_in: Which product-map channels each expanded channel mixes; None in a stem or pointwise.
        scale: Batch norm after the first 1x1, shape (C,).
        shift: Likewise.
        depthwise: Shape (C, 1, k, k).
        depthwise_bias: Shape (C,).
        taps_out: Which channels of the last 1x1's epitome each expanded channel meets.
        project: Epitome of the last 1x1, shape (K, O2); of a stem the weight, shape (K, I, k, k).
        bias: Shape (K,).
    """

    settings: Settings
    project: Tensor
    bias: Tensor
    expand: Tensor | None = None
    taps_in: Taps | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    depthwise: Tensor | None = None
    depthwise_bias: Tensor | None = None
    taps_out: Taps | None = None

    def tensors(self) -> list[Tensor]:
        """All of it in a fixed order, for operators; a block without a first 1x1 has an empty one."""
        if self.settings.kind != "block":
            return [self.project, self.bias]
        middle = [self.scale, self.shift, self.depthwise, self.depthwise_bias]
        a, b = self.taps_in, self.taps_out
        assert a is not None
        assert b is not None
        expand = self.project.new_zeros(0) if self.expand is None else self.expand
        found = [self.project, self.bias, expand, a.lower, a.fraction, *middle, b.lower, b.fraction]
        return [value for value in found if value is not None]

    @classmethod
    def of(cls, tensors: list[Tensor], numbers: list[int]) -> Stage:
        """Back from `tensors()` and `Settings.encode()`."""
        settings = Settings.decode(numbers)
        if settings.kind != "block":
            return cls(settings, tensors[0], tensors[1])
        project, bias, expand, lower, fraction, scale, shift, depthwise, depthwise_bias, to, share = tensors
        size = expand.shape[0] if expand.numel() else depthwise.shape[0]
        return cls(
            settings,
            project,
            bias,
            expand if expand.numel() else None,
            Taps(lower, fraction, size, settings.group_in),
            scale,
            shift,
            depthwise,
            depthwise_bias,
            Taps(to, share, project.shape[1], settings.group_out),
        )

    def map(self, change: Any) -> Stage:
        """The same with every floating tensor but the fractions changed."""
        names = ("project", "bias", "expand", "scale", "shift", "depthwise", "depthwise_bias")
        values = {name: getattr(self, name) for name in names}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})

    @property
    def kernel(self) -> int:
        """Side of the depthwise kernel or of the stem's, 1 for a pointwise stage."""
        weight = self.project if self.depthwise is None else self.depthwise
        return weight.shape[-1] if weight.dim() == 4 else 1

    @property
    def in_channels(self) -> int:
        """Channels of the input."""
        if self.settings.kind != "block":
            return self.project.shape[1]
        assert self.depthwise is not None
        return self.depthwise.shape[0] if self.expand is None else self.expand.shape[1]

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        return self.project.shape[0]


def output_size(settings: Settings, kernel: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of a stage's output."""
    if settings.kind == "pointwise":
        return height, width
    reach = 2 * settings.padding - kernel
    return (height + reach) // settings.stride + 1, (width + reach) // settings.stride + 1
