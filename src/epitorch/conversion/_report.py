"""What a conversion did: every layer with a weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from torch import nn

from epitorch.conversion._layers import is_lazy, shape_of_weight, why_left
from epitorch.nn import AdaptedLayer, EpitomeLayer
from epitorch.plans import Plan, Reason
from epitorch.warmstart import FitResult


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
        error: Relative Frobenius error of the generated weight, after `init="least_squares"`; with moments weighted by
            them.
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

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
class Conversion:
    layer: EpitomeLayer
    folded: tuple[str, ...]
    fit: FitResult | None


def layer_report(plan: Plan, name: str, old: Any, new: Conversion | None) -> LayerReport:
    layer = old if isinstance(old, EpitomeLayer) else None if new is None else new.layer
    shape = old.weight_shape if isinstance(old, EpitomeLayer) else shape_of_weight(old)
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


def other_weights(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[LayerReport]:
    """Parameters of two or more axes that belong to no convolution or linear layer: embeddings, attention, ..."""
    inside = {id(part) for layer in layers for part in layer.modules()}
    for name, module in model.named_modules():
        for key, value in module._parameters.items():
            if id(module) not in inside and value is not None and not is_lazy(value) and value.dim() > 1:
                shape, size = tuple(value.shape), value.numel()
                full_name = f"{name}.{key}" if name else key
                yield LayerReport(full_name, type(module).__name__, shape, None, size, size, "other_kind")
