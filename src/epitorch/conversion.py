"""Conversion in place: dense layers to epitome layers by a plan, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from epitorch.errors import ConversionError, EpitorchError, explain, suggest
from epitorch.folding import folded
from epitorch.nn import (
    AdaptedLayer,
    EpitomeConv1d,
    EpitomeConv2d,
    EpitomeConv3d,
    EpitomeConvTranspose1d,
    EpitomeConvTranspose2d,
    EpitomeConvTranspose3d,
    EpitomeLayer,
    EpitomeLinear,
    adapt,
)
from epitorch.plans import LayerPlan, Plan, Reason
from epitorch.warmstart import FitResult, fit_layer

Init = Literal["fresh", "least_squares"]
EPITOME_CLASSES: dict[type[nn.Module], type[EpitomeLayer]] = {
    nn.Conv1d: EpitomeConv1d,
    nn.Conv2d: EpitomeConv2d,
    nn.Conv3d: EpitomeConv3d,
    nn.ConvTranspose1d: EpitomeConvTranspose1d,
    nn.ConvTranspose2d: EpitomeConvTranspose2d,
    nn.ConvTranspose3d: EpitomeConvTranspose3d,
    nn.Linear: EpitomeLinear,
}
_FUNCTIONAL = (NonDynamicallyQuantizableLinear,)  # torch's attention reads the weight of its output projection
_WITH_WEIGHT: tuple[type[nn.Module], ...] = (EpitomeLayer, *EPITOME_CLASSES)
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


@dataclass(frozen=True)
class LayerReport:
    """One layer that has a weight: converted, or left with its reason.

    Args:
        name: Qualified name; of a weight that is no layer's, its parameter's.
        kind: Class name.
        weight_shape: In the layer's storage order.
        epitome_shape: Likewise; None where there is no epitome.
        params_before: Elements of the weight.
        params_after: Elements of the epitome and the routing map.
        left: Why it is as it was; None where it was converted.
        own_forward: A subclass whose own forward runs on the generated weight.
        folded: What made the weight before: weight normalisation, pruning, ...
        error: Relative Frobenius error of the generated weight, after `init="least_squares"`.
        error_spread: The same with evenly spread starts and the best epitome for them.
    """

    name: str
    kind: str
    weight_shape: tuple[int, ...]
    epitome_shape: tuple[int, ...] | None
    params_before: int
    params_after: int
    left: Reason | None
    own_forward: bool = False
    folded: tuple[str, ...] = ()
    error: float | None = None
    error_spread: float | None = None

    @property
    def note(self) -> str:
        """What happened, in a few words."""
        if self.left is not None:
            return f"left: {self.left}"
        notes = ["converted"]
        notes += ["an expansion"] if self.params_after > self.params_before else []
        notes += ["its own forward kept"] if self.own_forward else []
        notes += [f"{name} folded" for name in self.folded]
        if self.error is not None:
            notes += [f"error {self.error:.3f} (evenly spread starts {self.error_spread:.3f})"]
        return ", ".join(notes)


@dataclass(frozen=True)
class ConversionReport:
    """Every layer with a weight. `str(report)` is a table."""

    layers: tuple[LayerReport, ...]

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        """The layers that now have an epitome."""
        return tuple(layer for layer in self.layers if layer.left is None)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        """The layers that stayed as they were, each with its reason."""
        return tuple(layer for layer in self.layers if layer.left is not None)

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=5)
        rows = [f"{'layer':{width}}  {'weight':>20}  {'epitome':>20}  {'params':>19}  note"]
        for layer in self.layers:
            weight = "x".join(map(str, layer.weight_shape))
            epitome = "x".join(map(str, layer.epitome_shape or ())) or "-"
            change = f"{layer.params_before:,} > {layer.params_after:,}"
            rows.append(f"{layer.name:{width}}  {weight:>20}  {epitome:>20}  {change:>19}  {layer.note}")
        before, after = (sum(getattr(layer, f"params_{w}") for layer in self.layers) for w in ("before", "after"))
        rows.append(f"{len(self.converted)} converted, {len(self.left)} left; weights {before:,} > {after:,}")
        return "\n".join(rows)


@dataclass(frozen=True)
class _Conversion:
    layer: EpitomeLayer
    folded: tuple[str, ...]
    fit: FitResult | None


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
    folded: the layer is converted with the weight that they made.

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
    _check_plan(plan)
    _check_init(init, moments)
    plan.check(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    _refuse_scripted(model)
    layers = dict(weight_layers(model))
    owners, inside = _owners(model), _learner_modules(model)
    replacements: dict[int, tuple[str, nn.Module, _Conversion]] = {}
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
        tuple(_layer_report(plan, name, old, new.get(id(old))) for name, old in layers.items())
        + tuple(_other_weights(model, layers.values()))
    )
    replace_modules(model, {key: conversion.layer for key, conversion in new.items()})
    return report


def to_dense_(model: nn.Module) -> nn.Module:
    """Replace every epitome layer of `model` by torch's own layer with the generated weight, in place.

    Returns:
        The model, or the dense layer if `model` is itself an epitome layer.
    """
    layers = [module for module in model.modules() if isinstance(module, EpitomeLayer)]
    for layer in layers:
        _refuse_derived(layer, "epitome", layer.qualified_name or type(layer).__name__)
    if isinstance(model, EpitomeLayer):
        return keep_hooks(model, model.to_dense())
    replace_modules(model, {id(layer): keep_hooks(layer, layer.to_dense()) for layer in layers})
    return model


def weight_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every convolution and linear layer, dense or epitome, each module once.

    The linear layers of index learners are no layers of the model and are left out.
    """
    inside = _learner_modules(model)
    for name, module in model.named_modules():
        if isinstance(module, _WITH_WEIGHT) and id(module) not in inside:
            yield name, module


