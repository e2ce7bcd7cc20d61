"""Plans as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.modules.conv import _ConvNd

from epitorch._rules import choice, flag, number, optional, ruled, sizes, text, whole
from epitorch.errors import ConversionError, check_is_model, explain, suggest
from epitorch.folding import folded
from epitorch.nn import EpitomeLayer
from epitorch.spec import CHANNEL_STARTS, SPATIAL_STARTS, ChannelStarts, EpitomeSpec, SpatialStarts

Reason = Literal[
    "not_in_plan",
    "stem",
    "depthwise",
    "no_expansion",
    "middle",
    "squeeze_excitation",
    "last_conv",
    "classifier",
    "already_epitome",
    "other_kind",
    "no_weight",
    "lazy",
    "quantized",
    "scripted",
    "patched",
    "name_clash",
    "skipped",
    "too_small",
    "budget",
    "not_called",
    "shared_weight",
    "whole_model",
]
"""Why a layer that has a weight was left dense. A closed list.

not_in_plan: the plan does not name it · stem, no_expansion, middle, squeeze_excitation, last_conv, classifier: roles
that the plans for MobileNetV2 and EfficientNet leave · depthwise: one input channel per filter · already_epitome:
converted before · other_kind: no convolution or linear layer · no_weight: its weight is no parameter · lazy: no shape
yet · quantized, scripted: nothing can be changed · patched: its forward was replaced on the instance · name_clash: a
subclass whose attributes an epitome layer needs · skipped: named by a pattern of `skip` · too_small: the smallest
epitome costs as much as the weight · budget: room for the whole weight · not_called: the model runs it neither by a
call nor through its weight · shared_weight: several modules hold the weight · whole_model: the model is this layer, so
nothing can hold another.
"""
REASONS: tuple[str, ...] = get_args(Reason)
BudgetKind = Literal["params", "madds"]
INDEX = ("learner", "direct", "fixed")


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is converted: the keyword-only arguments of an epitome layer.

    Args:
        epitome_shape: In the layer's storage order, as the layer takes it.
        block_out: beta_2; None is the whole axis.
        block_in: beta_1; None is the whole axis.
        spatial_starts: Owners of spatial starts.
        channel_starts: One start per block, per pair of blocks, or per pair on one axis.
        index: "learner", "direct" or "fixed".
        group_length: Super-index length.
        flatten_kernel: Treat the weight as a matrix.
        momentum: mu of the routing map.
        spatial_shift: Spatial starts also where the epitome's window equals the kernel.
    """

    epitome_shape: tuple[int, ...] = ruled(sizes(2))
    block_out: int | None = ruled(optional(whole(1)), None)
    block_in: int | None = ruled(optional(whole(1)), None)
    spatial_starts: SpatialStarts = ruled(choice(*SPATIAL_STARTS), "in")  # noqa: RUF009
    channel_starts: ChannelStarts = ruled(choice(*CHANNEL_STARTS), "separable")  # noqa: RUF009
    index: Literal["learner", "direct", "fixed"] = ruled(choice(*INDEX), "learner")
    group_length: int | None = ruled(optional(whole(1)), None)
    flatten_kernel: bool = ruled(flag(), False)
    momentum: float = ruled(number(0, 0.999999), 0.97)
    spatial_shift: bool = ruled(flag(), False)

    def spec(self, dense: nn.Module) -> EpitomeSpec:
        """Shapes of the epitome layer that would replace `dense`."""
        weight: Any = dense.weight
        return self.spec_for(tuple(weight.shape), bool(getattr(dense, "transposed", False)))

    def spec_for(self, weight_shape: tuple[int, ...], transposed: bool = False) -> EpitomeSpec:
        """Shapes of the epitome layer for a weight.

        Args:
            weight_shape: In storage order.
            transposed: The layer is a transposed convolution.

        Raises:
            ShapeError: If the epitome does not fit the weight.
        """
        return EpitomeSpec.for_layer(
            weight_shape,
            self.epitome_shape,
            transposed=transposed,
            flatten_kernel=self.flatten_kernel,
            block_out=self.block_out,
            block_in=self.block_in,
            spatial_starts=self.spatial_starts,
            channel_starts=self.channel_starts,
            group_length=self.group_length,
            spatial_shift=self.spatial_shift,
        )

    def form(self) -> str:
        """Everything that decides the cost, in a few words: `32x64x3x3 grid`."""
        blocks = [f"{n}={getattr(self, n)}" for n in ("block_out", "block_in", "group_length") if getattr(self, n)]
        flags = [n for n in ("flatten_kernel", "spatial_shift") if getattr(self, n)]
        flags += ["fixed"] if self.index == "fixed" else []  # on whole positions, which are not interpolated
        spatial = [] if self.spatial_starts == "in" else [f"spatial={self.spatial_starts}"]
        return " ".join(["x".join(map(str, self.epitome_shape)), self.channel_starts, *spatial, *blocks, *flags])


