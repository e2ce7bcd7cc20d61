"""Parameters and multiply-adds of a model, per layer and in total."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from epitorch.cost._between import interpolated_by, interpolated_of
from epitorch.cost._table import aligned, table
from epitorch.cost._trace import (
    Calls,
    Trace,
    as_arguments,
    deployed_layers,
    epitome_layers,
    eval_copy,
    is_linear,
    operator_kind,
    sample_shapes,
    trace,
)
from epitorch.cost.formulas import (
    KINDS,
    Choice,
    Geometry,
    Kind,
    Reason,
    Strategy,
    best,
    dense_madds,
    executed,
    paper_madds,
    why_not,
)
from epitorch.errors import check_is_model
from epitorch.nn import AdaptedLayer, EpitomeLayer

__all__ = [
    "BEYOND_THE_LAYER",
    "Cost",
    "LayerCost",
    "OperatorCost",
    "Uncounted",
    "aligned",
    "cheapest",
    "cost_of",
    "count",
    "declined_by",
    "geometry_of",
    "interpolated_by",
    "interpolated_of",
]

BEYOND_THE_LAYER = "more than the layer's own"


@dataclass(frozen=True)
class LayerCost:
    """One convolution, linear or epitome layer. MAdds are per sample, over all calls.

    Args:
        name: Qualified name.
        kind: Class name.
        calls: How often the model ran it.
        params_epitome: Elements of the epitome.
        params_routing: Starts in the routing map.
        params_other: Weight and bias of a dense layer, bias of an epitome layer; shared ones at first owner.
        params_learner: Index learner; needed in training only.
        madds: Executed by the deployed layer, interpolation included.
        madds_interpolation: Lerps and additions among them.
        madds_paper: By the paper's formula; of a dense layer its plain multiply-adds.
        madds_dense: Of the dense layer with the same weight shape.
        strategy: How `deploy(..., strategy="reuse")` runs it; "dense" for a layer without epitome.
        operation: "convolution" or "linear".
    """

    name: str
    kind: str
    calls: int
    params_epitome: int
    params_routing: int
    params_other: int
    params_learner: int
    madds: int
    madds_interpolation: int
    madds_paper: int
    madds_dense: int
    strategy: str
    operation: Kind

    @property
    def params(self) -> int:
        """Without the learner."""
        return self.params_epitome + self.params_routing + self.params_other


@dataclass(frozen=True)
class OperatorCost:
    """Operations that no counted layer owns, say a matrix product in `forward`. Part of `Cost.madds`.

    Args:
        where: Innermost module that ran it; "" is the model itself.
        operator: torch's name, or "more than the layer's own" inside of a dense layer.
        kind: Kind of operation; a weight read by `F.linear` is a matrix product.
        madds: Per sample.
    """

    where: str
    operator: str
    kind: Kind
    madds: int


@dataclass(frozen=True)
class Uncounted:
    """What could not be counted. Not in `Cost.madds`.

    Args:
        where: Innermost module that ran it; "" is the model itself.
        operator: torch's name, or "more than the layer's own" inside of an epitome layer (a subclass).
        madds: Per sample; None for an operator without a formula.
    """

    where: str
    operator: str
    madds: int | None


@dataclass(frozen=True)
class Cost:
    """What a model costs. `str(cost)` is a table, `cost.to_dict()` plain data.

    `params = params_epitome + params_routing + params_other`; learners are training only and counted apart.
    `madds` is what the deployed network executes (strategy "reuse"), `madds_interpolation` of it included.
    `buffer_bytes` is what the state holds besides parameters and routing maps, statistics of batch norm mostly, and
    `epitome_channels` the output channels of all epitomes; neither is in `params`. `inputs`: shapes of a sample.
    """

    layers: tuple[LayerCost, ...]
    params_epitome: int
    params_routing: int
    params_other: int
    params_learner: int
    uncounted: tuple[Uncounted, ...]
    operators: tuple[OperatorCost, ...] = ()
    buffer_bytes: int = 0
    epitome_channels: int = 0
    inputs: tuple[tuple[int, ...], ...] = ()

    def stored_bytes(self, epitome_bits: int = 32) -> int:
        """Bytes of the tensors of a float32 network in a file, learners left out (`save_pretrained`).

        Args:
            epitome_bits: Of each element of an epitome: 32, 16 or 8; with 8 there is a float32 scale for each of its
                output channels.
        """
        scales = 4 * self.epitome_channels if epitome_bits == 8 else 0
        others = 4 * (self.params_routing + self.params_other)
        return others + self.params_epitome * epitome_bits // 8 + scales + self.buffer_bytes

    @property
    def params(self) -> int:
        """Parameters that inference keeps, in elements."""
        return self.params_epitome + self.params_routing + self.params_other

    @property
    def madds(self) -> int:
        """Executed operations per sample."""
        return self._total("madds") + sum(entry.madds for entry in self.operators)

    @property
    def madds_interpolation(self) -> int:
        """Lerps and additions of the reuse, part of `madds`."""
        return self.by_kind.get("interpolation", 0)

    @property
    def madds_paper(self) -> int:
        """By the paper's "Reduced MAdd", corrected as `formulas.paper_madds` says; work outside of layers as it is."""
        return self._total("madds_paper") + self._outside

    @property
    def madds_dense(self) -> int:
        """Of the same architecture with plain weights."""
        return self._total("madds_dense") + self._outside

    @property
    def by_kind(self) -> dict[Kind, int]:
        """`madds` by kind of operation; kinds that do not occur are left out."""
        kinds = dict.fromkeys(KINDS, 0)
        for layer in self.layers:
            kinds[layer.operation] += layer.madds - layer.madds_interpolation
            kinds["interpolation"] += layer.madds_interpolation
        for entry in self.operators:
            kinds[entry.kind] += entry.madds
        return {kind: madds for kind, madds in kinds.items() if madds}

    @property
    def _outside(self) -> int:
        return sum(entry.madds for entry in self.operators if entry.kind != "interpolation")

    def _total(self, name: str) -> int:
        return sum(getattr(layer, name) for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the totals, every layer, and what was not counted."""
        totals = ("params", "madds", "madds_interpolation", "madds_paper", "madds_dense", "by_kind")
        return {name: getattr(self, name) for name in totals} | asdict(self)

    def __str__(self) -> str:
        return table(self)


def count(model: nn.Module, example_input: Tensor | tuple[Any, ...]) -> Cost:
    """Count parameters and multiply-adds (method section 4).

    One multiply-add counts 1, per sample (the batch of the example is divided out), batch norm merged,
    without bias. A copy of the model runs once, in eval mode without gradients: buffers, hooks and flags stay
    as they are.

    Args:
        model: Any module. Of a deployed one, reuse layers have no row: their work is in `operators`, so that `params`
            and `madds` are the trained model's, while `madds_dense` and `madds_paper` are those of what is left.
        example_input: A tensor, or a tuple of the model's arguments; the first axis of the first tensor is the batch.

    Returns:
        Totals, a row for each convolution, linear and epitome layer, operators of no layer, what could not be counted.

    Raises:
        InputError: If the example holds no tensor.

    Example:
        >>> import torch
        >>> cost = count(nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.zeros(2, 3, 4, 4))
        >>> cost.params, cost.madds
        (216, 3456)
    """
    check_is_model(model)
    watched = eval_copy(model)
    arguments = as_arguments(example_input)
    return replace(cost_of(watched, trace(watched, arguments)), inputs=sample_shapes(arguments))


def cost_of(watched: nn.Module, record: Trace) -> Cost:
    """The cost of a model (an `eval_copy`) whose pass is recorded."""
    layers = tuple(_layer_cost(name, calls, record, own) for name, calls, own in _with_own(record))
    epitomes = _ids(layer.epitome for layer in [*epitome_layers(watched), *deployed_layers(watched)])
    routing = _ids(value for layer in epitome_layers(watched) for _, value in layer.routing_map.items())
    routing |= _ids(value for layer in deployed_layers(watched) for value in layer.starts().values())
    learners = _ids(p for layer in epitome_layers(watched) for p in _learner(layer))
    kept = {key: size for key, size in _ids(watched.parameters()).items() if key not in learners}
    other = sum(size for key, size in kept.items() if key not in epitomes and key not in routing)
    return Cost(
        layers,
        sum(epitomes.values()),
        sum(routing.values()),
        other,
        sum(learners.values()),
        _uncounted(record, layers),
        _operators(record, layers),
        _buffer_bytes(watched, routing),
        sum(layer.spec.epitome_shape[0] for layer in epitome_layers(watched)),
    )


def _buffer_bytes(model: nn.Module, routing: dict[int, int]) -> int:
    """Of persistent buffers that are no routing map; shared ones once."""
    parameters = {id(parameter) for parameter in model.parameters()}
    state = {id(value): value for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor)}
    apart = [value for key, value in state.items() if key not in parameters and key not in routing]
    return sum(value.numel() * value.element_size() for value in apart)


def geometry_of(calls: Calls, record: Trace) -> Geometry:
    """Positions per sample and kind of a counted layer."""
    return replace(
        _geometry(calls.module),
        in_positions=record.per_sample(calls.in_positions),
        out_positions=record.per_sample(calls.out_positions),
        read_positions=record.per_sample(calls.read_positions),
    )


def _geometry(module: Any) -> Geometry:
    """What does not depend on the input."""
    convolution = not is_linear(module)
    return Geometry(
        0,
        0,
        module.groups if convolution else 1,
        convolution and module.transposed,
        isinstance(module, EpitomeLayer) and module.flatten_kernel,
        strided=convolution and max(module.stride) > 1,
    )


def declined_by(layer: EpitomeLayer, strategy: Strategy) -> Reason | None:
    """Why a strategy does not apply to a layer, whatever its input; None if it does."""
    if isinstance(layer, AdaptedLayer) and strategy != "folded":
        return "a forward of its own"
    return why_not(layer.spec, _geometry(layer), strategy)


def cheapest(layer: EpitomeLayer, geometry: Geometry) -> Choice:
    """The way to run an epitome layer that executes the fewest operations."""
    if isinstance(layer, AdaptedLayer):  # what its forward does with the weight is not known
        return Choice("folded", executed(layer.spec, geometry, "folded"), "a forward of its own", ())
    return best(layer.spec, geometry, interpolated_of(layer))


def _ids(parameters: Iterable[Tensor]) -> dict[int, int]:
    """Size by identity: a shared parameter counts once."""
    return {id(parameter): parameter.numel() for parameter in parameters}


def _learner(layer: EpitomeLayer) -> Iterable[Tensor]:
    return () if layer.learner is None else layer.learner.parameters()


@dataclass(frozen=True)
class _Own:
    epitome: int
    routing: int
    other: int
    learner: int


def _with_own(record: Trace) -> Iterable[tuple[str, Calls, _Own]]:
    """Each counted layer with the parameters that no layer before it has."""
    seen: set[int] = set()

    def take(values: Iterable[Tensor]) -> int:
        new = {key: size for key, size in _ids(values).items() if key not in seen}
        seen.update(new)
        return sum(new.values())

    for name, calls in record.calls.items():
        module = calls.module
        if isinstance(module, EpitomeLayer):
            epitome, learner = take([module.epitome]), take(_learner(module))
            routing = take(value for _, value in module.routing_map.items())
            yield name, calls, _Own(epitome, routing, take(module.parameters()), learner)
        else:
            yield name, calls, _Own(0, 0, take(module.parameters(recurse=False)), 0)


def _layer_cost(name: str, calls: Calls, record: Trace, own: _Own) -> LayerCost:
    module: Any = calls.module
    geometry = geometry_of(calls, record)
    if isinstance(module, EpitomeLayer):
        choice = cheapest(module, geometry)
        madds, interpolation = choice.operations.total, choice.operations.interpolation
        paper, dense = paper_madds(module.spec, geometry), dense_madds(module.spec, geometry)
        strategy: str = choice.strategy
    else:
        dense = module.weight.numel() * geometry.kernel_positions
        madds, interpolation, paper, strategy = dense, 0, dense, "dense"
    return LayerCost(
        name,
        type(module).__name__,
        calls.count,
        own.epitome,
        own.routing,
        own.other,
        own.learner,
        madds,
        interpolation,
        paper,
        dense,
        strategy,
        "linear" if is_linear(module) else "convolution",
    )


def _operators(record: Trace, layers: tuple[LayerCost, ...]) -> tuple[OperatorCost, ...]:
    """Counted operators outside of layers, and what a dense layer (a subclass) does beyond its formula."""
    found = [
        OperatorCost(where, operator, operator_kind(operator), record.per_sample(madds))
        for (where, operator), madds in record.foreign.items()
        if madds is not None
    ]
    extra = [(layer, _surplus(record, layer)) for layer in layers if layer.strategy == "dense"]
    return (
        *found,
        *(OperatorCost(one.name, BEYOND_THE_LAYER, one.operation, madds) for one, madds in extra if madds > 0),
    )


def _uncounted(record: Trace, layers: tuple[LayerCost, ...]) -> tuple[Uncounted, ...]:
    """Operators without a formula, and what an epitome layer (a subclass) does beyond its own."""
    found = [Uncounted(where, operator, None) for (where, operator), madds in record.foreign.items() if madds is None]
    extra = [(layer, _surplus(record, layer)) for layer in layers if layer.strategy != "dense"]
    return (*found, *(Uncounted(layer.name, BEYOND_THE_LAYER, madds) for layer, madds in extra if madds > 0))


def _surplus(record: Trace, layer: LayerCost) -> int:
    return record.per_sample(record.calls[layer.name].observed) - layer.madds_dense
