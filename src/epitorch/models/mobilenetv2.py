"""MobileNetV2: the paper's backbone, its narrowed baseline "MobileNetV2-c*", and its epitome plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from epitorch.errors import InputError, explain, require
from epitorch.models.inverted import (
    Compression,
    Index,
    Policy,
    fit_inverted_residual_plan,
    inverted_residual_plan,
    scaled,
)
from epitorch.plans import Plan

__all__ = ["fit_mobilenetv2_plan", "mobilenetv2", "mobilenetv2_plan", "scaled"]

_HIDDEN_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_LAST_CHANNELS = 1280


def mobilenetv2(
    num_classes: int = 1000,
    *,
    hidden_width: float = 1.0,
    last_width: float = 1.0,
    cifar: bool = False,
    stem_stride: int | None = None,
    dropout: float = 0.2,
) -> nn.Module:
    """torchvision's MobileNetV2 with the hidden channels of its inverted residuals narrowed.

    "MobileNetV2-c*" of the paper is `hidden_width=c`: a block with expansion t on k channels has `int(c*t*k)` hidden
    channels, its input and output stay. On CIFAR-10 the last convolution is narrowed too (`last_width=c`).

    Args:
        num_classes: Outputs of the classifier.
        hidden_width: c on the hidden channels; the first block (t = 1) stays.
        last_width: c on the 1280 channels of the last convolution.
        cifar: Strides for 32x32 images: stem and second stage keep the resolution.
        stem_stride: Stride of the stem; default 1 with `cifar`, else 2.
        dropout: Before the classifier.

    Returns:
        A `torchvision.models.MobileNetV2` with fresh weights.

    Raises:
        InputError: If a width is not above 0.
    """
    for name, width in (("hidden_width", hidden_width), ("last_width", last_width)):
        if not width > 0:
            raise InputError(explain(f"{name} is not valid", expected="a number above 0", got=repr(width)))
    mobilenet = require("torchvision.models.mobilenetv2", "models")

    def block(inp: int, oup: int, stride: int, expand_ratio: int, norm_layer: Any) -> nn.Module:
        ratio = expand_ratio if expand_ratio == 1 else scaled(hidden_width, expand_ratio * inp) / inp
        return mobilenet.InvertedResidual(inp, oup, stride, expand_ratio=ratio, norm_layer=norm_layer)

    stages = [list(stage) for stage in _HIDDEN_STAGES]
    if cifar:
        stages[1][3] = 1
    model: Any = mobilenet.MobileNetV2(
        num_classes=num_classes, inverted_residual_setting=stages, block=block, dropout=dropout
    )
    stride = stem_stride if stem_stride is not None else (1 if cifar else 2)
    model.features[0][0].stride = (stride, stride)
    _narrow_last(model, scaled(last_width, _LAST_CHANNELS))
    return model


def _narrow_last(model: Any, channels: int) -> None:
    """Give the last convolution another number of filters, initialised as torchvision does."""
    if channels == _LAST_CHANNELS:
        return
    conv, old = model.features[-1][0], model.classifier[1]
    model.features[-1][0] = nn.Conv2d(conv.in_channels, channels, 1, bias=False)
    model.features[-1][1] = nn.BatchNorm2d(channels)
    model.classifier[1] = nn.Linear(channels, old.out_features)
    nn.init.kaiming_normal_(model.features[-1][0].weight, mode="fan_out")
    nn.init.normal_(model.classifier[1].weight, 0, 0.01)
    nn.init.zeros_(model.classifier[1].bias)
    model.last_channel = channels


def mobilenetv2_plan(
    model: nn.Module,
    c: float,
    *,
    last_conv: bool = False,
    classifier: float | None = None,
    policy: Policy = "uniform",
    index: Index = "learner",
    group_length: int | None = None,
    momentum: float = 0.97,
) -> Plan:
    """The paper's plan: in each inverted residual the first 1x1 along the filters, the second along its inputs.

    Epitomes are `(int(c*t*k), k)` and `(k', int(c*t*k))`; depthwise convolutions and the block with t = 1 stay.

    Args:
        model: MobileNetV2 from timm, torchvision or `epitorch.models`.
        c: Share of the hidden channels that the epitomes keep, `0 < c <= 1`.
        last_conv: Compress the last convolution along its filters by c too (the paper on CIFAR-10).
        classifier: Compress the classifier along its inputs by this share.
        policy: `uniform`, or `front_heavy`: the paper's "-A", see `epitorch.models.inverted.Compression`.
        index: How starts come about.
        group_length: Super-index length; epitome sizes become multiples of it.
        momentum: mu of the routing map.

    Returns:
        A plan that names every layer with a weight: converted, or left with the reason.

    Raises:
        ConversionError: If the model has no inverted residuals, or c is out of range.
    """
    return inverted_residual_plan(model, Compression(c, last_conv, classifier, policy, index, group_length, momentum))


def fit_mobilenetv2_plan(
    model: nn.Module,
    params: int,
    *,
    last_conv: bool = False,
    classifier: float | None = None,
    policy: Policy = "uniform",
    index: Index = "learner",
    group_length: int | None = None,
    momentum: float = 0.97,
) -> tuple[Plan, float]:
    """The plan with the largest c whose total parameters do not exceed `params`, found by bisection.

    Returns:
        The plan and its c.

    Raises:
        ConversionError: If even the smallest epitomes are too large.
    """
    options = Compression(1.0, last_conv, classifier, policy, index, group_length, momentum)
    return fit_inverted_residual_plan(model, params, options)
