"""MobileNetV2: the paper's backbone, its narrowed baseline "MobileNetV2-c*", and its epitome plan."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from epitorch.errors import ConversionError, InputError, check_is_model, explain, require
from epitorch.plans import LayerPlan, Plan, Reason, planned_params

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
_BLOCK_NAMES = ("InvertedResidual", "DepthwiseSeparableConv")


def scaled(c: float, channels: int, multiple: int = 1) -> int:
    """`int(c * channels)`, rounded down to a multiple and never below it; safe against 0.29 * 100 = 28.999..."""
    return max(multiple, int(c * channels + 1e-9) // multiple * multiple)


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
    index: Literal["learner", "direct", "fixed"] = "learner",
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
        index: How starts come about.
        group_length: Super-index length; epitome sizes become multiples of it.
        momentum: mu of the routing map.

    Returns:
        A plan that names every layer with a weight: converted, or left with the reason.

    Raises:
        ConversionError: If the model has no inverted residuals, or c is out of range.
    """
    check_is_model(model)
    for name, share in (("c", c), ("classifier", classifier)):
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise ConversionError(explain(f"{name} is out of range", expected="0 < share <= 1", got=repr(share)))
    layers: dict[str, LayerPlan] = {}
    left: dict[str, Reason] = {}

    def compress(name: str, dense: Any, axis: int, share: float) -> None:
        shape = list(dense.weight.shape)
        shape[axis] = scaled(share, shape[axis], group_length or 1)
        layers[name] = LayerPlan(tuple(shape), index=index, group_length=group_length, momentum=momentum)

    inside: set[str] = set()
    for convs in _blocks(model):
        inside.update(convs)
        names = list(convs)
        expands = len(names) >= 3 and convs[names[0]].kernel_size == (1, 1)
        for name in names:
            left[name] = "middle" if expands else "no_expansion"
            if convs[name].groups > 1:
                left[name] = "depthwise"
        if expands:
            compress(names[0], convs[names[0]], 0, c)
            compress(names[-1], convs[names[-1]], 1, c)
    stem, *rest = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and n not in inside]
    left[stem[0]] = "stem"
    for name, conv in rest:
        left[name] = "last_conv"
        if last_conv:
            compress(name, conv, 0, c)
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            left[name] = "classifier"
            if classifier is not None:
                compress(name, linear, 1, classifier)
    return Plan(layers, {name: reason for name, reason in left.items() if name not in layers})


def fit_mobilenetv2_plan(
    model: nn.Module,
    params: int,
    *,
    last_conv: bool = False,
    classifier: float | None = None,
    index: Literal["learner", "direct", "fixed"] = "learner",
    group_length: int | None = None,
    momentum: float = 0.97,
) -> tuple[Plan, float]:
    """The plan with the largest c whose total parameters do not exceed `params`, found by bisection.

    Returns:
        The plan and its c.

    Raises:
        ConversionError: If even the smallest epitomes are too large.
    """

    def plan_for(c: float) -> Plan:
        return mobilenetv2_plan(
            model,
            c,
            last_conv=last_conv,
            classifier=classifier,
            index=index,
            group_length=group_length,
            momentum=momentum,
        )

    low, high = 1e-4, 1.0
    least = planned_params(model, plan_for(low))
    if least > params:
        raise ConversionError(
            explain("the budget cannot be met", expected=f"at least {least:,} parameters", got=f"{params:,}")
        )
    if planned_params(model, plan_for(high)) <= params:
        return plan_for(high), high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if planned_params(model, plan_for(middle)) <= params else (low, middle)
    return plan_for(low), low


def _blocks(model: nn.Module) -> list[dict[str, Any]]:
    """The convolutions of each inverted residual, by qualified name and in order."""
    blocks = []
    for name, module in model.named_modules():
        if any(kind.__name__ in _BLOCK_NAMES for kind in type(module).__mro__):
            parts = module.named_modules(prefix=name)
            blocks.append({part: conv for part, conv in parts if isinstance(conv, nn.Conv2d)})
    if not blocks:
        raise ConversionError(
            explain(
                "this plan is for MobileNetV2",
                expected="a model with inverted residual blocks (timm or torchvision)",
                got=type(model).__name__,
            )
        )
    return blocks
