"""What a fused stage computes, as plain data: no module, no kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from epitorch.errors import ShapeError, explain

Activation = Literal["identity", "relu", "relu6", "silu", "hardswish"]
ACTIVATIONS: tuple[Activation, ...] = ("identity", "relu", "relu6", "silu", "hardswish")
Gate = Literal["sigmoid", "hardsigmoid"]
GATES: tuple[Gate, ...] = ("sigmoid", "hardsigmoid")
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
        positions = torch.arange(channels, dtype=torch.int64, device="cpu")
        return cls(positions, torch.zeros(channels, dtype=torch.float64, device="cpu"), channels)


@dataclass(frozen=True)
class Squeeze:
    """Squeeze-excitation: the channels after the depthwise are scaled by a gate made of their means over the image.

    Args:
        reduce: First matrix, shape (R, C).
        reduce_bias: Shape (R,).
        restore: Second matrix, shape (C, R).
        restore_bias: Shape (C,).
    """

    reduce: Tensor
    reduce_bias: Tensor
    restore: Tensor
    restore_bias: Tensor

    def tensors(self) -> list[Tensor]:
        """In the order of the arguments."""
        return [self.reduce, self.reduce_bias, self.restore, self.restore_bias]


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
        squeeze: Activation between the matrices of the squeeze-excitation, and its gate; None without one.
    """

    kind: Kind
    stride: int = 1
    padding: int = 0
    activations: tuple[Activation, Activation, Activation] = ("identity", "identity", "identity")
    residual: bool = False
    group_in: int = 1
    group_out: int = 1
    squeeze: tuple[Activation, Gate] | None = None

    def encode(self) -> list[int]:
        """As integers, for operators."""
        numbers = [ACTIVATIONS.index(name) for name in self.activations]
        rest = [self.stride, self.padding, *numbers, int(self.residual), self.group_in, self.group_out]
        squeeze = (
            (-1, -1) if self.squeeze is None else (ACTIVATIONS.index(self.squeeze[0]), GATES.index(self.squeeze[1]))
        )
        return [KINDS.index(self.kind), *rest, *squeeze]

    @classmethod
    def decode(cls, numbers: list[int]) -> Settings:
        """Back from integers."""
        kind, stride, padding, first, second, third, residual, group_in, group_out, between, gate = numbers
        names = (ACTIVATIONS[first], ACTIVATIONS[second], ACTIVATIONS[third])
        squeeze = None if gate < 0 else (ACTIVATIONS[between], GATES[gate])
        return cls(KINDS[kind], stride, padding, names, bool(residual), group_in, group_out, squeeze)


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
        squeeze: Squeeze-excitation between the depthwise and the last 1x1, or None.
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
    squeeze: Squeeze | None = None

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
        squeeze = [] if self.squeeze is None else self.squeeze.tensors()
        return [value for value in found if value is not None] + squeeze

    @classmethod
    def of(cls, tensors: list[Tensor], numbers: list[int]) -> Stage:
        """Back from `tensors()` and `Settings.encode()`."""
        settings = Settings.decode(numbers)
        if settings.kind != "block":
            return cls(settings, tensors[0], tensors[1])
        project, bias, expand, lower, fraction, scale, shift, depthwise, depthwise_bias, to, share = tensors[:11]
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
            None if settings.squeeze is None else Squeeze(*tensors[11:]),
        )

    def map(self, change: Any) -> Stage:
        """The same with every floating tensor but the fractions changed."""
        names = ("project", "bias", "expand", "scale", "shift", "depthwise", "depthwise_bias")
        values = {name: getattr(self, name) for name in names}
        changed = {name: change(value) for name, value in values.items() if value is not None}
        if self.squeeze is not None:
            changed["squeeze"] = Squeeze(*map(change, self.squeeze.tensors()))
        return replace(self, **changed)

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