@dataclass(frozen=True)
class WeightFacts:
    """The layer that a plan was made for: what is checked before converting, and what it costs.

    Args:
        shape: Of the weight, in storage order.
        transposed: The layer is a transposed convolution.
        params_dense: Parameters that go when the layer is converted; None is the weight's size. More where weight norm
            or another parametrisation is folded.
        madds_dense: Multiply-adds per sample of the dense layer; None where unknown.
        madds: Executed by the planned layer, with every start between two positions, as training leaves them; fixed
            ones on whole positions.
        madds_fresh: The same right after conversion; whole starts cost less.
        form: `LayerPlan.form()` of the planned layer that `madds` and `madds_fresh` belong to.
    """

    shape: tuple[int, ...] = ruled(sizes(2))
    transposed: bool = ruled(flag(), False)
    params_dense: int | None = ruled(optional(whole(1)), None)
    madds_dense: int | None = ruled(optional(whole(0)), None)
    madds: int | None = ruled(optional(whole(0)), None)
    madds_fresh: int | None = ruled(optional(whole(0)), None)
    form: str = ruled(text(), "dense")

    @property
    def params(self) -> int:
        """Parameters behind the dense weight."""
        return prod(self.shape) if self.params_dense is None else self.params_dense


@dataclass(frozen=True)
class Budget:
    """What was asked of a plan, and what the model has without it.

    Args:
        model: Class of the model.
        kind: What is limited.
        amount: The largest total allowed.
        params_dense: Parameters before converting, everything included.
        madds_dense: Multiply-adds per sample before converting, of all counted layers.
        input_shape: Of the example, if that was one tensor: multiply-adds hold for this size.
    """

    model: str = ruled(text())
    kind: BudgetKind = ruled(choice("params", "madds"))  # noqa: RUF009
    amount: int = ruled(whole(0))
    params_dense: int = ruled(whole(0))
    madds_dense: int = ruled(whole(0))
    input_shape: tuple[int, ...] | None = ruled(optional(sizes()), None)


