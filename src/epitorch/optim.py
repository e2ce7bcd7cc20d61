"""Parameter groups: starts and learners apart from weights."""

from __future__ import annotations

from math import inf
from typing import Any

from torch import nn

from epitorch.errors import InputError, check_is_model, explain
from epitorch.nn import EpitomeLayer


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float | None = None, start_lr: float | None = None
) -> list[dict[str, Any]]:
    """Split a model's parameters for an optimiser of torch.

    The gradient of a start sums over a whole block of the weight, so starts and the learners that make them want a
    rate of their own; they are measured in positions, and decay would pull them towards position 0, so they have none.

    Args:
        model: Any model, converted or not.
        lr: Learning rate of the weights (epitomes and everything that is not a start).
        weight_decay: Of the weights; default the optimiser's own.
        start_lr: Learning rate of starts and learners, in positions; default `lr / 5`.

    Returns:
        Groups named "weights", "starts" and "learners", without the empty ones. Frozen parameters are left out.

    Raises:
        InputError: If a rate is negative or not a number.

    Example:
        >>> torch.optim.SGD(param_groups(model, lr=0.1, weight_decay=5e-4), momentum=0.9)
    """
    check_is_model(model)
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("start_lr", start_lr)):
        if value is None and name != "lr":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise InputError(explain(f"{name} is not valid", expected="a number from 0 up", got=repr(value)))
    rate = lr / 5 if start_lr is None else start_lr
    starts, learners = _starts_and_learners(model)
    apart = {id(parameter) for parameter in (*starts, *learners)}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    groups: list[dict[str, Any]] = [
        {"name": "weights", "params": weights, "lr": lr},
        {"name": "starts", "params": starts, "lr": rate, "weight_decay": 0.0},
        {"name": "learners", "params": learners, "lr": rate, "weight_decay": 0.0},
    ]
    if weight_decay is not None:
        groups[0]["weight_decay"] = weight_decay
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    return [group for group in groups if group["params"]]


def _starts_and_learners(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    starts: list[nn.Parameter] = []
    learners: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, EpitomeLayer):
            starts += module.routing_map.parameters()
            learners += module.learner.parameters() if module.learner is not None else []
    return starts, learners
