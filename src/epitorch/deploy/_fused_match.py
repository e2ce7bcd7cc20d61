"""Recognise inverted residuals and plain convolutions in a deployed network, and fold their batch norms."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epitorch.deploy._fused_block import Activation, Gate, Settings, Squeeze, Stage, Taps
from epitorch.deploy.reuse_layers import ReuseConv
from epitorch.functional import split_starts

_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}
_GATES: dict[type[nn.Module], Gate] = {nn.Sigmoid: "sigmoid", nn.Hardsigmoid: "hardsigmoid"}
_TIMM_GATES: dict[str, Gate] = {"Sigmoid": "sigmoid", "HardSigmoid": "hardsigmoid"}
_DO_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)  # in eval mode
_BLOCKS = (
    ("torchvision.models.mobilenetv2", "InvertedResidual"),
    ("timm.models._efficientnet_blocks", "InvertedResidual"),
    ("timm.models._efficientnet_blocks", "DepthwiseSeparableConv"),
    ("torchvision.models.mobilenetv3", "InvertedResidual"),
    ("torchvision.models.efficientnet", "MBConv"),
)
_TIMM_TRIPLE = ("timm.models._efficientnet_blocks", "ConvBnAct")
_IN_A_BLOCK = _BLOCKS[3:]  # classes that keep their parts in a sequence `block`
# class, first matrix, activation, second matrix, gate
_SQUEEZES = (
    ("timm.models._efficientnet_blocks", "SqueezeExcite", ("conv_reduce", "act1", "conv_expand", "gate")),
    ("timm.layers.squeeze_excite", "SEModule", ("fc1", "act", "fc2", "gate")),
    ("torchvision.ops.misc", "SqueezeExcitation", ("fc1", "activation", "fc2", "scale_activation")),
)
_FEW_CHANNELS = 4  # a stem reads its window directly, which pays only for images


_UNKNOWN = "another inverted residual than those of MobileNet and EfficientNet"


class Declined(Exception):
    """Why a module is left as it is."""


@dataclass(frozen=True)
class Norm:
    """Batch norm and activation after a convolution.

    Args:
        scale: Shape (C,).
        shift: Shape (C,).
        activation: By name.
    """

    scale: Tensor
    shift: Tensor
    activation: Activation


@dataclass(frozen=True)
class Parts:
    """An inverted residual taken apart; `first` is None without expansion, `squeeze` without squeeze-excitation."""

    first: tuple[Any, Norm] | None
    depthwise: tuple[Any, Norm]
    last: tuple[Any, Norm]
    residual: bool
    squeeze: nn.Module | None = None


def is_inverted_residual(module: nn.Module) -> bool:
    """By the class names of torchvision and timm; whether it is one that is known, `block_stage` looks at."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return bool(names & {"InvertedResidual", "DepthwiseSeparableConv", "MBConv"})


def is_known(module: nn.Module, where: str, name: str, method: str = "forward") -> bool:
    """Whether a module is of this very class, no subclass, and the class runs what it was written with.

    Args:
        module: Any module.
        where: The class's Python module, which need not be installed.
        name: The class's name.
        method: What has to be the class's own.
    """
    kind: Any = type(module)
    if kind is not getattr(sys.modules.get(where), name, None) or method in vars(module):
        return False
    run = getattr(kind, method)
    return (run.__module__, run.__qualname__) == (where, f"{name}.{method}")


def is_triple(module: nn.Module, parts: tuple[int, ...] = (3,)) -> bool:
    """Whether a module is torchvision's convolution, batch norm and activation in a row.

    Args:
        module: Any module.
        parts: How many modules may be in it; 2 has no activation.
    """
    kind: Any = type(module)
    known = kind is getattr(sys.modules.get("torchvision.ops.misc"), "Conv2dNormActivation", None)
    return known and kind.forward is nn.Sequential.forward and len(module._modules) in parts


def timm_triple(module: Any) -> tuple[nn.Module, ...]:
    """Convolution, batch norm and activation of timm's block that is nothing else; empty if it is another module."""
    if not is_known(module, *_TIMM_TRIPLE) or module.has_skip or not hasattr(module.bn1, "act"):
        return ()
    plain = _does_nothing(module.aa) and isinstance(module.conv, nn.Conv2d)
    return (module.conv, module.bn1, module.bn1.act) if plain else ()


