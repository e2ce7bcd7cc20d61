"""Where a model's first weights come from: drawn, or those of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from epitorch.checkpoint import Checkpoint, load_checkpoint
from epitorch.conversion import convert_
from epitorch.errors import InputError, explain
from epitorch.models.resolve import build_model
from epitorch.nn import EpitomeLayer
from epitorch.plans import Plan
from epitorch.training.plans import recipe_plan
from epitorch.training.recipe import Recipe


@dataclass(frozen=True)
class BuiltModel:
    """A model made as the recipe says.

    Args:
        model: The network.
        plan: Its epitome layers; None for a dense one.
        fresh: Tensors that the checkpoint it starts from has not, or of another shape: a new head, say.
    """

    model: nn.Module
    plan: Plan | None
    fresh: tuple[str, ...] = ()


def first_model(recipe: Recipe, example: Tensor) -> BuiltModel:
    """Build the recipe's model with its first weights.

    Args:
        recipe: The recipe.
        example: An input of the model, by which a budget counts multiply-adds.

    Raises:
        InputError: If there is no such model, it cannot be converted as asked, or its checkpoint does not fit.
        CheckpointError: If the checkpoint is missing or damaged.
    """
    model = build_model(recipe.model.name, recipe.model.arguments)
    if recipe.model.checkpoint is None:
        return BuiltModel(model, _convert(model, recipe, example))
    start = load_checkpoint(recipe.model.checkpoint)
    if start.config.plan is None:
        fresh = _take_over(model, start.model.state_dict(), recipe)
        return BuiltModel(model, _convert(model, recipe, example), fresh)
    _refuse_second_conversion(recipe)
    plan = _fitting(start, model)
    convert_(model, plan)
    return BuiltModel(model, plan, _take_over(model, start.model.state_dict(), recipe))


def _convert(model: nn.Module, recipe: Recipe, example: Tensor) -> Plan | None:
    if recipe.epitome is None:
        return None
    plan = recipe_plan(model, recipe.epitome, example, source=recipe.source)
    if not plan.layers:
        raise InputError(
            explain(
                "the recipe's 'epitome' converts no layer",
                expected="a plan with a layer that becomes smaller",
                got="every layer keeps its whole weight",
                where=recipe.source,
                fix="ask for less, or leave the section out: the network is then dense",
            )
        )
    convert_(model, plan, init=recipe.epitome.init)  # type: ignore[arg-type]
    return plan


def _refuse_second_conversion(recipe: Recipe) -> None:
    if recipe.epitome is not None:
        raise InputError(
            explain(
                "the checkpoint is an epitome network already",
                expected="a recipe without 'epitome', or a dense checkpoint",
                got=str(recipe.model.checkpoint),
                where=recipe.source,
                fix="leave out 'epitome': the checkpoint's own plan is used",
            )
        )


def _fitting(start: Checkpoint, model: nn.Module) -> Plan:
    """The checkpoint's plan without the layers that have another shape in this model: a head for other classes."""
    modules: dict[str, Any] = dict(model.named_modules())
    old = {name: layer for name, layer in start.model.named_modules() if isinstance(layer, EpitomeLayer)}
    assert start.config.plan is not None
    same = {
        name: layer
        for name, layer in start.config.plan.layers.items()
        if name in modules and _weight_shape(modules[name]) == old[name].weight_shape
    }
    return replace(start.config.plan, layers=same)


def _weight_shape(module: Any) -> tuple[int, ...] | None:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else None


def _take_over(model: nn.Module, state: dict[str, Tensor], recipe: Recipe) -> tuple[str, ...]:
    """Load the tensors of the same name and shape; return the names of the others."""
    own = model.state_dict()
    taken = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    fresh = tuple(name for name in own if name not in taken)
    if sum(own[name].numel() for name in taken) * 2 < sum(value.numel() for value in own.values()):
        raise InputError(
            explain(
                "the checkpoint is of another architecture",
                expected=f"tensors of {recipe.model.name}",
                got=f"{len(taken)} of {len(own)} tensors have the same name and shape; others: {', '.join(fresh[:4])}",
                where=f"{recipe.source}: model.checkpoint = {recipe.model.checkpoint}",
            )
        )
    model.load_state_dict({**own, **taken}, strict=True)
    return fresh
