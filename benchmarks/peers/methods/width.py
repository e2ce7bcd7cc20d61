"""The width multiplier: the same network with fewer channels everywhere, or in the hidden layers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from benchmarks.peers.budgets import Levels, spread
from benchmarks.peers.methods.base import Changes, Task
from benchmarks.peers.networks import NAME, Layers, base_network, built
from torch import nn

import epitorch


def narrow(task: Task) -> Changes:
    """Channels of the whole network, each number of channels scaled alike; inputs and classes stay."""
    return _spread(task, None)


def narrow_by_positions(task: Task) -> Changes:
    """Shares of parameters as the policy "positions" has them: channels go with the fourth root of their positions."""
    channels, cost = _channels(task.dense()), epitorch.count(task.dense(), task.example)
    positions = {layer.name: layer.madds / layer.params for layer in cost.layers if layer.name in channels}
    weights: dict[str, float] = {}
    for name, n in channels.items():
        weights[str(n)] = max(weights.get(str(n), 0.0), max(1.0, positions[name]) ** 0.25)
    return _spread(task, weights)


def _spread(task: Task, weights: Mapping[str, float] | None) -> Changes:
    dense = task.dense()
    tops = {str(n): n for n in sorted(set(_channels(dense).values()))}
    levels = spread(tops, lambda levels: _cost(task, _narrowed(dense, levels)), task.limit, weights)
    arguments = {"base": task.base, "arguments": dict(task.arguments), "layers": _narrowed(dense, levels)}
    return {"model": {"name": NAME, "arguments": {**arguments, "init": task.init}}}


def _channels(model: nn.Module) -> dict[str, int]:
    """Output channels of every layer but the classifier."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)}
    return {name: layer.weight.shape[0] for name, layer in list(layers.items())[:-1]}


def _narrowed(model: nn.Module, levels: Levels) -> Layers:
    found: Layers = {}
    last = [name for name, m in model.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)][-1]
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        shape = weight.shape
        found[name] = {"out": shape[0] if name == last else levels[str(shape[0])]}
        if weight.ndim > 1:  # images have 3 channels, sounds and depthwise filters 1
            found[name]["in"] = shape[1] if shape[1] in (1, 3) else levels[str(shape[1])]
    return found


def _cost(task: Task, layers: Layers) -> int:
    if task.budget.kind == "madds":
        return task.size(built(task.base, task.arguments, layers))
    with torch.device("meta"):  # parameters are counted without being made
        return task.size(built(task.base, task.arguments, layers))


def narrow_hidden(task: Task) -> Changes:
    """Hidden channels of MobileNetV2's inverted residuals and of its last convolution: the paper's MobileNetV2-c*."""
    low, high = 0.01, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if _hidden_cost(task, middle) <= task.limit else (low, middle)
    return {"model": {"name": task.base, "arguments": _hidden(task.arguments, low)}}


def _hidden(arguments: Mapping[str, Any], c: float) -> dict[str, Any]:
    return {**arguments, "hidden_width": c, "last_width": c}


def _hidden_cost(task: Task, c: float) -> int:
    model = base_network(task.base, _hidden(task.arguments, c))
    return epitorch.count(model, task.example).madds if task.budget.kind == "madds" else task.size(model)


CODE = (narrow, _spread, _channels, _narrowed)
POSITIONS_CODE = (narrow_by_positions, _spread, _channels, _narrowed)
