"""EfficientNet: timm's networks, their squeeze-excitation made grouped if wanted, and their epitome plan."""

from __future__ import annotations

from math import sqrt
from typing import Any

from torch import nn

from epitorch.errors import ConversionError, InputError, check_is_model, explain, require, suggest
from epitorch.models.inverted import Compression, Index, Policy, inverted_residual_plan
from epitorch.plans import Plan

VARIANTS = ("b0", "b1")


def efficientnet(
    variant: str = "b0",
    num_classes: int = 1000,
    *,
    grouped_squeeze: bool = False,
    dropout: float = 0.2,
) -> nn.Module:
    """timm's EfficientNet with fresh weights.

    Args:
        variant: `b0` or `b1`.
        num_classes: Outputs of the classifier.
        grouped_squeeze: See `group_squeeze_excitation_`.
        dropout: Before the classifier.

    Raises:
        InputError: If there is no such variant.
        MissingExtraError: If timm is not installed.
    """
    if variant not in VARIANTS:
        asked = f"there is no EfficientNet '{variant}' here{suggest(str(variant), list(VARIANTS))}"
        raise InputError(explain(asked, expected=" | ".join(VARIANTS), got=repr(variant)))
    timm = require("timm", "models")
    model = timm.create_model(f"efficientnet_{variant}", num_classes=num_classes, drop_rate=dropout)
    if grouped_squeeze:
        group_squeeze_excitation_(model)
    return model


def efficientnet_plan(
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
    """The paper's plan for EfficientNet: the two 1x1 convolutions of each block with an expansion.

    The first is compressed along its filters, the second along its inputs, as in MobileNetV2. Squeeze-excitation,
    depthwise convolutions, the blocks with t = 1, last convolution and classifier stay: the paper does not say which
    layers it compresses, and this reading gives both printed sizes (3.92 and 5.46 M at c = 0.5).

    Args:
        model: EfficientNet (not version 2) from timm, torchvision or `epitorch.models`, grouped squeeze or not.
        c: Share of the hidden channels that the epitomes keep, `0 < c <= 1`.
        last_conv: Compress the last convolution along its filters by c too.
        classifier: Compress the classifier along its inputs by this share.
        policy: `uniform` or `front_heavy`, see `epitorch.models.inverted.Compression`.
        index: How starts come about.
        group_length: Super-index length; epitome sizes become multiples of it.
        momentum: mu of the routing map.

    Returns:
        A plan that names every layer with a weight: converted, or left with the reason.

    Raises:
        ConversionError: If the model has other blocks, or c is out of range.

    Example:
        >>> model = efficientnet("b0")
        >>> len(efficientnet_plan(model, 0.5).layers)
        30
    """
    return inverted_residual_plan(model, Compression(c, last_conv, classifier, policy, index, group_length, momentum))


def group_squeeze_excitation_(model: nn.Module) -> list[str]:
    """Make the two convolutions of each squeeze-excitation grouped, a group for each squeezed channel.

    The authors' later model has them so. It is another backbone, not a compression of this one: the new convolutions
    begin with weights of their own, drawn as timm draws them. To be done before converting.

    Args:
        model: Of timm, changed in place.

    Returns:
        Names of the convolutions that were replaced.

    Raises:
        ConversionError: If there is no squeeze-excitation of timm's, or a width is no multiple of the squeezed one.
    """
    check_is_model(model)
    found = [(name, module) for name, module in model.named_modules() if _is_squeeze(module)]
    if not found:
        raise ConversionError(
            explain(
                "nothing to group",
                expected="squeeze-excitation of timm's EfficientNet: convolutions conv_reduce and conv_expand",
                got=type(model).__name__,
            )
        )
    for name, module in found:
        _check_divides(name, module.conv_reduce)
    for _, module in found:
        groups = module.conv_reduce.out_channels
        module.conv_reduce = _grouped(module.conv_reduce, groups)
        module.conv_expand = _grouped(module.conv_expand, groups)
    return [f"{name}.{conv}" for name, _ in found for conv in ("conv_reduce", "conv_expand")]


def _is_squeeze(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Conv2d) for name in ("conv_reduce", "conv_expand"))


def _check_divides(name: str, conv: nn.Conv2d) -> None:
    if conv.in_channels % conv.out_channels:
        raise ConversionError(
            explain(
                "this squeeze-excitation cannot be grouped",
                expected=f"a multiple of its {conv.out_channels} squeezed channels",
                got=f"{conv.in_channels} channels",
                where=name,
            )
        )


def _grouped(conv: nn.Conv2d, groups: int) -> nn.Conv2d:
    weight = conv.weight
    new = nn.Conv2d(conv.in_channels, conv.out_channels, 1, groups=groups, device=weight.device, dtype=weight.dtype)
    nn.init.normal_(new.weight, 0, sqrt(2 * groups / conv.out_channels))  # variance 2 / fan-out of a group
    assert new.bias is not None
    nn.init.zeros_(new.bias)
    return new
