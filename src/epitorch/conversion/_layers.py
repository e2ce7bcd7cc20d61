"""Which modules hold a weight that an epitome can generate, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from epitorch.errors import ConversionError, explain
from epitorch.folding import folded
from epitorch.nn import (
    EpitomeConv1d,
    EpitomeConv2d,
    EpitomeConv3d,
    EpitomeConvTranspose1d,
    EpitomeConvTranspose2d,
    EpitomeConvTranspose3d,
    EpitomeLayer,
    EpitomeLinear,
    name_clashes,
)
from epitorch.plans import Reason

BEFORE_SCRIPTING = "convert the model before it is scripted or traced, then script it"
EPITOME_CLASSES: dict[type[nn.Module], type[EpitomeLayer]] = {
    nn.Conv1d: EpitomeConv1d,
    nn.Conv2d: EpitomeConv2d,
    nn.Conv3d: EpitomeConv3d,
    nn.ConvTranspose1d: EpitomeConvTranspose1d,
    nn.ConvTranspose2d: EpitomeConvTranspose2d,
    nn.ConvTranspose3d: EpitomeConvTranspose3d,
    nn.Linear: EpitomeLinear,
}
_WITH_WEIGHT: tuple[type[nn.Module], ...] = (EpitomeLayer, *EPITOME_CLASSES)


def weight_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every convolution and linear layer, dense or epitome, each module once.

    The linear layers of index learners are no layers of the model and are left out.
    """
    inside = learner_modules(model)
    for name, module in model.named_modules():
        if isinstance(module, _WITH_WEIGHT) and id(module) not in inside:
            yield name, module


def learner_modules(model: nn.Module) -> set[int]:
    learners = [layer.learner for layer in model.modules() if isinstance(layer, EpitomeLayer)]
    return {id(module) for learner in learners if learner is not None for module in learner.modules()}


def why_left(module: nn.Module) -> Reason | None:
    """Say why a layer cannot be converted by itself, or None if it can."""
    if isinstance(module, EpitomeLayer):
        return "already_epitome"
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    if not isinstance(module, tuple(EPITOME_CLASSES)):
        return "quantized" if "quantized" in type(module).__module__ else "other_kind"
    if "forward" in module.__dict__:  # it may compute anything, and holds on to the old layer
        return "patched"
    plain = folded(module)[0]
    weight = plain._parameters.get("weight")
    if is_lazy(weight):
        return "lazy"
    if type(plain) not in EPITOME_CLASSES and name_clashes(plain):
        return "name_clash"
    return None if isinstance(weight, nn.Parameter) else "no_weight"


def refuse_scripted(model: nn.Module) -> None:
    """Raise ConversionError for a model whose graph is fixed."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError(
            explain(
                "a scripted or traced model cannot be changed",
                expected="the module that it was made from",
                got=type(model).__name__,
                fix=BEFORE_SCRIPTING,
            )
        )


def owners_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that hold each parameter."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return owners


def shape_of_weight(layer: Any) -> tuple[int, ...]:
    """`(0,)` where a subclass has none, or a lazy layer has none yet."""
    weight = folded(layer)[0]._parameters.get("weight")  # reading `layer.weight` may change a parametrised layer
    return (0,) if weight is None or is_lazy(weight) else tuple(weight.shape)


def is_lazy(value: object) -> bool:
    return isinstance(value, nn.UninitializedParameter)
