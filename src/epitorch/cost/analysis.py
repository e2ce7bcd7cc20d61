"""Parameters and multiply-adds of a model, per layer and in total."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from epitorch.cost._trace import Calls, Trace, as_arguments, epitome_layers, is_linear, quiet, trace
from epitorch.cost.formulas import (
    Choice,
    Geometry,
    Interpolated,
    best,
    dense_madds,
    executed,
    interpolated_channels,
    paper_madds,
)
from epitorch.functional import split_starts
from epitorch.nn import AdaptedLayer, EpitomeLayer
from epitorch.spec import Axis, EpitomeSpec


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

    @property
    def params(self) -> int:
        """Without the learner."""
        return self.params_epitome + self.params_routing + self.params_other


@dataclass(frozen=True)
class Uncounted:
    """Multiply-adds that no counted layer owns, say a matrix product in `forward`. Not in `Cost.madds`.

    Args:
        where: Innermost module that ran it; "" is the model itself.
        operator: torch's name, or "more than the layer's own" inside of a counted layer.
        madds: Per sample; None where torch has no formula.
    """

    where: str
    operator: str
    madds: int | None


@dataclass(frozen=True)
class Cost:
    """What a model costs. `str(cost)` is a table, `cost.to_dict()` plain data.

    `params = params_epitome + params_routing + params_other`; learners are training only and counted apart.
    `madds` is what the deployed network executes (strategy "reuse"), `madds_interpolation` of it included.
    """

    layers: tuple[LayerCost, ...]
    params_epitome: int
    params_routing: int
    params_other: int
    params_learner: int
    uncounted: tuple[Uncounted, ...]

    @property
    def params(self) -> int:
        """Parameters that inference keeps, in elements."""
        return self.params_epitome + self.params_routing + self.params_other

    @property
    def madds(self) -> int:
        """Executed operations per sample."""
        return sum(layer.madds for layer in self.layers)

    @property
    def madds_interpolation(self) -> int:
        """Lerps and additions of the reuse, part of `madds`."""
        return sum(layer.madds_interpolation for layer in self.layers)

    @property
    def madds_paper(self) -> int:
        """By the paper's "Reduced MAdd", corrected as `formulas.paper_madds` says."""
        return sum(layer.madds_paper for layer in self.layers)

    @property
    def madds_dense(self) -> int:
        """Of the same architecture with plain weights."""
        return sum(layer.madds_dense for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the totals, every layer, and what was not counted."""
        totals = ("params", "madds", "madds_interpolation", "madds_paper", "madds_dense")
        return {name: getattr(self, name) for name in totals} | asdict(self)

    def __str__(self) -> str:
        return _table(self)


def count(model: nn.Module, example_input: Tensor | tuple[Any, ...]) -> Cost:
    """Count parameters and multiply-adds (method section 4).

    One multiply-add counts 1, per sample (the batch of the example is divided out), batch norm merged,
    without bias. A copy of the model runs once, in eval mode without gradients: buffers, hooks and flags stay
    as they are.

    Args:
        model: Any module. Count a converted model before `deploy`: a deployed one's reuse layers are not known here and
            their work is listed in `uncounted`.
        example_input: A tensor, or a tuple of the model's arguments; the first axis of the first tensor is the batch.

    Returns:
        Totals, a row for each convolution, linear and epitome layer, and multiply-adds that none of them owns.

    Raises:
        InputError: If the example holds no tensor.

    Example:
        >>> import torch
        >>> cost = count(nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.zeros(2, 3, 4, 4))
        >>> cost.params, cost.madds
        (216, 3456)
    """
    with quiet(model):
        watched = copy.deepcopy(model).eval()
    record = trace(watched, as_arguments(example_input))
    layers = tuple(_layer_cost(name, calls, record, own) for name, calls, own in _with_own(record))
    epitomes = _ids(layer.epitome for layer in epitome_layers(watched))
    routing = _ids(value for layer in epitome_layers(watched) for _, value in layer.routing_map.items())
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
    )


def geometry_of(calls: Calls, record: Trace) -> Geometry:
    """Positions per sample and kind of a counted layer."""
    module: Any = calls.module
    return Geometry(
        record.per_sample(calls.in_positions),
        record.per_sample(calls.out_positions),
        1 if is_linear(module) else module.groups,
        not is_linear(module) and module.transposed,
        isinstance(module, EpitomeLayer) and module.flatten_kernel,
    )


def interpolated_of(layer: EpitomeLayer) -> Interpolated:
    """Channels whose start lies between two positions, from the routing map."""
    spec = layer.spec
    if spec.channel_starts == "grid":
        return Interpolated(0, 0)  # always folded
    return interpolated_by(spec, layer.starts())


def interpolated_by(spec: EpitomeSpec, starts: dict[Axis, Tensor]) -> Interpolated:
    """Channels whose start lies between two positions, for the given starts."""
    return Interpolated(_between(spec, starts, "out"), _between(spec, starts, "in"))


def cheapest(layer: EpitomeLayer, geometry: Geometry) -> Choice:
    """The way to run an epitome layer that executes the fewest operations."""
    if isinstance(layer, AdaptedLayer):  # what its forward does with the weight is not known
        return Choice("folded", executed(layer.spec, geometry, "folded"), "a forward of its own", ())
    return best(layer.spec, geometry, interpolated_of(layer))


def _between(spec: EpitomeSpec, starts: dict[Axis, Tensor], axis: Axis) -> int:
    dim, block = (0, spec.block_out) if axis == "out" else (1, spec.block_in)
    if axis not in starts:
        return 0
    if starts[axis].is_meta:
        return spec.weight_shape[dim]
    fraction = split_starts(starts[axis].detach(), spec.epitome_shape[dim], spec.group_length).fraction
    return interpolated_channels(spec.weight_shape[dim], block, (fraction != 0).tolist())


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
    )


def _uncounted(record: Trace, layers: tuple[LayerCost, ...]) -> tuple[Uncounted, ...]:
    """Operators outside of counted layers, and what a counted layer (a subclass) does beyond its formula."""
    found = [
        Uncounted(where, operator, None if madds is None else record.per_sample(madds))
        for (where, operator), madds in record.foreign.items()
    ]
    for layer in layers:
        surplus = record.per_sample(record.calls[layer.name].observed) - layer.madds_dense
        if surplus > 0:
            found.append(Uncounted(layer.name, "more than the layer's own", surplus))
    return tuple(found)


def _table(cost: Cost) -> str:
    head = ("layer", "kind", "params", "MAdds", "interpolation", "MAdds (paper)", "MAdds (dense)", "runs as")
    rows: list[tuple[str, ...]] = [
        (
            layer.name or "(model)",
            layer.kind,
            f"{layer.params:,}",
            f"{layer.madds:,}",
            f"{layer.madds_interpolation:,}",
            f"{layer.madds_paper:,}",
            f"{layer.madds_dense:,}",
            layer.strategy,
        )
        for layer in cost.layers
    ]
    rest = cost.params - sum(layer.params for layer in cost.layers)
    total = (cost.madds, cost.madds_interpolation, cost.madds_paper, cost.madds_dense)
    rows.append(("(everything else)", "", f"{rest:,}", "", "", "", "", ""))
    rows.append(("total", "", f"{cost.params:,}", *(f"{number:,}" for number in total), ""))
    return "\n".join([*aligned([head, *rows], left=(0, 1, 7)), *_notes(cost)])


def _notes(cost: Cost) -> list[str]:
    notes = [
        f"params = epitomes {cost.params_epitome:,} + routing maps {cost.params_routing:,}"
        f" + everything else {cost.params_other:,}"
    ]
    if cost.params_learner:
        notes.append(f"index learners (training only, not in params): {cost.params_learner:,}")
    for entry in cost.uncounted:
        amount = "an unknown number of" if entry.madds is None else f"{entry.madds:,}"
        notes.append(f"not counted: {amount} MAdds of {entry.operator} in {entry.where or '(model)'}")
    return notes


def aligned(rows: list[tuple[str, ...]], left: tuple[int, ...]) -> list[str]:
    """Lines of a table; the columns in `left` are flush left, the others flush right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
