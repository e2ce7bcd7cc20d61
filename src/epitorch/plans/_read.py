"""A plan from a file, validated: what is wrong is said with file, layer and, in YAML, the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epitorch._rules import Place, check_keys, choice, mapping, read_section, read_value, whole
from epitorch.errors import ConversionError, RecipeError, ShapeError, explain, require
from epitorch.plans._data import REASONS, Budget, LayerPlan, Plan, WeightFacts
from epitorch.plans._write import FORMAT, check_suffix

_KEYS = ["format", "budget", "totals", "layers", "left", "weights"]


def read_plan(path: Path) -> Plan:
    """Read and validate."""
    check_suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or error
        raise ConversionError(
            explain("the plan cannot be read", expected="a file", got=got, where=str(path))
        ) from error
    try:
        data, place = _parse(text, path)
        return _plan(data, place)
    except RecipeError as error:
        raise ConversionError(str(error)) from error


def read_layer_plan(options: Any, place: Place, common: Mapping[str, Any] | None = None) -> LayerPlan:
    """Validate the options of one layer.

    Args:
        options: What the file says.
        place: Where it says so.
        common: Values for options that the file leaves out.

    Raises:
        RecipeError: If a key is unknown or missing, or a value has the wrong type.
    """
    check_keys(options, list(LayerPlan.__dataclass_fields__), place)
    return read_section(LayerPlan, {**(common or {}), **options}, place)


def _parse(text: str, path: Path) -> tuple[Any, Place]:
    if path.suffix != ".json":
        require("yaml", "train")
        from epitorch._yaml import read_yaml

        document = read_yaml(text, str(path))
        return document.data, Place(str(path), document.lines)
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise ConversionError(
            explain("this is not valid JSON", expected="a JSON object, each key once", got=error, where=str(path))
        ) from error
    return data, Place(str(path), {})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(k for k in keys if keys.count(k) > 1)}' is given twice")
    return content


def _plan(data: Any, place: Place) -> Plan:
    check_keys(data, _KEYS, place)
    if "format" in data:
        read_value(whole(FORMAT, FORMAT), data["format"], place.below("format"))
    parts = {key: _section(data, key, place, required=key == "layers") for key in ("layers", "left", "weights")}
    weights = {name: read_section(WeightFacts, facts, at) for name, facts, at in parts["weights"]}
    left = {name: read_value(choice(*REASONS), reason, at) for name, reason, at in parts["left"]}
    layers = {}
    for name, options, at in parts["layers"]:
        layers[name] = read_layer_plan(options, at)
        _check_sizes(layers[name], weights.get(name), at)
        if name in left:
            raise RecipeError(
                explain(f"'{name}' is planned and left", expected="one of the two", got=left[name], where=str(at))
            )
    budget = read_section(Budget, data["budget"], place.below("budget")) if "budget" in data else None
    plan = Plan(layers, left, weights, budget)
    _check_totals(plan, place.below("budget"))
    return plan


def _section(data: Any, key: str, place: Place, *, required: bool) -> list[tuple[str, Any, Place]]:
    below = place.below(key)
    if key not in data and not required:
        return []
    content = read_value(mapping(), data.get(key), below)
    return [(name, value, below.below(name)) for name, value in content.items()]


def _check_totals(plan: Plan, place: Place) -> None:
    """A model has at least the parameters and multiply-adds of its layers: an edited total would make others wrong."""
    for key in ("params_dense", "madds_dense"):
        planned = [facts for name, facts in plan.weights.items() if name in plan.layers]
        least = sum((facts.params if key == "params_dense" else facts.madds_dense) or 0 for facts in planned)
        if plan.budget is not None and getattr(plan.budget, key) < least:
            raise RecipeError(
                explain(
                    f"'budget.{key}' is less than what the planned layers have",
                    expected=f"at least {least:,}",
                    got=f"{getattr(plan.budget, key):,}",
                    where=str(place.below(key)),
                    fix="plan the model again; budget and weights say what the model was and are not for editing",
                )
            )


def _check_sizes(layer: LayerPlan, facts: WeightFacts | None, place: Place) -> None:
    if facts is None:
        return
    try:
        layer.spec_for(facts.shape, facts.transposed)
    except ShapeError as error:
        raise RecipeError(f"{place}: {'.'.join(place.path)}: {error}") from error