def own_code(module: nn.Module) -> str:
    """What would no longer run if a module were replaced, as a reason; empty if there is nothing.

    Args:
        module: Looked at alone, without its children.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "backward hooks"
    return "a forward of its own" if "forward" in vars(module) else ""


@torch.no_grad()
def block_stage(module: nn.Module) -> Stage:
    """Fold an inverted residual.

    Raises:
        Declined: If it has anything that a fused stage does not compute.
    """
    _check_plain(module)
    if not any(is_known(module, where, name) for where, name in _BLOCKS):
        raise Declined(_UNKNOWN)
    for part in module.modules():
        _check_plain(part)
    parts = _parts(module)
    conv, norm = parts.depthwise
    _check_depthwise(conv)
    if parts.first is not None and not any(isinstance(c, ReuseConv) for c in (parts.first[0], parts.last[0])):
        raise Declined("no epitome")
    channels = conv.weight.shape[0]
    expand, taps_in, scale, shift, first = _expansion(parts.first, channels, conv.weight)
    project, taps_out, bias, last = _projection(parts.last, channels)
    activations = (first, norm.activation, last)
    how, squeeze = (None, None) if parts.squeeze is None else _squeeze(parts.squeeze, channels)
    groups = taps_in.group, taps_out.group
    settings = Settings("block", conv.stride[0], conv.padding[0], activations, parts.residual, *groups, how)
    depthwise = conv.weight * norm.scale[:, None, None, None]
    depthwise_bias = norm.shift if conv.bias is None else norm.shift + norm.scale * conv.bias
    middle = expand, taps_in, scale, shift, depthwise, depthwise_bias, taps_out
    return Stage(settings, project, bias, *middle, squeeze)


@torch.no_grad()
def conv_stage(conv: nn.Module, bn: nn.Module, act: nn.Module) -> Stage:
    """Fold a convolution with its batch norm and activation: a stem of few channels, or a 1x1.

    Raises:
        Declined: If it is another kind of convolution.
    """
    for module in (conv, *bn.modules(), act):
        _check_plain(module)
    if type(conv) is not nn.Conv2d or conv.groups != 1:
        raise Declined("not a plain convolution")
    norm = _norm(bn, act)
    pointwise = _is_1x1(conv)
    if not pointwise and (conv.in_channels > _FEW_CHANNELS or not _is_square(conv)):
        raise Declined("neither a stem nor a 1x1 convolution")
    padding = conv.padding[0]
    weight = conv.weight * norm.scale[:, None, None, None]
    settings = Settings(
        "pointwise" if pointwise else "stem",
        conv.stride[0],
        int(padding),
        ("identity", "identity", norm.activation),
    )
    return Stage(settings, weight.flatten(1) if pointwise else weight, _bias(conv, norm))


# ---- taking blocks apart ----


def _parts(block: nn.Module) -> Parts:
    if hasattr(block, "conv_dw"):
        return _timm_parts(block)
    in_a_block = any(is_known(block, where, name) for where, name in _IN_A_BLOCK)
    return _torchvision_block_parts(block) if in_a_block else _torchvision_parts(block)


def _timm_parts(block: Any) -> Parts:
    for name in ("conv_s2d", "bn_s2d"):
        if getattr(block, name, None) is not None:
            raise Declined("space to depth")
    for name, reason in (("aa", "anti-aliasing"), ("drop_path", "drop path")):
        if not _does_nothing(getattr(block, name, None)):
            raise Declined(reason)
    se = getattr(block, "se", None)
    rest = block.has_skip, None if _does_nothing(se) else se
    if hasattr(block, "conv_pwl"):
        first = block.conv_pw, _norm(block.bn1)
        return Parts(first, (block.conv_dw, _norm(block.bn2)), (block.conv_pwl, _norm(block.bn3)), *rest)
    return Parts(None, (block.conv_dw, _norm(block.bn1)), (block.conv_pw, _norm(block.bn2)), *rest)


def _torchvision_parts(block: Any) -> Parts:
    body = getattr(block, "conv", None)
    residual = getattr(block, "use_res_connect", None)
    if type(body) is not nn.Sequential or not isinstance(residual, bool):
        raise Declined(_UNKNOWN)
    layers = [layer for part in body for layer in (part.children() if is_triple(part) else (part,))]
    if len(layers) not in (5, 8):
        raise Declined(_UNKNOWN)
    *head, conv, bn = layers
    units = [(head[at], _norm(head[at + 1], head[at + 2])) for at in range(0, len(head), 3)]
    return Parts(units[0] if len(units) == 2 else None, units[-1], (conv, _norm(bn)), residual)


def _torchvision_block_parts(block: Any) -> Parts:
    """Of MobileNetV3 and EfficientNet: triples in a row, a squeeze-excitation before the last."""
    if type(block.block) is not nn.Sequential:
        raise Declined(_UNKNOWN)
    *units, last = block.block.children()
    squeeze = units.pop() if units and not is_triple(units[-1], (2, 3)) else None
    units.append(last)
    if len(units) not in (2, 3) or not all(is_triple(unit, (2, 3)) for unit in units):
        raise Declined(_UNKNOWN)
    parts = [list(unit.children()) for unit in units]
    pairs = [(conv, _norm(*rest)) for conv, *rest in parts]
    return Parts(pairs[0] if len(pairs) == 3 else None, pairs[-2], pairs[-1], block.use_res_connect, squeeze)


def _squeeze(module: Any, channels: int) -> tuple[tuple[Activation, Gate], Squeeze]:
    names = next((names for where, name, names in _SQUEEZES if is_known(module, where, name)), None)
    if names is None or getattr(module, "add_maxpool", False) or not _does_nothing(getattr(module, "bn", None)):
        raise Declined("another squeeze-excitation than MobileNet's")
    reduce, act, restore, gate = (getattr(module, name) for name in names)
    how = _gate(gate)
    if type(act) not in _ACTIVATIONS or how is None:
        raise Declined(f"squeeze-excitation with {type(act).__name__} and {type(gate).__name__}")
    a, b = _dense(reduce, channels), _dense(restore, reduce.out_channels)
    if (a[0].shape[0], b[0].shape[0]) != (reduce.out_channels, channels):
        raise Declined("squeeze-excitation of another width")
    return (_ACTIVATIONS[type(act)], how), Squeeze(*a, *b)


def _gate(module: nn.Module) -> Gate | None:
    """By name; None if it is another one."""
    own = (how for name, how in _TIMM_GATES.items() if is_known(module, "timm.layers.activations", name))
    return _GATES.get(type(module)) or next(own, None)


def _dense(conv: Any, channels: int) -> tuple[Tensor, Tensor]:
    """A 1x1's matrix and bias whatever it runs as: of a squeeze-excitation, which works on one pixel."""
    if type(conv) not in (nn.Conv2d, ReuseConv) or not _is_1x1(conv) or conv.in_channels != channels:
        raise Declined("squeeze-excitation with other convolutions than 1x1")
    like = conv.weight if type(conv) is nn.Conv2d else conv.epitome
    bias = like.new_zeros(conv.out_channels) if conv.bias is None else conv.bias
    if type(conv) is nn.Conv2d:
        return conv.weight.flatten(1), bias
    units = torch.eye(channels, dtype=like.dtype, device=like.device)[:, :, None, None]
    return (conv(units).flatten(1) - bias).T.contiguous(), bias


