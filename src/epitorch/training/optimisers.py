"""Optimiser and schedule of a recipe: torch's SGD and one-cycle, or timm's by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from epitorch.errors import RecipeError, explain, require, suggest
from epitorch.optim import param_groups
from epitorch.training.recipe_training import TrainingSection


def make_groups(model: nn.Module, section: TrainingSection) -> list[dict[str, Any]]:
    """Return `epitorch.param_groups`, with biases and normalisation apart where they are not to decay."""
    groups = param_groups(model, lr=section.peak_lr, weight_decay=section.weight_decay, start_lr=section.start_lr)
    if section.norm_decay:
        return groups
    weights = next((group for group in groups if group["name"] == "weights"), None)
    flat = [] if weights is None else [value for value in weights["params"] if value.ndim <= 1]
    if weights is None or not flat:
        return groups
    weights["params"] = [value for value in weights["params"] if value.ndim > 1]
    apart = {"name": "norms and biases", "params": flat, "lr": weights["lr"], "weight_decay": 0.0}
    return [group for group in (*groups, apart) if group["params"]]


def make_optimizer(groups: list[dict[str, Any]], section: TrainingSection) -> Optimizer:
    """Return the optimiser over groups that have their own rates and decay.

    Raises:
        RecipeError: If timm has no such optimiser, or it does not take the recipe's arguments.
    """
    if section.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=section.peak_lr, momentum=section.momentum, nesterov=section.nesterov)
    optim = require("timm.optim", "models")
    known = optim.list_optimizers()
    if section.optimizer.lower() not in known:
        raise RecipeError(
            explain(
                f"there is no optimiser '{section.optimizer}'{suggest(section.optimizer, known)}",
                expected=f"sgd, or one of timm: {', '.join(known)}",
                got=repr(section.optimizer),
                where="training.optimizer",
            )
        )
    try:
        return optim.create_optimizer_v2(
            groups,
            opt=section.optimizer.lower(),
            lr=section.peak_lr,
            weight_decay=section.weight_decay,
            momentum=section.momentum,
            **section.optimizer_arguments,
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(
            explain(
                f"the optimiser '{section.optimizer}' cannot be made",
                expected="arguments that it takes",
                got=str(error),
                where="training.optimizer_arguments",
            )
        ) from error


def make_scheduler(optimizer: Optimizer, section: TrainingSection, steps: int, epochs: int) -> Any:
    """Return a scheduler to be stepped after every optimiser step.

    Args:
        optimizer: Its groups hold their peak rates.
        section: The recipe's section.
        steps: Optimiser steps of the whole training.
        epochs: Their epochs.
    """
    if section.schedule == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=steps,
            pct_start=rising_part(section.warmup, steps),
            cycle_momentum=False,
        )
    scheduler, _ = require("timm.scheduler", "models").create_scheduler_v2(
        optimizer,
        sched=section.schedule,
        num_epochs=epochs,
        decay_epochs=section.decay_epochs,
        decay_rate=section.decay_rate if section.schedule in ("step", "poly") else 1.0,
        min_lr=section.min_lr,
        warmup_lr=section.warmup_lr,
        warmup_epochs=section.warmup_epochs,
        step_on_epochs=False,
        updates_per_epoch=steps // epochs,
    )
    return scheduler


def rising_part(warmup: float, steps: int) -> float:
    """Return the part of the schedule that rises: `warmup`, or a little less where OneCycleLR would divide by zero.

    It does where the rise is exactly one step long, and, after the last step, where it takes up all steps.
    """
    return warmup * 0.999 if warmup == 1 or abs(warmup * steps - 1) < 1e-6 else warmup
