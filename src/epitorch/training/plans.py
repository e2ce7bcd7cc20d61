"""From a recipe's `epitome` section to a conversion plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from epitorch.errors import RecipeError, explain
from epitorch.models.mobilenetv2 import fit_mobilenetv2_plan, mobilenetv2_plan
from epitorch.plan import LayerPlan, Plan
from epitorch.training._rules import Place, check_keys
from epitorch.training.recipe import EpitomeSection


def recipe_plan(model: nn.Module, section: EpitomeSection, *, source: str = "recipe") -> Plan:
    """Return the plan that a recipe asks for.

    Args:
        model: The dense model, as the recipe names it.
        section: The recipe's section.
        source: Name of the recipe, for messages.

    Raises:
        RecipeError: If a layer's plan has an unknown key or no epitome shape.
        ConversionError: If the model is not a MobileNetV2 and no layers are given, or `match_params` cannot be met.
    """
    if section.layers is not None:
        return _layer_plan(section, source)
    if section.c is not None:
        return mobilenetv2_plan(
            model,
            section.c,
            last_conv=section.last_conv,
            classifier=section.classifier,
            index=section.index,  # type: ignore[arg-type]
            group_length=section.group_length,
            momentum=section.momentum,
        )
    plan, _ = fit_mobilenetv2_plan(
        model,
        section.match_params or 0,
        last_conv=section.last_conv,
        classifier=section.classifier,
        index=section.index,  # type: ignore[arg-type]
        group_length=section.group_length,
        momentum=section.momentum,
    )
    return plan


def _layer_plan(section: EpitomeSection, source: str) -> Plan:
    place = Place(source, {}, ("epitome", "layers"))
    layers = section.layers or {}
    return Plan({name: _one_layer(options, section, place.below(name)) for name, options in layers.items()})


def _one_layer(options: Any, section: EpitomeSection, place: Place) -> LayerPlan:
    check_keys(options, [f.name for f in fields(LayerPlan)], place)
    common = {"index": section.index, "group_length": section.group_length, "momentum": section.momentum}
    return LayerPlan(**{**common, **options, "epitome_shape": _shape(options, place)})


def _shape(options: Mapping[str, Any], place: Place) -> tuple[int, ...]:
    shape = options.get("epitome_shape")
    if isinstance(shape, list | tuple) and shape and all(type(size) is int for size in shape):
        return tuple(shape)
    raise RecipeError(
        explain(
            f"'{'.'.join(place.path)}' has no usable epitome_shape",
            expected="a list of whole numbers, such as [32, 64, 3, 3]",
            got=repr(shape),
            where=place.source,
        )
    )
