"""Epitomes and WSNet, by epitorch's own recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.budgets import Levels, spread
from benchmarks.peers.methods.base import Changes, Task
from torch import nn

import epitorch
from epitorch.checkpoint import load_checkpoint, save_pretrained
from epitorch.models.audio import FOURFOLD
from epitorch.plans import LayerPlan

_TEACHER = {"teacher_weight": 0.5, "temperature": 4.0}


def epitome(task: Task) -> Changes:
    """Starts learned directly; the planner's own form: one start for each pair of blocks where rank would be lost."""
    return {"epitome": {"index": "direct", **_amount_of(task, "auto")}}


def fixed(task: Task) -> Changes:
    """The same epitomes with evenly spread starts that stay: what learning them adds."""
    return {"epitome": {"index": "fixed", **_amount_of(task, "auto")}}


def by_positions(task: Task) -> Changes:
    """Learned starts; what is kept of a weight is in proportion to the root of the positions at which it is used."""
    return {"epitome": {"index": "direct", "budget": {**_budget(task, "auto"), "policy": "positions"}}}


def partial(task: Task) -> Changes:
    """Fixed starts of pairs of blocks on the shortened axis alone: nearly all rank, and multiply-adds saved."""
    return {"epitome": {"index": "fixed", **_amount_of(task, "partial")}}


def warm(task: Task) -> Changes:
    """Begun from the trained dense network: the nearest epitomes, one start per channel."""
    assert task.start is not None
    section = {"index": "direct", "init": "least_squares", **_amount_of(task, "fine")}
    return {"model": {**_dense(task), "checkpoint": str(task.start)}, "epitome": section}


def distilled(task: Task) -> Changes:
    """Fresh epitomes that learn from the dense network as well as from the labels."""
    return {**epitome(task), "training": _teacher(task)}


def warm_distilled(task: Task) -> Changes:
    """Both."""
    return {**warm(task), "training": _teacher(task)}


def wsnet(task: Task) -> Changes:
    """Fixed, evenly spread starts for blocks of filters and of input channels; on sound one long filter a layer."""
    amount = _amount_of(task, "separable")
    for layer in amount.get("layers", {}).values():
        layer["group_length"] = layer["epitome_shape"][1]  # the input channels repeat without a shift
    return {"epitome": {"index": "fixed", **amount}}


def convert_epitome(model: nn.Module, task: Task) -> nn.Module:
    """Without training: the nearest epitomes, one start per channel."""
    plan = epitorch.plan(model, task.example, index="direct", form="fine", skip=task.skip, **_amount(task))
    epitorch.convert_(model, plan, init="least_squares")
    return model


def convert_by_positions(model: nn.Module, task: Task) -> nn.Module:
    """The same, with more kept of weights that are used at many positions."""
    options: dict[str, Any] = {"index": "direct", "form": "fine", "skip": task.skip, **_amount(task)}
    plan = epitorch.plan(model, task.example, policy="positions", **options)
    epitorch.convert_(model, plan, init="least_squares")
    return model


def convert_wsnet(model: nn.Module, task: Task) -> nn.Module:
    """Without training: the nearest epitomes for starts that stay evenly spread."""
    plan = epitorch.plan(model, task.example, index="fixed", form="separable", skip=task.skip, **_amount(task))
    epitorch.convert_(model, plan, init="least_squares")
    return model


def store_int8(model: nn.Module, task: Task, folder: Path) -> tuple[nn.Module, Path]:
    """Write epitomes in 8 bits, one scale for each of their output channels, and read the network back."""
    save_pretrained(model, folder, dtype="int8")
    return load_checkpoint(folder, allow_factory=True).model, folder / "model.safetensors"


def _amount(task: Task) -> dict[str, Any]:
    return {task.budget.kind: task.limit}


def _amount_of(task: Task, form: str) -> dict[str, Any]:
    """How much to compress: a budget for the planner, or on raw sound WSNet's shapes cut to the budget."""
    if task.base == "epitorch:soundnet8" and task.budget.kind == "params":
        return {"layers": sound_layers(task)}
    return {"budget": _budget(task, form)}


def _budget(task: Task, form: str) -> dict[str, Any]:
    return {task.budget.kind: task.limit, "form": form, "skip": list(task.skip)}


def sound_layers(task: Task) -> dict[str, Any]:
    """WSNet's shapes for soundnet8: one long filter for each layer, over the share of the inputs that its paper has.

    That share is the paper's at a quarter of the parameters and follows the budget elsewhere; the lengths are the
    largest that fit, the same part of all filters in a row.
    """
    weights = {name: tuple(m.weight.shape) for name, m in task.dense().named_modules() if isinstance(m, nn.Conv1d)}
    inputs = {name: max(1, round(FOURFOLD[int(name[4:])][1] * 0.25 / task.budget.share)) for name in weights}
    rest = task.size(task.dense()) - sum(out * into * kernel for out, into, kernel in weights.values())

    def layer(name: str, length: int) -> LayerPlan:
        _, into, kernel = weights[name]
        length = max(kernel, length)
        shape = (1, max(1, into // inputs[name]), length)
        return LayerPlan(shape, spatial_starts="out", spatial_shift=length == kernel)

    def size(lengths: Levels) -> int:
        specs = [layer(name, length).spec_for(weights[name]) for name, length in lengths.items()]
        return rest + sum(spec.num_epitome + spec.num_starts for spec in specs)

    lengths = spread({name: out * kernel for name, (out, _, kernel) in weights.items()}, size, task.limit)
    planned = {name: layer(name, length) for name, length in lengths.items()}
    return {
        name: {"epitome_shape": list(plan.epitome_shape), "spatial_starts": "out", "spatial_shift": plan.spatial_shift}
        for name, plan in planned.items()
    }


def _teacher(task: Task) -> dict[str, Any]:
    return {"teacher": str(task.start), **_TEACHER}


def _dense(task: Task) -> dict[str, Any]:
    return {"name": task.base, "arguments": dict(task.arguments)}


INT8_CODE = (store_int8,)