def _learner_modules(model: nn.Module) -> set[int]:
    learners = [layer.learner for layer in model.modules() if isinstance(layer, EpitomeLayer)]
    return {id(module) for learner in learners if learner is not None for module in learner.modules()}


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


def why_left(module: nn.Module) -> Reason | None:
    """Say why a layer cannot be converted by itself, or None if it can."""
    if isinstance(module, EpitomeLayer):
        return "already_epitome"
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    if not isinstance(module, tuple(EPITOME_CLASSES)):
        return "quantized" if "quantized" in type(module).__module__ else "other_kind"
    weight = folded(module)[0]._parameters.get("weight")
    if _is_lazy(weight):
        return "lazy"
    return None if isinstance(weight, nn.Parameter) else "no_weight"


_REMEDY: dict[Reason, str] = {
    "already_epitome": "call to_dense_ first",
    "scripted": "convert the model before it is scripted or traced",
    "quantized": "convert the floating-point model, before it is quantised",
    "lazy": "run the model once first, so that its shapes are known",
}


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
    if reason is not None:
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


def _refuse_scripted(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError(
            explain(
                "this model is scripted: its graph is fixed",
                expected="a model in Python",
                got=type(model).__name__,
                fix=_REMEDY["scripted"],
            )
        )


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that hold each parameter."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return owners


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


def _check_init(init: str, moments: object) -> None:
    known = list(get_args(Init))
    if init not in known:
        wrong = f"init is not known{suggest(str(init), known)}"
        raise ConversionError(explain(wrong, expected=" | ".join(known), got=repr(init)))
    if moments is not None and init != "least_squares":
        raise ConversionError(
            explain("moments have no effect here", expected="init='least_squares' with moments", got=f"init={init!r}")
        )


def _converted(dense: nn.Module, plan: LayerPlan, name: str, init: Init, moments: Tensor | None) -> _Conversion:
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
        fit = fit_layer(layer, weight, moments=moments) if init == "least_squares" else None
    except EpitorchError as error:
        raise ConversionError(f"{name}: {error}") from error
    return _Conversion(layer, names, fit)


def _same_kind(dense: Any, options: dict[str, Any]) -> EpitomeLayer:
    if isinstance(dense, nn.Linear):
        shape: dict[str, Any] = {"in_features": dense.in_features, "out_features": dense.out_features}
    else:
        shape = {argument: getattr(dense, argument) for argument in _CONV}
        if isinstance(dense, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            shape["output_padding"] = dense.output_padding
    factory: dict[str, Any] = {"device": dense.weight.device, "dtype": dense.weight.dtype}
    return EPITOME_CLASSES[type(dense)](**shape, **factory, bias=dense.bias is not None, **options)


def _shape_of_weight(layer: Any) -> tuple[int, ...]:
    """`(0,)` where a subclass has none, or a lazy layer has none yet."""
    weight = folded(layer)[0]._parameters.get("weight")  # reading `layer.weight` may change a parametrised layer
    return (0,) if weight is None or _is_lazy(weight) else tuple(weight.shape)


def _is_lazy(value: object) -> bool:
    return isinstance(value, nn.UninitializedParameter)


def _learner_parameters(layer: EpitomeLayer) -> Iterable[nn.Parameter]:
    return () if layer.learner is None else layer.learner.parameters()


def _refuse_derived(layer: nn.Module, name: str, where: str) -> None:
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


@torch.no_grad()
def _take_over(layer: EpitomeLayer, dense: Any, name: str) -> None:
    layer.qualified_name = name
    std = float(dense.weight.float().std(correction=0)) if not dense.weight.is_meta else 0.0
    if std > 0:
        layer.init_epitome(std)
    if not dense.weight.requires_grad:  # its starts must not move it either
        for part in (layer.epitome, *layer.routing_map.parameters(), *_learner_parameters(layer)):
            part.requires_grad_(False)
    if layer.bias is not None and not isinstance(layer, AdaptedLayer):  # that one has the dense layer's own
        layer.bias.copy_(dense.bias)
        layer.bias.requires_grad_(dense.bias.requires_grad)
    layer.train(dense.training)
    keep_hooks(dense, layer)


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


def _layer_report(plan: Plan, name: str, old: Any, new: _Conversion | None) -> LayerReport:
    layer = old if isinstance(old, EpitomeLayer) else None if new is None else new.layer
    shape = old.weight_shape if isinstance(old, EpitomeLayer) else _shape_of_weight(old)
    before = old.spec.num_epitome + old.spec.num_starts if isinstance(old, EpitomeLayer) else prod(shape)
    left: Reason | None = None if new else plan.left.get(name) or why_left(old) or "not_in_plan"
    return LayerReport(
        name,
        type(old).__name__,
        shape,
        None if layer is None else tuple(layer.epitome.shape),
        before,
        before if new is None else new.layer.spec.num_epitome + new.layer.spec.num_starts,
        left,
        isinstance(layer, AdaptedLayer),
        () if new is None else new.folded,
        None if new is None or new.fit is None else new.fit.error,
        None if new is None or new.fit is None else new.fit.error_spread,
    )


def _other_weights(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[LayerReport]:
    """Parameters of two or more axes that belong to no convolution or linear layer: embeddings, attention, ..."""
    inside = {id(part) for layer in layers for part in layer.modules()}
    for name, module in model.named_modules():
        for key, value in module._parameters.items():
            if id(module) not in inside and value is not None and not _is_lazy(value) and value.dim() > 1:
                shape, size = tuple(value.shape), value.numel()
                full_name = f"{name}.{key}" if name else key
                yield LayerReport(full_name, type(module).__name__, shape, None, size, size, "other_kind")