def check_input(settings: Settings, kernel: int, channels: int, x: Tensor) -> None:
    """Refuse an input that does not fit, before a kernel reads past its end.

    Args:
        settings: Of the stage that reads it.
        kernel: Side of the stage's window.
        channels: Channels that the stage has.
        x: The input; expected shape (N, channels, H, W).

    Raises:
        ShapeError: If it has other axes or channels, or is smaller than the window.
    """
    if x.dim() != 4 or x.shape[1] != channels:
        what = f"shape {tuple(x.shape)}" if x.dim() != 4 else f"{x.shape[1]} channels, shape {tuple(x.shape)}"
        raise ShapeError(
            explain(
                "this input does not fit the fused stage",
                expected=f"{channels} channels, shape (N, {channels}, H, W)",
                got=what,
                fix="give what the trained network takes: a batch of images in channels first order",
            )
        )
    check_size(settings, kernel, x.shape[2], x.shape[3])


def check_size(settings: Settings, kernel: int, height: int, width: int) -> None:
    """Refuse images smaller than the window.

    Raises:
        ShapeError: If not one window fits.
    """
    least = max(1, kernel - 2 * settings.padding)
    if height < least or width < least:
        raise ShapeError(
            explain(
                "this image is too small for the fused stage",
                expected=f"at least {least} x {least} pixels: kernel {kernel}, padding {settings.padding}",
                got=f"{height} x {width} pixels",
                fix="give larger images",
            )
        )


def check_stage(stage: Stage) -> None:
    """Refuse tensors that do not fit each other: a kernel would read or write outside of them.

    Raises:
        ShapeError: If a size is another than its stage's or a tap is outside its circle.
    """
    for name, got, expected in _sizes(stage):
        if got != expected:
            raise ShapeError(explain(f"a fused stage's {name} does not fit", expected=expected, got=got))
    for name, taps in (("taps_in", stage.taps_in), ("taps_out", stage.taps_out)):
        if taps is not None and taps.lower.numel():
            least, most = int(taps.lower.min()), int(taps.lower.max())
            if least < 0 or most >= taps.size:
                asked, expected = f"a fused stage's {name} are not on their circle", f"0 to {taps.size - 1}"
                raise ShapeError(explain(asked, expected=expected, got=f"{least} to {most}"))


def _sizes(stage: Stage) -> list[tuple[str, object, object]]:
    """Name, actual and expected size of everything."""
    found: list[tuple[str, object, object]] = [("bias", tuple(stage.bias.shape), (stage.out_channels,))]
    if stage.settings.residual:
        found.append(("input under the residual", stage.in_channels, stage.out_channels))
        steps = (stage.settings.stride, 2 * stage.settings.padding + 1)
        found.append(("stride and padding under the residual", steps, (1, stage.kernel)))
    if stage.settings.kind != "block":
        axes = 4 if stage.settings.kind == "stem" else 2
        return [*found, ("weight's number of axes", stage.project.dim(), axes), *_square(stage.project)]
    a, b, weight = stage.taps_in, stage.taps_out, stage.depthwise
    assert a is not None
    assert b is not None
    assert weight is not None
    channels, side = weight.shape[0], weight.shape[-1]
    found.append(("depthwise", tuple(weight.shape), (channels, 1, side, side)))
    found.append(("project", tuple(stage.project.shape), (stage.out_channels, b.size)))
    found.append(("product map", a.size, channels if stage.expand is None else stage.expand.shape[0]))
    vectors = {
        "taps_in.lower": a.lower,
        "taps_in.fraction": a.fraction,
        "taps_out.lower": b.lower,
        "taps_out.fraction": b.fraction,
        "scale": stage.scale,
        "shift": stage.shift,
        "depthwise_bias": stage.depthwise_bias,
    }
    found += [(name, tuple(v.shape), (channels,)) for name, v in vectors.items() if v is not None]
    return found + _squeeze_sizes(stage, channels)


def _squeeze_sizes(stage: Stage, channels: int) -> list[tuple[str, object, object]]:
    squeeze = stage.squeeze
    if squeeze is None:
        return [("squeeze-excitation", stage.settings.squeeze, None)]
    narrow = squeeze.reduce.shape[0]
    expected = [(narrow, channels), (narrow,), (channels, narrow), (channels,)]
    return [("squeeze-excitation", [tuple(value.shape) for value in squeeze.tensors()], expected)]


def _square(weight: Tensor) -> list[tuple[str, object, object]]:
    return [("weight's height", weight.shape[2], weight.shape[3])] if weight.dim() == 4 else []
