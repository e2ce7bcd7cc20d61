"""Fused stages in torch's own operators: any device and dtype, differentiable, the fallback of the kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from epitorch.deploy._fused_block import Activation, Stage, check_input


def run_reference(stage: Stage, x: Tensor) -> Tensor:
    """Compute one stage.

    Args:
        stage: Its tensors have the dtype and device of `x`.
        x: Shape (N, in_channels, H, W).

    Returns:
        Shape (N, out_channels, H', W').

    Raises:
        ShapeError: If the input does not fit.
    """
    settings = stage.settings
    check_input(settings, stage.kernel, stage.in_channels, x)
    if settings.kind == "stem":
        y = F.conv2d(x, stage.project, stage.bias, settings.stride, settings.padding)
    elif settings.kind == "pointwise":
        y = F.conv2d(x, stage.project[:, :, None, None], stage.bias)
    else:
        y = F.conv2d(_middle(stage, x), stage.project[:, :, None, None], stage.bias)
    y = activate(y, settings.activations[2])
    return y + x if settings.residual else y


def activate(x: Tensor, name: Activation) -> Tensor:
    """Apply an activation by name."""
    if name == "identity":
        return x
    return {"relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish}[name](x)


def _middle(stage: Stage, x: Tensor) -> Tensor:
    """Product map, interpolation, depthwise convolution, wrapped sums; shape (N, O2, H', W')."""
    settings, a, b = stage.settings, stage.taps_in, stage.taps_out
    assert a is not None
    assert b is not None
    assert stage.scale is not None
    assert stage.shift is not None
    product_map = x if stage.expand is None else F.conv2d(x, stage.expand[:, :, None, None])
    lower, upper = product_map.index_select(1, a.lower), product_map.index_select(1, a.upper)
    share = _column(a.fraction.to(x.dtype))
    expanded = (lower * (1 - share) + upper * share) * _column(stage.scale) + _column(stage.shift)
    expanded = activate(expanded, settings.activations[0])
    weight, channels = stage.depthwise, expanded.shape[1]
    assert weight is not None
    filtered = F.conv2d(expanded, weight, stage.depthwise_bias, settings.stride, settings.padding, groups=channels)
    filtered = activate(filtered, settings.activations[1])
    if stage.squeeze is not None:
        filtered = filtered * _gate(stage, filtered.mean((2, 3), keepdim=True))
    share = _column(b.fraction.to(x.dtype))
    sums = filtered.new_zeros(filtered.shape[0], b.size, *filtered.shape[2:])
    return sums.index_add(1, b.lower, filtered * (1 - share)).index_add(1, b.upper, filtered * share)


def _gate(stage: Stage, means: Tensor) -> Tensor:
    """Factor of every expanded channel, shape (N, C, 1, 1), from their means, of the same shape."""
    squeeze, how = stage.squeeze, stage.settings.squeeze
    assert squeeze is not None
    assert how is not None
    narrow = activate(F.conv2d(means, squeeze.reduce[:, :, None, None], squeeze.reduce_bias), how[0])
    gate = F.conv2d(narrow, squeeze.restore[:, :, None, None], squeeze.restore_bias)
    return gate.sigmoid() if how[1] == "sigmoid" else F.hardsigmoid(gate)


def _column(values: Tensor) -> Tensor:
    return values[:, None, None]
