"""fuse(net): put fused stages in the place of what they compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from epitorch.cost._trace import as_arguments, quiet
from epitorch.cost.analysis import aligned
from epitorch.deploy._fused_match import (
    Declined,
    block_stage,
    conv_stage,
    is_inverted_residual,
    is_known,
    is_triple,
    own_code,
    timm_triple,
)
from epitorch.deploy._parity import check_parity
from epitorch.deploy.fused import FusedChain, FusedConv, FusedInvertedResidual, FusedStage
from epitorch.errors import InputError, explain
from epitorch.nn import EpitomeLayer

# timm keeps a convolution and its batch norm (with the activation inside) side by side
_PAIRS = (
    (("timm.models.efficientnet", "EfficientNet", "forward_features"), (("conv_stem", "bn1"), ("conv_head", "bn2"))),
    (("timm.models.mobilenetv3", "MobileNetV3", "forward_features"), (("conv_stem", "bn1"),)),
)


@dataclass(frozen=True)
class FusedLayer:
    """One block or convolution that the pass looked at.

    Args:
        name: Qualified name.
        kind: Class of the module.
        reason: Why it was left; empty if it was fused.
    """

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class FusionReport:
    """Report of `fuse`; `str()` is a table.

    Args:
        layers: Everything that the pass looked at.
    """

    layers: tuple[FusedLayer, ...]

    @property
    def fused(self) -> tuple[FusedLayer, ...]:
        """What runs as one operator now."""
        return tuple(layer for layer in self.layers if not layer.reason)

    def __str__(self) -> str:
        rows = [(layer.name, layer.kind, layer.reason or "fused") for layer in self.layers]
        return "\n".join(aligned([("layer", "kind", "result"), *rows], left=(0, 1, 2)))


def fuse(net: nn.Module, example_input: Tensor | tuple[Any, ...] | None = None) -> nn.Module:
    """Run a deployed network's inverted residuals as single operators.

    Recognised are the blocks of MobileNetV2, MobileNetV3 and EfficientNet of torchvision and timm
    (`InvertedResidual`, `DepthwiseSeparableConv`, `MBConv`), with squeeze-excitation or without, whose 1x1
    convolutions run on their epitomes, and around them the stem and plain 1x1 convolutions. Batch norms are folded; an
    `nn.Sequential` runs stages that follow each other in one call of the native kernel and keeps its children. What
    has anything else (hooks, other kernels, a subclass, a forward of its own) is left.

    Args:
        net: From `epitorch.deploy(model, x, strategy="reuse")`, in eval mode; it stays as it is.
        example_input: A tensor, or a tuple of the network's arguments: the outputs on it are compared.

    Returns:
        A copy. Its attribute `fusion` is the report (`FusionReport`).

    Raises:
        InputError: If the network is in training mode or was not deployed.
        ParityError: If the outputs on the example differ.
    """
    if net.training or any(isinstance(module, EpitomeLayer) for module in net.modules()):
        raise InputError(
            explain(
                "this network cannot be fused",
                expected='a network from epitorch.deploy(model, x, strategy="reuse"), in eval mode',
                got="a network in training mode" if net.training else "epitome layers as they are trained",
            )
        )
    given, net = net, copy.deepcopy(net)
    rows: list[FusedLayer] = []
    root = nn.ModuleDict({"net": net})
    for name, parent, child in list(_parents(root)):
        if is_inverted_residual(child):
            _replace_block(rows, name, parent, child)
    if any(not row.reason for row in rows):
        _fuse_convolutions(rows, root)
        _link(root)
    made = root["net"]
    setattr(made, "fusion", FusionReport(tuple(rows)))  # noqa: B010 - nn.Module declares tensors and modules only
    if example_input is not None:
        check_parity(_output(given, example_input), _output(made, example_input))
    return made


def _output(net: nn.Module, example_input: Tensor | tuple[Any, ...]) -> Any:
    """Of a copy: a network may keep something of what it saw."""
    with quiet(net):
        return copy.deepcopy(net)(*as_arguments(example_input))


def _parents(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    for prefix, parent in root.named_modules():
        for name, child in parent.named_children():
            full = f"{prefix}.{name}".lstrip(".").removeprefix("net").lstrip(".")
            yield full, parent, child


def _replace_block(rows: list[FusedLayer], name: str, parent: nn.Module, block: nn.Module) -> None:
    reason = ""
    try:
        _set(parent, block, FusedInvertedResidual(block_stage(block)))
    except Declined as declined:
        reason = str(declined)
    rows.append(FusedLayer(name, type(block).__name__, reason))


def _set(parent: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Under every name that the parent has for it."""
    for name, child in list(parent._modules.items()):
        if child is old:
            parent._modules[name] = new.eval()


def _fuse_convolutions(rows: list[FusedLayer], root: nn.Module) -> None:
    """torchvision's triples of convolution, batch norm and activation; timm's pairs."""
    blocks = tuple(f"{row.name}." for row in rows)
    for name, parent, child in list(_parents(root)):
        if name.startswith(blocks):
            continue
        if is_triple(child) and isinstance(child.get_submodule("0"), nn.Conv2d):
            _try_conv(rows, name, parent, child, tuple(child.children()))
        if triple := timm_triple(child):
            _try_conv(rows, name, parent, child, triple)
        for known, pairs in _PAIRS:
            if is_known(child, *known) and "forward" not in vars(child):
                _fuse_pairs(rows, name, child, pairs)


def _fuse_pairs(rows: list[FusedLayer], name: str, net: nn.Module, pairs: tuple[tuple[str, str], ...]) -> None:
    for conv, norm in pairs:
        pair: Any = (getattr(net, conv, None), getattr(net, norm, None))
        pairs_up = isinstance(pair[0], nn.Conv2d) and hasattr(pair[1], "act")
        if pairs_up and _try_conv(rows, f"{name}.{conv}".lstrip("."), net, pair[0], (*pair, pair[1].act)):
            _set(net, pair[1], nn.Identity())


def _try_conv(
    rows: list[FusedLayer],
    name: str,
    parent: nn.Module,
    old: nn.Module,
    parts: tuple[nn.Module, ...],
) -> bool:
    reason = ""
    try:
        if own_code(old):
            raise Declined(own_code(old))
        _set(parent, old, FusedConv(conv_stage(*parts)))
    except Declined as declined:
        reason = str(declined)
    rows.append(FusedLayer(name, type(old).__name__, reason))
    return not reason


def _link(net: nn.Module) -> None:
    """Make chains of plain `nn.Sequential`s with stages in them, innermost first; their children stay."""
    for child in net.children():
        _link(child)
    exact = type(net) is nn.Sequential and "forward" not in vars(net)
    if exact and any(isinstance(child, FusedStage | FusedChain) for child in net.children()):
        net.__class__ = FusedChain