def _norm(bn: Any, act: nn.Module | None = None) -> Norm:
    """Batch norm as scale and shift; timm's holds its activation itself."""
    _check_plain(bn)
    holds = is_known(bn, "timm.layers.norm_act", "BatchNormAct2d")
    if type(bn) is not nn.BatchNorm2d and not holds:
        raise Declined(f"{type(bn).__name__} instead of a batch norm")
    if bn.running_mean is None or bn.training:
        raise Declined("batch norm over the batch")
    own = bn.act if holds else nn.Identity()
    if holds and not _does_nothing(bn.drop):
        raise Declined("dropout in the batch norm")
    if act is not None and act is not own and type(own) is not nn.Identity:
        raise Declined("two activations")
    act = own if act is None else act
    if type(act) not in _ACTIVATIONS:
        raise Declined(f"activation {type(act).__name__}")
    scale = torch.rsqrt(bn.running_var + bn.eps) * (1 if bn.weight is None else bn.weight)
    return Norm(scale, (0 if bn.bias is None else bn.bias) - bn.running_mean * scale, _ACTIVATIONS[type(act)])


# ---- the convolutions ----


def _expansion(
    first: tuple[Any, Norm] | None, channels: int, like: Tensor
) -> tuple[Tensor | None, Taps, Tensor, Tensor, Activation]:
    if first is None:
        identity = Taps.identity(channels)
        return None, _on(identity, like), like.new_ones(channels), like.new_zeros(channels), "identity"
    conv, norm = first
    matrix, taps = _matrix(conv, "product_map", channels)
    return matrix, taps, norm.scale, _bias(conv, norm), norm.activation


