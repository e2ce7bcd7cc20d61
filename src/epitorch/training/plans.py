"""From a recipe's `epitome` section to a conversion plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from epitorch._rules import Place
from epitorch.models.inverted import Compression, fit_inverted_residual_plan, inverted_residual_plan
from epitorch.plans import LayerPlan, Plan, read_layer_plan
from epitorch.training.recipe import EpitomeSection


def recipe_plan(model: nn.Module, section: EpitomeSection, *, source: str = "recipe") -> Plan:
    """Return the plan that a recipe asks for.

    Args:
        model: The dense model, as the recipe names it.
        section: The recipe's section.
        source: Name of the recipe, for messages.

    Raises:
        RecipeError: If a layer's plan has an unknown key or no epitome shape.
        ConversionError: If the model is no MobileNetV2 or EfficientNet and no layers are given, `match_params` cannot
            be met, or the plan's file is missing or damaged.
    """
    if section.plan is not None:
        return Plan.load(section.plan)
    if section.layers is not None:
        return _layer_plan(section, source)
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
    plan, _ = fit_inverted_residual_plan(model, section.match_params or 0, options)
    return plan


def _layer_plan(section: EpitomeSection, source: str) -> Plan:
    place = Place(source, {}, ("epitome", "layers"))
    layers = section.layers or {}
    return Plan({name: _one_layer(options, section, place.below(name)) for name, options in layers.items()})


def _one_layer(options: Any, section: EpitomeSection, place: Place) -> LayerPlan:
    common = {"index": section.index, "group_length": section.group_length, "momentum": section.momentum}
    return read_layer_plan(options, place, common)
