"""A plan as a file that a person can edit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from epitorch._files import write_atomic
from epitorch.errors import ConversionError, explain, require
from epitorch.plans._data import Plan

FORMAT = 1
SUFFIXES = (".json", ".yaml", ".yml")
_NOTE = """\
# Which layers become epitome layers, and how; shapes in the layers' own order. Edit `layers` as you like.
# `weights` says which model this plan is for and what it costs: it is checked before converting.
"""


def write_plan(plan: Plan, path: Path) -> Path:
    """Write the file whole or not at all; the suffix chooses the format."""
    check_suffix(path)
    content = plan_to_data(plan)
    text = json.dumps(content, indent=1) + "\n" if path.suffix == ".json" else _yaml(content)
    write_atomic(path, text.encode())
    return path


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """Return plain data; options at their default are left out."""
    content: dict[str, Any] = {"format": FORMAT}
    if plan.budget is not None:
        content["budget"] = _set_fields(plan.budget)
        totals = {"params": plan.params, "madds": plan.madds, "madds_fresh": plan.madds_fresh}
        content["totals"] = {name: total for name, total in totals.items() if total is not None}
    content["layers"] = {name: _set_fields(layer) for name, layer in plan.layers.items()}
    content["left"] = dict(plan.left)
    content["weights"] = {name: _set_fields(facts) for name, facts in plan.weights.items()}
    return content


def check_suffix(path: Path) -> None:
    """Refuse a file that is neither JSON nor YAML by its name."""
    if path.suffix not in SUFFIXES:
        raise ConversionError(
            explain("a plan's file is JSON or YAML", expected=" | ".join(SUFFIXES), got=path.suffix, where=str(path))
        )


def _set_fields(data: Any) -> dict[str, Any]:
    values = {f.name: getattr(data, f.name) for f in fields(data) if getattr(data, f.name) != f.default}
    required = {f.name: getattr(data, f.name) for f in fields(data) if f.default is MISSING}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in {**required, **values}.items()}


def _yaml(content: Mapping[str, Any]) -> str:
    """One line for each layer."""
    lines = [_NOTE.rstrip()]
    for section, value in content.items():
        if not isinstance(value, Mapping) or not value:
            lines.append(f"{section}: {_inline(value)}")
            continue
        lines.append(f"{section}:")
        lines += [f"  {_key(name)}: {_inline(entry)}" for name, entry in value.items()]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    """Quoted unless it begins like a word: `1e3` would be read as a number."""
    return _inline(name) if name[:1].isalpha() else json.dumps(name, ensure_ascii=False)


def _inline(value: Any) -> str:
    yaml = require("yaml", "train")
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip()
