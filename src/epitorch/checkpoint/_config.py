"""`config.json`: to text and back, with every value checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from math import isfinite, prod
from pathlib import Path
from typing import Any

from epitorch._rules import Place, read_section
from epitorch.checkpoint._data import (
    EPITOME_DTYPES,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    CheckpointConfig,
    ModelInput,
    Stored,
)
from epitorch.errors import CheckpointError, InputError, explain
from epitorch.plans import LayerPlan, Plan
from epitorch.plans._data import REASONS

MAX_BYTES = 4 << 20
_MAX_INPUT = 1 << 26  # elements of one input: 4,096 x 4,096 pixels in colour are fewer
_MAX_BATCH = 1 << 20
_SHOWN = 300  # characters of a foreign message


def damaged(path: Path, got: object, expected: str = "a complete file, as epitorch wrote it") -> CheckpointError:
    """The error for a file that is not what was written."""
    fix = "take another copy of the checkpoint, or train again"
    shown = str(got)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + " ..."
    return CheckpointError(explain("the checkpoint is damaged", expected=expected, got=shown, where=str(path), fix=fix))


# ---- writing ----


def config_to_bytes(config: CheckpointConfig, stored: Stored) -> bytes:
    """Return the file's content.

    Raises:
        CheckpointError: If a value is no JSON: an argument that is an object, or a number that is not finite.
    """
    content = {
        "format": [FORMAT_MAJOR, FORMAT_MINOR],
        **{f.name: getattr(config, f.name) for f in fields(CheckpointConfig)},
        "plan": None if config.plan is None else _plan_to_json(config.plan),
        "input": None if config.input is None else asdict(config.input),
        "weights": asdict(stored),
    }
    try:
        content = json.loads(json.dumps(content, allow_nan=False))  # tuples become lists: what will be read is hashed
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            explain(
                "the configuration cannot be written as JSON",
                expected="arguments and metrics of numbers, text, lists and mappings",
                got=error,
                fix="leave such arguments out, or save without a name and load with factory=",
            )
        ) from error
    data = (json.dumps({**content, "sha256": content_hash(content)}, indent=1) + "\n").encode()
    if len(data) > MAX_BYTES:
        got = f"{len(data):,} bytes"
        raise CheckpointError(explain("the configuration is too long", expected=f"{MAX_BYTES:,} bytes", got=got))
    return data


def _plan_to_json(plan: Plan) -> dict[str, Any]:
    """All options, defaults too: they must mean the same when a later version has other defaults."""
    return {"layers": {name: asdict(layer) for name, layer in plan.layers.items()}, "left": dict(plan.left)}


def content_hash(content: Mapping[str, Any]) -> str:
    """Hash of everything in the configuration but the hash itself."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- reading ----


