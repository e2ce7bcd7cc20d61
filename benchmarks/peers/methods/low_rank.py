"""Low rank: tensorly-torch's Tucker and CP convolutions, and two 1x1 layers by singular values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from benchmarks.peers.budgets import Levels, spread
from benchmarks.peers.methods.base import Task
from benchmarks.peers.networks import Layers, factorized, pair, peer
from torch import nn

import epitorch


def tucker(model: nn.Module, task: Task) -> tuple[nn.Module, Layers]:
    """Convolutions as Tucker products whose kernel axes stay whole; 1x1 layers as two by their singular values."""
    return _compressed(model, task, _tucker_layer)


def tucker_by_positions(model: nn.Module, task: Task) -> tuple[nn.Module, Layers]:
    """The same, ranks with the fourth root of a layer's positions; where that is no saving, the layer stays."""
    layers, cost = _targets(model, task.skip), epitorch.count(model, task.example)
    roots = {row.name: max(1.0, row.madds / row.params) ** 0.25 for row in cost.layers if row.name in layers}

    def size(name: str, rank: int) -> int:
        return min(_numbers(layers[name], _tucker_layer(layers[name], rank)), layers[name].weight.numel())

    tops = {name: next(n for n in count(1) if size(name, n) == m.weight.numel()) for name, m in layers.items()}
    rest = task.size(model) - sum(layer.weight.numel() for layer in layers.values())
    levels = spread(tops, lambda ranks: rest + sum(size(*pair) for pair in ranks.items()), task.limit, roots)
    ranks = {name: _tucker_layer(layers[name], n) for name, n in levels.items() if n < tops[name]}
    return _replaced(model, ranks, trained=True), ranks


def cp(model: nn.Module, task: Task) -> tuple[nn.Module, Layers]:
    """Convolutions as sums of rank-one tensors; 1x1 layers as two by their singular values."""
    return _compressed(model, task, _cp_layer)


def _compressed(
    model: nn.Module, task: Task, describe: Callable[[Any, int], dict[str, Any]]
) -> tuple[nn.Module, Layers]:
    layers = _targets(model, task.skip)
    tops = {name: _highest(layer, describe(layer, 1)) for name, layer in layers.items()}

    def ranks(levels: Levels) -> Layers:
        return {name: describe(layer, levels[name]) for name, layer in layers.items()}

    if task.budget.kind == "madds":
        levels = spread(tops, lambda levels: task.size(_replaced(task.dense(), ranks(levels))), task.limit)
    else:
        rest = task.size(model) - sum(layer.weight.numel() for layer in layers.values())
        cost = {name: [_numbers(m, describe(m, n)) for n in range(tops[name] + 1)] for name, m in layers.items()}
        levels = spread(tops, lambda levels: rest + sum(cost[name][n] for name, n in levels.items()), task.limit)
    return _replaced(model, ranks(levels), trained=True), ranks(levels)


def _targets(model: nn.Module, skip: tuple[str, ...]) -> dict[str, Any]:
    """Convolutions and linear layers, depthwise ones and those that are left out by name not among them."""
    return {
        name: m
        for name, m in model.named_modules()
        if name not in skip and isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear) and getattr(m, "groups", 1) == 1
    }


def _highest(layer: Any, description: dict[str, Any]) -> int:
    """The largest rank that makes sense."""
    if "cp" in description:
        return layer.weight.numel() // _numbers(layer, {"cp": 1})
    out, into = layer.weight.shape[:2]
    return min(out, into) if "pair" in description else max(out, into)


def _tucker_layer(layer: Any, rank: int) -> dict[str, Any]:
    """The longer channel axis gets `rank`, the shorter one the same share."""
    if _pointwise(layer):
        return {"pair": rank}
    out, into = layer.weight.shape[:2]
    scale = rank / max(out, into)
    return {"tucker": [max(1, round(scale * out)), max(1, round(scale * into)), *layer.kernel_size]}


def _cp_layer(layer: Any, rank: int) -> dict[str, Any]:
    return {"pair" if _pointwise(layer) else "cp": rank}


def _pointwise(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) or set(layer.kernel_size) == {1}


def _numbers(layer: Any, description: dict[str, Any]) -> int:
    """Parameters that take the place of the layer's weight."""
    shape = layer.weight.shape
    if "pair" in description:
        return description["pair"] * (shape[0] + shape[1])
    if "cp" in description:
        return description["cp"] * (sum(shape) + 1)
    ranks = description["tucker"]
    core = 1
    for rank in ranks:
        core *= rank
    return core + sum(size * rank for size, rank in zip(shape, ranks, strict=True))


def _replaced(model: nn.Module, layers: Layers, *, trained: bool = False) -> nn.Module:
    modules: dict[str, Any] = dict(model.named_modules())
    for name, description in layers.items():
        model.set_submodule(name, _layer(modules[name], description, trained))
    return model


def _layer(layer: Any, description: dict[str, Any], trained: bool) -> nn.Module:
    kind, rank = next(iter(description.items()))
    if kind == "pair":
        return _by_singular_values(layer, rank) if trained else pair(layer, rank)
    rank = tuple(rank) if kind == "tucker" else rank
    if not trained:
        return factorized(layer, kind, rank)
    convolution: Any = peer("tltorch").FactorizedConv
    made: nn.Module = convolution.from_conv(layer, rank=rank, factorization=kind, implementation="factorized")
    return made


def _by_singular_values(layer: Any, rank: int) -> nn.Sequential:
    u, s, v = torch.linalg.svd(layer.weight.detach().flatten(1), full_matrices=False)
    new: Any = pair(layer, rank)
    root = s[:rank].sqrt()
    with torch.no_grad():
        new[0].weight.copy_((root[:, None] * v[:rank]).view_as(new[0].weight))
        new[1].weight.copy_((u[:, :rank] * root).view_as(new[1].weight))
        if layer.bias is not None:
            new[1].bias.copy_(layer.bias)
    return new  # type: ignore[no-any-return]


TUCKER_CODE = (_compressed, _targets, _highest, _tucker_layer, _pointwise, _numbers, _replaced, _layer)
POSITIONS_CODE = (tucker_by_positions, _targets, _tucker_layer, _pointwise, _numbers, _replaced, _layer)
CP_CODE = (_compressed, _targets, _highest, _cp_layer, _pointwise, _numbers, _replaced, _layer)
SVD_CODE = (_by_singular_values,)
