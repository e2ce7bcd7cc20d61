"""Layers whose weight is made from other tensors: weight and spectral normalisation, pruning, parametrisations."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def folded(layer: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the layer with plain parameters of the values that it has now in eval mode, and what was folded.

    A layer that has plain parameters already is returned itself, else a copy; the layer stays as it is. Its hooks
    are those of the layer, without the ones that made the weight.
    """
    hooks = [hook for hook in layer._forward_pre_hooks.values() if _makes_weight(hook)]
    if not hooks and not parametrize.is_parametrized(layer):
        return layer, ()
    plain = _copy(layer)
    plain.training = False  # spectral normalisation would take a step of its power iteration
    names = [_fold_hook(plain, hook) for hook in hooks]
    if parametrize.is_parametrized(plain):
        names += _fold_parametrizations(plain)
    plain.training = layer.training
    return plain, tuple(names)


def _makes_weight(hook: object) -> bool:
    return isinstance(hook, WeightNorm | SpectralNorm | prune.BasePruningMethod)


def _copy(layer: nn.Module) -> nn.Module:
    """A copy that shares the attributes, but no tensor and no registry that folding changes."""
    made = layer.__class__.__new__(layer.__class__)
    state = dict(layer.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        state[name] = dict(state[name])
    state |= {name: value.copy() for name, value in state.items() if name.endswith("_hooks") and hasattr(value, "copy")}
    made.__dict__.update(state)
    with torch.no_grad():
        made._parameters |= {name: copy.deepcopy(value) for name, value in made._parameters.items()}
        made._buffers |= {name: copy.deepcopy(value) for name, value in made._buffers.items()}
        if parametrize.is_parametrized(made):
            made._modules["parametrizations"] = copy.deepcopy(made._modules["parametrizations"])
    return made


def _fold_hook(layer: nn.Module, hook: Any) -> str:
    if isinstance(hook, WeightNorm):
        nn.utils.remove_weight_norm(layer, hook.name)
        return "weight_norm"
    if isinstance(hook, SpectralNorm):
        nn.utils.remove_spectral_norm(layer, hook.name)
        return "spectral_norm"
    prune.remove(layer, hook._tensor_name)
    return "pruning"


def _fold_parametrizations(layer: Any) -> list[str]:
    """By hand: torch's removal takes the property off the class, which the layer copied from still needs."""
    steps = layer._modules.pop("parametrizations").eval()
    layer.__class__ = type(layer).__bases__[0]
    names = []
    for tensor, made in steps.items():
        names += [type(step).__name__.lstrip("_") for step in made]
        with torch.no_grad():
            value = made()
        learned = any(original.requires_grad for original in made.parameters(recurse=False))
        layer.register_parameter(tensor, nn.Parameter(value, requires_grad=learned))
    return names
