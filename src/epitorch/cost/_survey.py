"""What a planner has to know of a model: its layers in the order of use, what they cost, and which cannot convert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from epitorch.conversion import EPITOME_CLASSES, refuse_scripted, weight_layers, why_left
from epitorch.cost._trace import Calls, Trace, as_arguments, eval_copy, tensors, trace
from epitorch.cost.analysis import BEYOND_THE_LAYER, cost_of, geometry_of
from epitorch.cost.formulas import Geometry
from epitorch.errors import ConversionError, EpitorchError, InputError, check_is_model, explain
from epitorch.folding import folded
from epitorch.nn import EpitomeLayer
from epitorch.plans import Reason, Selector, WeightFacts, check_selectors, selected
from epitorch.spec import semantic_order

_UNUSED = Geometry(0, 0)


@dataclass(frozen=True)
class Candidate:
    """A layer that can get an epitome.

    Args:
        name: Qualified name.
        shape: Of the weight, semantic: `(out, in, *kernel)`.
        geometry: Where the layer is applied; no positions if only its weight is read.
        called: The model calls its forward; otherwise an index learner would see no features.
        own_forward: A subclass: what it does with its weight is not known, so it is always run with the whole weight.
        params: Parameters that go when it is converted: the weight, or what the weight is made from.
        weight_making: Multiply-adds per sample of a parametrisation (spectral norm, ...), which conversion folds.
    """

    name: str
    shape: tuple[int, ...]
    geometry: Geometry
    called: bool
    own_forward: bool
    params: int
    weight_making: int = 0

    @property
    def madds(self) -> int:
        """Multiply-adds per sample of the layer as it is."""
        return prod(self.shape) * self.geometry.kernel_positions + self.weight_making


@dataclass(frozen=True)
class Survey:
    """One forward pass, evaluated.

    Args:
        model: Class of the model.
        params: Parameters, shared ones once, without learners, as `count` has them.
        madds: Executed multiply-adds per sample, as `count` has them.
        candidates: In the order in which the model uses them first.
        left: All other layers with a weight, and why.
        facts: Of every layer whose weight has a shape, in the order of the model's modules.
    """

    model: str
    params: int
    madds: int
    candidates: tuple[Candidate, ...]
    left: Mapping[str, Reason]
    facts: Mapping[str, WeightFacts]


def survey(
    model: nn.Module,
    example_input: Any,
    *,
    skip: Collection[Selector] = (),
    only: Collection[Selector] = (),
    depthwise: bool = False,
    uncalled: bool = False,
) -> Survey:
    """Run a copy of the model once and list its layers.

    Args:
        model: Any model; it is not changed.
        example_input: A tensor, or a tuple of the model's arguments.
        skip: Layers to leave: name patterns, types, or functions of name and layer.
        only: Where given, all other layers are left too.
        depthwise: Depthwise convolutions are candidates too.
        uncalled: So are layers that the model does not use on the example in eval mode, auxiliary heads for example:
            they are parameters all the same.

    Raises:
        ConversionError: If the model has no parameters, a layer without shape, or cannot be changed at all.
        InputError: If the model does not run on the example, or a name pattern means no layer.
    """
    check_model(model)
    watched = _copied(model)
    layers = dict(weight_layers(watched))
    check_selectors("skip", skip, layers)
    check_selectors("only", only, layers)
    reads = _Reads({id(layer._parameters.get("weight")): name for name, layer in layers.items()})
    record = _run(watched, example_input, reads)
    owners = Counter(id(p) for module in watched.modules() for p in module._parameters.values() if p is not None)
    left, candidates = _others(watched, layers), []
    cost = cost_of(watched, record)
    beyond = {row.where: row.madds for row in cost.operators if row.operator == BEYOND_THE_LAYER}
    for name in sorted(layers, key=lambda name: reads.order.get(name, len(layers))):
        is_meant = (not only or selected(only, name, layers[name])) and not selected(skip, name, layers[name])
        reason = _obstacle(name, layers[name], owners, is_meant, depthwise)
        calls = record.calls.get(name)
        called = calls is not None and calls.count > 0
        if reason is None and not uncalled and not called and name not in reads.order:
            reason = "not_called"
        if reason is not None:
            left[name] = reason
        else:
            candidates.append(_candidate(name, layers[name], calls if called else None, record, beyond.get(name, 0)))
    madds = {row.name: row.madds for row in cost.layers if row.calls}
    facts = {name: _facts(layer, madds.get(name)) for name, layer in layers.items() if _shape(layer)}
    return Survey(type(model).__name__, cost.params, cost.madds, tuple(candidates), left, facts)


def check_model(model: nn.Module) -> None:
    """Refuse what has nothing to plan."""
    check_is_model(model)
    refuse_scripted(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConversionError(
                explain(
                    "a lazy layer has no shape yet",
                    expected="sizes",
                    got="none",
                    where=name,
                    fix="run the model once first",
                )
            )
    if next(model.parameters(), None) is None:
        raise ConversionError(
            explain(
                "the model has no parameters",
                expected="a model with convolutions or linear layers",
                got=f"{type(model).__name__} without parameters{_quantized_note(model)}",
            )
        )


def _quantized_note(model: nn.Module) -> str:
    found = next((type(module).__name__ for module in model.modules() if _is_quantized(module)), None)
    return f" (quantised layers such as {found} keep their weights packed)" if found else ""


def _copied(model: nn.Module) -> nn.Module:
    try:
        return eval_copy(model)
    except Exception as error:  # whatever the model's own code may raise
        raise InputError(
            explain("the model cannot be copied", expected="a model that copy.deepcopy takes", got=error)
        ) from error


def _run(watched: nn.Module, example_input: Any, reads: _Reads) -> Trace:
    try:
        with reads:
            return trace(watched, as_arguments(example_input))
    except EpitorchError:
        raise
    except Exception as error:  # whatever the model's own code may raise
        raise InputError(
            explain(
                "the model does not run on the example input",
                expected="a tensor, or a tuple of arguments, that model(*arguments) takes",
                got=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                fix="give an input of the shape and type that the model is used with (--input)",
            )
        ) from error


class _Reads(TorchDispatchMode):
    """Notes which weights operators read, in the order of the first time: by forward, or past it."""

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.weights = weights
        self.order: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors((args, kwargs)):
            name = self.weights.get(id(tensor))
            if name is not None:
                self.order.setdefault(name, len(self.order))
        return func(*args, **(kwargs or {}))


def _obstacle(name: str, layer: Any, owners: Counter[int], is_meant: bool, depthwise: bool) -> Reason | None:
    """Why this layer is no candidate, whatever the model does with it."""
    if isinstance(layer, EpitomeLayer):
        return "already_epitome"
    if not name:
        return "whole_model"
    if not is_meant:
        return "skipped"
    reason = why_left(layer)
    if reason is not None:
        return reason
    if any(owners[id(parameter)] > 1 for parameter in _behind_weight(layer)):
        return "shared_weight"
    is_depthwise = getattr(layer, "groups", 1) > 1 and _semantic(layer)[1] == 1
    return "depthwise" if is_depthwise and not depthwise else None


def _others(watched: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Reason]:
    """Layers whose weight is out of reach: packed by quantisation, or compiled."""
    left: dict[str, Reason] = {}
    for name, module in watched.named_modules():
        if name in layers:
            continue
        if _is_quantized(module):
            left[name] = "quantized"
        elif isinstance(module, torch.jit.ScriptModule) and next(module.parameters(recurse=False), None) is not None:
            left[name] = "scripted"
    return left


def _is_quantized(module: nn.Module) -> bool:
    return callable(getattr(module, "_weight_bias", None))


def _candidate(name: str, layer: nn.Module, calls: Calls | None, record: Trace, beyond: int) -> Candidate:
    transposed, groups = bool(getattr(layer, "transposed", False)), getattr(layer, "groups", 1)
    geometry = Geometry(0, 0, groups, transposed) if calls is None else geometry_of(calls, record)
    own_forward = type(folded(layer)[0]) not in EPITOME_CLASSES
    making = 0 if own_forward else beyond  # what a forward of its own does stays
    return Candidate(name, _semantic(layer), geometry, calls is not None, own_forward, _params_held(layer), making)


def _facts(layer: Any, madds: int | None) -> WeightFacts:
    shape = _shape(layer)
    held = prod(shape) if isinstance(layer, EpitomeLayer) else _params_held(layer)
    return WeightFacts(shape, bool(getattr(layer, "transposed", False)), None if held == prod(shape) else held, madds)


def _params_held(layer: Any) -> int:
    """Parameters that go when the layer is converted: folding a weight norm takes its lengths away too."""
    plain: Any = folded(layer)[0]
    sizes = [sum(p.numel() for p in module.parameters()) for module in (layer, plain)]
    return sizes[0] - sizes[1] + plain.weight.numel()


def _behind_weight(layer: nn.Module) -> list[nn.Parameter]:
    """The weight, or the parameters that it is made from."""
    weight = layer._parameters.get("weight")
    if isinstance(weight, nn.Parameter):
        return [weight]
    kept = {name for name, _ in folded(layer)[0].named_parameters()}
    return [p for name, p in layer.named_parameters() if name not in kept]


def _shape(layer: Any) -> tuple[int, ...]:
    if isinstance(layer, EpitomeLayer):
        return layer.weight_shape
    weight = getattr(layer, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


def _semantic(layer: Any) -> tuple[int, ...]:
    return semantic_order(_shape(layer), bool(getattr(layer, "transposed", False)))