def config_from_bytes(data: bytes, path: Path) -> tuple[CheckpointConfig, Stored | None]:
    """Parse and check a configuration; the second value is None in files of format 1.1 and older.

    Raises:
        CheckpointError: If it is damaged, of a newer major format, or holds values that cannot be meant.
    """
    content = _object(data, path)
    _check_format(content, path)
    given = content.pop("sha256", None)
    if given != content_hash(content):
        raise damaged(path, "content that does not match its own hash")
    try:
        return _config(content), _stored(content.get("weights"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged(
            path, f"{type(error).__name__}: {error}", "the keys of a configuration, of their types"
        ) from error


def _object(data: bytes, path: Path) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise damaged(path, f"more than {MAX_BYTES:,} bytes", f"at most {MAX_BYTES:,} bytes")
    try:
        content = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise damaged(path, f"{type(error).__name__}: {error}", "a JSON object that states its format") from error
    if not isinstance(content, dict):
        raise damaged(path, type(content).__name__, "a JSON object that states its format")
    return content


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _check_format(content: dict[str, Any], path: Path) -> None:
    version = content.get("format")
    if not isinstance(version, list) or len(version) != 2 or any(type(n) is not int or n < 0 for n in version):
        raise damaged(path, repr(version), "a JSON object that states its format, such as [1, 2]")
    if version[0] != FORMAT_MAJOR:
        newer = version[0] > FORMAT_MAJOR
        raise CheckpointError(
            explain(
                f"the checkpoint has {'a newer' if newer else 'an older'} format",
                expected=f"format {FORMAT_MAJOR}",
                got=f"format {version[0]}",
                where=str(path),
                fix="install a newer version of epitorch" if newer else "install the version of epitorch that wrote it",
            )
        )


def _need(fits: object, what: str) -> None:
    if not fits:
        raise TypeError(what)


def _config(content: dict[str, Any]) -> CheckpointConfig:
    # a later minor version may add keys, an earlier one lacks some
    model, arguments, batch_size = content["model"], content["arguments"], content["batch_size"]
    _need(isinstance(model, str) and 0 < len(model) <= 500, "model is no name")
    _need(batch_size is None or (_whole(batch_size) and batch_size <= _MAX_BATCH), "batch_size is no size")
    for key in ("arguments", "metrics", "recipe"):
        _need(isinstance(content[key], dict), f"{key} is no mapping")
    cost, shape, plan = content.get("cost"), content.get("input_shape"), content["plan"]
    _need(cost is None or isinstance(cost, dict), "cost is no mapping")
    return CheckpointConfig(
        model,
        arguments,
        None if plan is None else _plan(plan),
        _input(content["input"]),
        batch_size,
        content["metrics"],
        content["recipe"],
        None if shape is None else _sizes(shape, "input_shape"),
        cost,
    )


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    _need(isinstance(value, list) and 0 < len(value) <= 8 and all(map(_whole, value)), f"{what} is no shape")
    _need(prod(value) <= _MAX_INPUT, f"{what} has more than {_MAX_INPUT:,} elements")
    return tuple(value)


def _input(given: Any) -> ModelInput | None:
    if given is None:
        return None
    _need(isinstance(given, dict), "input is no mapping")
    shape, classes = _sizes(given["shape"], "input.shape"), given["classes"]
    _need(len(shape) in (1, 2, 3, 4), "input.shape has another number of axes")
    for key in ("mean", "std"):
        numbers = given[key]
        _need(isinstance(numbers, list) and all(type(n) in (int, float) for n in numbers), f"input.{key} is no list")
        _need(all(isfinite(n) for n in numbers), f"input.{key} is not finite")
    _need(isinstance(classes, list) and all(isinstance(n, str) for n in classes), "input.classes are no names")
    return ModelInput(shape, tuple(given["mean"]), tuple(given["std"]), tuple(classes))


def _plan(content: Any) -> Plan:
    _need(isinstance(content, dict), "plan is no mapping")
    layers, left = content["layers"], content["left"]
    _need(isinstance(layers, dict) and isinstance(left, dict), "plan.layers or plan.left is no mapping")
    _need(all(reason in REASONS for reason in left.values()), "plan.left has an unknown reason")
    return Plan({name: _layer(name, options) for name, options in layers.items()}, left)


def _layer(name: str, options: Any) -> LayerPlan:
    _need(isinstance(options, dict), f"plan.layers.{name} is no mapping")
    known = {f.name: options[f.name] for f in fields(LayerPlan) if f.name in options}
    try:
        return read_section(LayerPlan, known, Place("plan", {}, (name,)))
    except InputError as error:
        raise ValueError(str(error)) from error


def _stored(given: Any) -> Stored | None:
    if given is None:
        return None
    _need(isinstance(given, dict), "weights is no mapping")
    stored = Stored(**{f.name: given[f.name] for f in fields(Stored)})
    _need(isinstance(stored.sha256, str) and len(stored.sha256) == 64, "weights.sha256 is no hash")
    _need(_whole(stored.bytes), "weights.bytes is no length")
    _need(isinstance(stored.dtype, str), "weights.dtype is no dtype")
    _need(stored.epitomes is None or stored.epitomes in EPITOME_DTYPES, "weights.epitomes is no known dtype")
    for key in ("others", "shared"):
        words = getattr(stored, key)
        _need(isinstance(words, dict) and all(isinstance(w, str) for w in words.values()), f"weights.{key} is no map")
    _need(not set(stored.shared) & set(stored.shared.values()), "weights.shared goes in circles")
    return stored
