"""`README.md` of a checkpoint: the model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from epitorch.checkpoint._data import FACTORY, CheckpointConfig, Stored
from epitorch.nn import EpitomeLayer

_COST = {
    "params": "parameters",
    "params_dense": "parameters of the dense network",
    "madds": "multiply-adds per sample, executed",
    "madds_dense": "multiply-adds of the dense network",
}
_CLASSES = 20  # named in the card; all of them are in config.json


def card(model: nn.Module, config: CheckpointConfig, stored: Stored) -> str:
    """Return the card's text, with YAML at its head as the Hub reads it."""
    parts = [
        _head(config),
        _about(config),
        _costs(model, config, stored),
        _results(config),
        _input(config),
        _use(config),
    ]
    return "\n".join(part for part in parts if part)


def _head(config: CheckpointConfig) -> str:
    library = config.model.partition(":")[0]
    tags = ["epitorch", "model-compression", *([library] if library in ("timm", "torchvision") else [])]
    return "\n".join(["---", "library_name: epitorch", "tags:", *(f"- {tag}" for tag in tags), "---", ""])


def _about(config: CheckpointConfig) -> str:
    count = 0 if config.plan is None else len(config.plan.layers)
    name = _plain(config.model.removeprefix(FACTORY))
    what = f"{count} layers generate their weights from learned epitomes." if count else "A dense network."
    return f"# {name}\n\n`{name}`, saved by epitorch. {what}\n"


def _plain(value: object) -> str:
    """One line without what Markdown or HTML would read as more than text."""
    return "".join(c for c in str(value) if c.isprintable() and c not in "|<>`[]")[:200]


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {_plain(key)} | {_plain(value)} |" for key, value in rows.items()]
    return "\n".join([f"## {title}\n", "| | |", "|---|---:|", *lines, ""]) if lines else ""


def _costs(model: nn.Module, config: CheckpointConfig, stored: Stored) -> str:
    rows: dict[str, object] = {"parameters": f"{kept_params(model):,}"}
    for key, words in _COST.items():
        if isinstance((config.cost or {}).get(key), int):
            rows[words] = f"{config.cost[key]:,}"  # type: ignore[index]
    rows["bytes of the file of weights"] = f"{stored.bytes:,}"
    if config.plan is not None:
        rows["epitomes stored as"] = stored.epitomes or stored.dtype
    return _table("Cost", rows)


def kept_params(model: nn.Module) -> int:
    """Parameters that inference keeps, starts of routing maps included, learners not; shared ones once."""
    learners = {id(p) for layer in _layers(model) if layer.learner is not None for p in layer.learner.parameters()}
    maps = {id(value): value.numel() for layer in _layers(model) for _, value in layer.routing_map.items()}
    return sum(({id(p): p.numel() for p in model.parameters() if id(p) not in learners} | maps).values())


def _layers(model: nn.Module) -> list[EpitomeLayer]:
    return [layer for layer in model.modules() if isinstance(layer, EpitomeLayer)]


def _results(config: CheckpointConfig) -> str:
    return _table("Results", {key: _number(value) for key, value in config.metrics.items() if value is not None})


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _input(config: CheckpointConfig) -> str:
    if config.input is None:
        return ""
    given, classes = config.input, config.input.classes
    more = f" and {len(classes) - _CLASSES} more" if len(classes) > _CLASSES else ""
    rows: dict[str, object] = {
        "shape": " x ".join(map(str, given.shape)),
        "mean": ", ".join(map(_number, given.mean)),
        "standard deviation": ", ".join(map(_number, given.std)),
        "classes": (", ".join(classes[:_CLASSES]) + more) or "not stated",
    }
    return _table("Input", rows)


def _use(config: CheckpointConfig) -> str:
    more = ", factory=..." if config.model.startswith(FACTORY) else ""
    return (
        "## Use\n\n```python\nimport epitorch\n\n"
        f'model = epitorch.from_pretrained("this folder, or its name on the Hub"{more})\n```\n\n'
        "No code and no pickle is read from these files.\n"
    )
