"""convert_: dense layers become epitome layers by a plan, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import isfinite
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from epitorch.conversion._layers import (
    BEFORE_SCRIPTING,
    EPITOME_CLASSES,
    learner_modules,
    owners_of_parameters,
    refuse_scripted,
    weight_layers,
    why_left,
)
from epitorch.conversion._report import Conversion, ConversionReport, layer_report, other_weights
from epitorch.conversion._surgery import keep_hooks, replace_modules
from epitorch.errors import ConversionError, EpitorchError, check_is_model, explain, suggest
from epitorch.folding import folded
from epitorch.nn import AdaptedLayer, EpitomeLayer, adapt
from epitorch.plans import LayerPlan, Plan, Reason
from epitorch.warmstart import fit_layer

Init = Literal["fresh", "least_squares"]
_FUNCTIONAL = (NonDynamicallyQuantizableLinear,)  # torch's attention reads the weight of its output projection
_CONV = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
)
_REMEDY: dict[Reason, str] = {
    "already_epitome": "call to_dense_ first",
    "scripted": BEFORE_SCRIPTING,
    "quantized": "convert the floating-point model, before it is quantised",
    "lazy": "run the model once first, so that its shapes are known",
    "patched": "put its own forward back, or make it a subclass",
}


def convert_(
    model: nn.Module, plan: Plan, *, init: Init = "fresh", moments: Mapping[str, Tensor] | None = None
) -> ConversionReport:
    """Replace the planned layers of `model` by epitome layers, in place.

    Everything is built and checked before the first layer is replaced, so a failure leaves the model as it was. With
    `init="fresh"` a converted layer draws an epitome with the standard deviation of the dense weight; what that weight
    had learned is gone. With "least_squares" epitome and starts are those whose weight is nearest to the dense one
    (`epitorch.warmstart`); batch norm then wants `epitorch.reestimate_batch_norm_`. Bias, dtype, device, mode,
    `requires_grad`, forward and backward hooks and name stay. A module that the model uses under several names is
    converted once. Subclasses of torch's layers keep their own forward, which then runs on the generated weight (weight
    standardisation, padding as in TensorFlow, ...). Weight normalisation, pruning and other parametrisations are
    folded: the layer is converted with the weight that they made. Attributes that a layer of torch's own class was
    given, and hooks on its state, do not stay; a subclass keeps them.

    Args:
        model: Any module.
        plan: Layers by qualified name.
        init: "fresh" or "least_squares".
        moments: For "least_squares": mean square of each input channel by layer, from `epitorch.activation_moments`;
            errors on loud channels then weigh more. Layers that are not in it are fitted unweighted.

    Returns:
        A report of every layer that has a weight; after "least_squares" with the error of each.

    Raises:
        ConversionError: If a planned layer does not exist, cannot be converted, or its plan does not fit.
    """
    check_is_model(model)
    _check_plan(plan)
    _check_init(init, moments)
    plan.check(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    refuse_scripted(model)
    layers = dict(weight_layers(model))
    owners, inside = owners_of_parameters(model), learner_modules(model)
    _check_moments(moments or {}, layers)
    replacements: dict[int, tuple[str, nn.Module, Conversion]] = {}
    for name, layer_plan in plan.layers.items():
        dense = _planned_layer(modules, name, inside)
        _refuse_shared(dense, name, owners)
        if id(dense) in replacements:
            raise ConversionError(
                explain(
                    f"'{name}' is planned twice",
                    expected="one entry for a module that the model uses under several names",
                    got=f"'{name}' and '{replacements[id(dense)][0]}' are the same module",
                )
            )
        replacements[id(dense)] = (name, dense, _converted(dense, layer_plan, name, init, (moments or {}).get(name)))
    new = {key: conversion for key, (_, _, conversion) in replacements.items()}
    report = ConversionReport(
        tuple(layer_report(plan, name, old, new.get(id(old))) for name, old in layers.items())
        + tuple(other_weights(model, layers.values()))
    )
    replace_modules(model, {key: conversion.layer for key, conversion in new.items()})
    return report


# ---- what is refused ----


def _check_plan(plan: object) -> None:
    wrong: list[object] = [] if isinstance(plan, Plan) else [plan]
    if isinstance(plan, Plan):
        wrong = [f"{name!r}: {layer!r}" for name, layer in plan.layers.items() if type(layer) is not LayerPlan]
    if wrong:
        raise ConversionError(
            explain(
                "this is not a plan",
                expected="epitorch.Plan({name: epitorch.LayerPlan(epitome_shape), ...})",
                got=wrong[0],
            )
        )


def _check_init(init: str, moments: object) -> None:
    known = list(get_args(Init))
    if init not in known:
        wrong = f"init is not known{suggest(str(init), known)}"
        raise ConversionError(explain(wrong, expected=" | ".join(known), got=repr(init)))
    if moments is not None and init != "least_squares":
        raise ConversionError(
            explain("moments have no effect here", expected="init='least_squares' with moments", got=f"init={init!r}")
        )


def _check_moments(moments: Mapping[str, Tensor], layers: Mapping[str, nn.Module]) -> None:
    values = list(moments.values()) if isinstance(moments, Mapping) else [moments]
    wrong = [value for value in values if not isinstance(value, Tensor)]
    if wrong:
        raise ConversionError(
            explain(
                "these are no moments",
                expected="a tensor by layer name, as epitorch.activation_moments gives them",
                got=f"{type(wrong[0]).__name__}: {wrong[0]!r:.80}",
            )
        )
    unknown = [name for name in moments if name not in layers]
    if unknown:
        raise ConversionError(
            explain(
                f"the moments name a layer that the model has not: '{unknown[0]}'{suggest(unknown[0], list(layers))}",
                expected="names of this model's convolutions and linear layers",
                got=", ".join(map(repr, unknown[:4])),
                fix="take the moments of the model itself, not of one that wraps it",
            )
        )


def _planned_layer(modules: dict[str, nn.Module], name: str, learners: set[int]) -> nn.Module:
    if name not in modules:
        raise ConversionError(
            explain(
                f"the plan names a layer that the model has not: '{name}'",
                expected="a qualified module name, as in model.named_modules()",
                got=f"'{name}'{suggest(name, list(modules))}",
            )
        )
    module = modules[name]
    reason: Reason | None = "other_kind" if not name or id(module) in learners else why_left(module)
    if reason is not None and reason != "name_clash":  # `adapt` says which attributes
        kinds = ", ".join(kind.__name__ for kind in EPITOME_CLASSES)
        raise ConversionError(
            explain(
                f"this layer cannot be converted: {reason}",
                expected=f"a part of the model of one of the kinds {kinds}, or of a subclass",
                got=f"{type(module).__module__}.{type(module).__name__}",
                where=name or "(the model itself)",
                fix=_REMEDY.get(reason, "leave it out of the plan"),
            )
        )
    return module


def _refuse_shared(dense: nn.Module, name: str, owners: dict[int, list[str]]) -> None:
    holders = owners.get(id(dense._parameters.get("weight")), [])
    if len(holders) > 1:
        raise ConversionError(
            explain(
                "the weight of this layer is shared with another module",
                expected="a parameter of its own",
                got=f"one parameter in {', '.join(holders)}",
                where=name,
                fix="leave the layer out of the plan, or give it a weight of its own first",
            )
        )


# ---- one layer ----


def _converted(dense: nn.Module, plan: LayerPlan, name: str, init: Init, moments: Tensor | None) -> Conversion:
    plain, names = folded(dense)
    options = {option.name: getattr(plan, option.name) for option in fields(plan)}
    if isinstance(dense, _FUNCTIONAL) and plan.index == "learner":
        raise ConversionError(
            explain(
                f"the weight of a {type(dense).__name__} is read without calling it: a learner would see no features",
                expected="index='direct' or index='fixed'",
                got="index='learner'",
                where=name,
            )
        )
    try:
        layer = _same_kind(plain, options) if type(plain) in EPITOME_CLASSES else adapt(plain, options)
        _take_over(layer, plain, name)
        weight = plain._parameters["weight"]
        assert weight is not None
        if init == "least_squares":
            # fixed starts stay on whole positions: plans count on it
            fit = fit_layer(layer, weight, moments=moments, fractional=layer.index != "fixed")
        else:
            fit = None
    except EpitorchError as error:
        said = str(error)
        raise ConversionError(said if said.startswith(f"{name}: ") else f"{name}: {said}") from error
    return Conversion(layer, names, fit)


def _same_kind(dense: Any, options: dict[str, Any]) -> EpitomeLayer:
    if isinstance(dense, nn.Linear):
        shape: dict[str, Any] = {"in_features": dense.in_features, "out_features": dense.out_features}
    else:
        shape = {argument: getattr(dense, argument) for argument in _CONV}
        if isinstance(dense, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            shape["output_padding"] = dense.output_padding
    factory: dict[str, Any] = {"device": dense.weight.device, "dtype": dense.weight.dtype}
    return EPITOME_CLASSES[type(dense)](**shape, **factory, bias=dense.bias is not None, **options)


@torch.no_grad()
def _take_over(layer: EpitomeLayer, dense: Any, name: str) -> None:
    layer.qualified_name = name
    if not dense.weight.is_meta:
        std = float(dense.weight.float().std(correction=0))
        if isfinite(std):  # zero for the last layer of a residual branch that begins as the identity
            layer.init_epitome(std)
    if not dense.weight.requires_grad:  # its starts must not move it either
        for part in (layer.epitome, *layer.routing_map.parameters(), *_learner_parameters(layer)):
            part.requires_grad_(False)
    if layer.bias is not None and not isinstance(layer, AdaptedLayer):  # that one has the dense layer's own
        layer.bias.copy_(dense.bias)
        layer.bias.requires_grad_(dense.bias.requires_grad)
    layer.train(dense.training)
    keep_hooks(dense, layer)


def _learner_parameters(layer: EpitomeLayer) -> Iterable[nn.Parameter]:
    return () if layer.learner is None else layer.learner.parameters()
