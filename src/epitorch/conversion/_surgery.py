"""Putting layers into a model in place of others."""

from __future__ import annotations

from typing import Any

from torch import nn

from epitorch.errors import ConversionError, check_is_model, explain
from epitorch.nn import EpitomeLayer

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_is_full_backward_hook",
    "_backward_pre_hooks",
)


def to_dense_(model: nn.Module) -> nn.Module:
    """Replace every epitome layer of `model` by torch's own layer with the generated weight, in place.

    Returns:
        The model, or the dense layer if `model` is itself an epitome layer.
    """
    check_is_model(model)
    layers = [module for module in model.modules() if isinstance(module, EpitomeLayer)]
    for layer in layers:
        refuse_derived(layer, "epitome", layer.qualified_name or type(layer).__name__)
    if isinstance(model, EpitomeLayer):
        return keep_hooks(model, model.to_dense())
    replace_modules(model, {id(layer): keep_hooks(layer, layer.to_dense()) for layer in layers})
    return model


def keep_hooks(old: nn.Module, new: nn.Module) -> nn.Module:
    """Move the hooks of a layer to the one that takes its place, and return that."""
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    return new


def replace_modules(model: nn.Module, new: dict[int, Any]) -> None:
    """Put `new[id(module)]` wherever the model uses `module`, under all its names."""
    for parent in [*model.modules(), *new.values()]:  # a new layer may hold a part that is replaced as well
        for name, child in list(parent._modules.items()):  # not named_children: it skips a module's second name
            if id(child) in new:
                setattr(parent, name, new[id(child)])


def refuse_derived(layer: nn.Module, name: str, where: str) -> None:
    """Weight norm, spectral norm and pruning make the tensor in a hook or a parametrisation: it cannot be replaced."""
    if isinstance(layer._parameters.get(name), nn.Parameter):
        return
    raise ConversionError(
        explain(
            f"'{name}' of this layer is made from other tensors",
            expected=f"a parameter '{name}'",
            got="weight normalisation, pruning or another parametrisation",
            where=where,
            fix="make it permanent first (remove_weight_norm, prune.remove, remove_parametrizations), or leave it out",
        )
    )
