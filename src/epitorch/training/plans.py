"""From a recipe's `epitome` section to a conversion plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from epitorch._rules import Place
from epitorch.cost import plan
from epitorch.models.inverted import Compression, fit_inverted_residual_plan, inverted_residual_plan
from epitorch.plans import LayerPlan, Plan, read_layer_plan
from epitorch.training.recipe import EpitomeSection
from epitorch.training.recipe_budget import read_budget


def recipe_plan(model: nn.Module, section: EpitomeSection, example: Tensor, *, source: str = "recipe") -> Plan:
    """Return the plan that a recipe asks for.

    Args:
        model: The dense model, as the recipe names it.
        section: The recipe's section.
        example: An input of the model, by which a budget counts multiply-adds.
        source: Name of the recipe, for messages.

    Raises:
        RecipeError: If a layer's plan has an unknown key or no epitome shape.
        ConversionError: If the model is no MobileNetV2 or EfficientNet and no layers are given, `match_params` cannot
            be met, the plan's file is missing or damaged, or the budget cannot be met.
    """
    if section.plan is not None:
        return Plan.load(section.plan)
    if section.layers is not None:
        return _layer_plan(section, source)
    if section.budget is not None:
        return _budget_plan(model, section, example, source)
    options = Compression(
        1.0 if section.c is None else section.c,
        section.last_conv,
        section.classifier,
        section.policy,  # type: ignore[arg-type]
        section.index,  # type: ignore[arg-type]
        section.group_length,
        section.momentum,
    )
    if section.c is not None:
        return inverted_residual_plan(model, options)
    fitted, _ = fit_inverted_residual_plan(model, section.match_params or 0, options)
    return fitted


def _budget_plan(model: nn.Module, section: EpitomeSection, example: Tensor, source: str) -> Plan:
    budget = read_budget(section.budget or {}, Place(source, {}, ("epitome", "budget")))
    planned = plan(
        model,
        example,
        params=budget.params,
        madds=budget.madds,
        ratio=budget.ratio,
        policy=budget.policy,  # type: ignore[arg-type]
        form=budget.form,  # type: ignore[arg-type]
        axes=budget.axes,  # type: ignore[arg-type]
        align=budget.align,
        depthwise=budget.depthwise,
        skip=budget.skip,
        only=budget.only,
        index=section.index,  # type: ignore[arg-type]
    )
    layers = {
        name: replace(layer, momentum=section.momentum, group_length=section.group_length)
        for name, layer in planned.layers.items()
    }
    return replace(planned, layers=layers)


def _layer_plan(section: EpitomeSection, source: str) -> Plan:
    place = Place(source, {}, ("epitome", "layers"))
    layers = section.layers or {}
    return Plan({name: _one_layer(options, section, place.below(name)) for name, options in layers.items()})


def _one_layer(options: Any, section: EpitomeSection, place: Place) -> LayerPlan:
    common = {"index": section.index, "group_length": section.group_length, "momentum": section.momentum}
    return read_layer_plan(options, place, common)