@dataclass(frozen=True)
class Plan:
    """What to convert, by qualified module name, and why the rest is left. `str(plan)` is a table.

    Args:
        layers: The layers to convert.
        left: Layers that stay dense, with the reason.
        weights: Facts on the layers that the plan was made for; empty in a plan written by hand.
        budget: What was asked; None in a plan written by hand.

    Example:
        >>> plan = Plan({"conv1": LayerPlan((16, 3, 3, 3))})
    """

    layers: Mapping[str, LayerPlan]
    left: Mapping[str, Reason] = field(default_factory=dict)
    weights: Mapping[str, WeightFacts] = field(default_factory=dict)
    budget: Budget | None = None

    @property
    def params(self) -> int | None:
        """Parameters of the converted model, shared ones once, no learners. None if the plan lacks facts."""
        if self.budget is None or not set(self.layers) <= set(self.weights):
            return None
        saved = sum(self.weights[name].params - params_after(self, name) for name in self.layers)
        return self.budget.params_dense - saved

    @property
    def madds(self) -> int | None:
        """Executed multiply-adds per sample of the converted model once its learned starts lie between positions.

        None if the plan lacks facts, or a layer was edited after planning.
        """
        return self._madds("madds")

    @property
    def madds_fresh(self) -> int | None:
        """The same right after `convert_`: whole starts of a fresh model need no interpolation."""
        return self._madds("madds_fresh")

    def madds_of(self, name: str, field_name: str = "madds") -> int | None:
        """Multiply-adds of one layer after converting; None where unknown or edited since."""
        facts = self.weights.get(name)
        if facts is None or name not in self.layers:
            return None if facts is None else facts.madds_dense
        return getattr(facts, field_name) if facts.form == self.layers[name].form() else None

    def _madds(self, field_name: str) -> int | None:
        if self.budget is None:
            return None
        total = self.budget.madds_dense
        for name in self.layers:
            after, before = self.madds_of(name, field_name), getattr(self.weights.get(name), "madds_dense", None)
            if after is None or before is None:
                return None
            total += after - before
        return total

    def check(self, model: nn.Module) -> None:
        """Make sure that the plan is for this model; a plan without facts, written by hand, fits any.

        Raises:
            ConversionError: Naming the first layer that the model lacks, that has another weight, or that the plan does
                not know.
        """
        check_is_model(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, facts in self.weights.items():
            got = _weight_shape(modules.get(name))
            if got != facts.shape:
                raise _another_model(name, facts.shape, got, list(modules))
        unknown = [name for name in _weight_names(model) if name not in self.weights]
        if self.weights and unknown:
            raise _another_model(unknown[0], None, _weight_shape(modules[unknown[0]]), list(modules))

    def save(self, path: str | Path) -> Path:
        """Write the plan for a person to read and edit.

        Args:
            path: `.json`, or `.yaml` / `.yml` (which needs pyyaml).

        Returns:
            The path.

        Raises:
            ConversionError: If the suffix is another one.
        """
        from epitorch.plans._write import write_plan

        return write_plan(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and validate a plan.

        Raises:
            ConversionError: If the file is missing or no plan: the message names file, layer and, in YAML, the line.
        """
        from epitorch.plans._read import read_plan

        return read_plan(Path(path))

    def __str__(self) -> str:
        from epitorch.plans._table import plan_table

        return plan_table(self)


def _weight_shape(module: Any) -> tuple[int, ...] | None:
    if isinstance(module, EpitomeLayer):
        return module.weight_shape
    if not isinstance(module, nn.Module):
        return None
    shape = getattr(getattr(folded(module)[0], "weight", None), "shape", None)  # `module.weight` may take a step
    return None if shape is None else tuple(shape)


def _weight_names(model: nn.Module) -> list[str]:
    """Convolutions, linear and epitome layers, without what is inside of an epitome layer's learner."""
    hidden = {id(part) for layer in model.modules() for part in _learner_parts(layer)}
    kinds = (EpitomeLayer, _ConvNd, nn.Linear)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and id(module) not in hidden]


def _learner_parts(layer: nn.Module) -> list[nn.Module]:
    learner = layer.learner if isinstance(layer, EpitomeLayer) else None
    return [] if learner is None else list(learner.modules())


def _another_model(
    name: str, wanted: tuple[int, ...] | None, got: tuple[int, ...] | None, known: list[str]
) -> ConversionError:
    missing = f"no layer with a weight of that name{suggest(name, known)}" if name not in known else "no weight"
    return ConversionError(
        explain(
            "this is a plan for another model",
            expected="no such layer" if wanted is None else f"a weight of shape {wanted}",
            got=missing if got is None else f"shape {got}",
            where=name,
            fix="plan this model, or build the model that the plan was made for",
        )
    )


def planned_params(model: nn.Module, plan: Plan) -> int:
    """Total parameters after converting: epitomes, routing maps and all that stays; no learners."""
    modules = dict(model.named_modules())
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, layer in plan.layers.items():
        spec = layer.spec(modules[name])
        total += spec.num_epitome + spec.num_starts - spec.num_weight
    return total


def params_after(plan: Plan, name: str) -> int:
    """Parameters of a layer's weight under the plan: epitome and starts, or the whole weight."""
    facts = plan.weights[name]
    if name not in plan.layers:
        return facts.params
    spec = plan.layers[name].spec_for(facts.shape, facts.transposed)
    return spec.num_epitome + spec.num_starts