def _projection(last: tuple[Any, Norm], channels: int) -> tuple[Tensor, Taps, Tensor, Activation]:
    conv, norm = last
    matrix, taps = _matrix(conv, "wrapping", channels)
    return matrix * norm.scale[:, None], taps, _bias(conv, norm), norm.activation


def _matrix(conv: Any, strategy: str, channels: int) -> tuple[Tensor, Taps]:
    """A 1x1's matrix, and which of its rows or columns each expanded channel meets."""
    _check_plain(conv)
    if not _is_1x1(conv):
        raise Declined("not a 1x1 convolution")
    if type(conv) not in (nn.Conv2d, ReuseConv):
        raise Declined(f"{type(conv).__name__} instead of a convolution")
    if type(conv) is nn.Conv2d:
        return conv.weight.flatten(1), _on(Taps.identity(channels), conv.weight)
    if conv.strategy != strategy:
        raise Declined(f"runs as {conv.strategy}")
    axis, size = (
        ("out", conv.spec.epitome_shape[0]) if strategy == "product_map" else ("in", conv.spec.epitome_shape[1])
    )
    block = conv.spec.block_out if axis == "out" else conv.spec.block_in
    starts = conv.starts().get(axis)
    return conv._weight.flatten(1), _on(_taps(starts, channels, size, block, conv.spec.group_length), conv.epitome)


def _taps(starts: Tensor | None, channels: int, size: int, block: int, group: int) -> Taps:
    position = torch.arange(channels, dtype=torch.int64, device="cpu")
    if starts is None:
        return Taps(position % size, torch.zeros(channels, dtype=torch.float64, device="cpu"), size)
    shift = split_starts(starts.double(), size, group)
    lower = (shift.base[position // block] + position % block) % size
    return Taps(lower, shift.fraction[position // block], size, group)


def _on(taps: Taps, like: Tensor) -> Taps:
    """On another tensor's device, fractions at least in float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return Taps(taps.lower.to(like.device), taps.fraction.to(like.device, dtype), taps.size, taps.group)


def _bias(conv: Any, norm: Norm) -> Tensor:
    return norm.shift if conv.bias is None else norm.shift + norm.scale * conv.bias


def _check_depthwise(conv: Any) -> None:
    _check_plain(conv)
    if type(conv) is not nn.Conv2d or conv.groups != conv.in_channels or conv.groups != conv.out_channels:
        raise Declined("not a depthwise convolution")
    if not _is_square(conv) or conv.kernel_size[0] not in (3, 5, 7):
        raise Declined("depthwise kernel, stride, padding or dilation")


def _is_square(conv: Any) -> bool:
    same = all(len(set(value)) == 1 for value in (conv.kernel_size, conv.stride, conv.dilation))
    padded = isinstance(conv.padding, tuple) and len(set(conv.padding)) == 1 and conv.padding_mode == "zeros"
    return same and padded and conv.stride[0] in (1, 2) and conv.dilation[0] == 1


def _is_1x1(conv: Any) -> bool:
    if not isinstance(conv, nn.Conv2d | ReuseConv) or not isinstance(conv.padding, tuple):
        return False
    sizes = (conv.kernel_size, conv.stride)
    return all(tuple(size) == (1, 1) for size in sizes) and not any(conv.padding) and conv.groups == 1


def _check_plain(module: nn.Module) -> None:
    reason = own_code(module) or ("training mode" if module.training else "")
    if reason:
        raise Declined(reason)


def _does_nothing(module: nn.Module | None) -> bool:
    """In eval mode."""
    if module is None or type(module) in _DO_NOTHING:
        return True
    return is_known(module, "timm.layers.drop", "DropPath")
