"""Torch-Pruning: channels of least group magnitude go, a few at a time, until the network is small enough."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.methods.base import Task
from benchmarks.peers.networks import Layers, describe_channels, peer
from torch import nn

STEPS = 200
_DEEPEST = 0.98  # share of the channels that the last step would leave out


def prune(model: nn.Module, task: Task) -> tuple[nn.Module, Layers]:
    """Prune all channels but those of the classifier."""
    return _described(iterate(model, task, [last_layer(model)]), task)


def prune_hidden(model: nn.Module, task: Task) -> tuple[nn.Module, Layers]:
    """Prune the channels between the two convolutions of a residual block; what the shortcuts add stays whole."""
    kept: list[nn.Module] = [m for name, m in model.named_modules() if name == "conv1" or name.endswith(".conv2")]
    return _described(iterate(model, task, [*kept, last_layer(model)]), task)


def iterate(model: nn.Module, task: Task, ignored: list[nn.Module]) -> nn.Module:
    """Prune group by group, the importance measured anew in every step, until the budget is met."""
    tp: Any = peer("torch_pruning")
    model.eval()
    pruner = tp.pruner.BasePruner(
        model,
        task.example,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=_DEEPEST,
        ignored_layers=ignored,
        iterative_steps=STEPS,
    )
    for _ in range(STEPS):
        for group in pruner.step(interactive=True):
            if task.size(model) <= task.limit:
                return model
            group.prune()
    if task.size(model) > task.limit:
        raise RuntimeError(f"pruning ended at {task.size(model)}, above the budget of {task.limit}")
    return model


def last_layer(model: nn.Module) -> nn.Module:
    """The classifier."""
    return [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)][-1]


def _described(model: nn.Module, task: Task) -> tuple[nn.Module, Layers]:
    return model, describe_channels(model, task.dense())
