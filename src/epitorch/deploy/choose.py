"""Decide how each epitome layer of a model runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from epitorch.cost._trace import Trace
from epitorch.cost.analysis import cheapest, geometry_of
from epitorch.cost.formulas import Choice, executed
from epitorch.nn import EpitomeLayer

DeployStrategy = Literal["dense", "reuse"]


def choices(record: Trace, strategy: DeployStrategy) -> dict[str, Choice]:
    """Pick a strategy for every epitome layer, by qualified name.

    Args:
        record: Trace of the trained model on the example.
        strategy: "dense" folds all; "reuse" takes what executes the fewest operations.
    """
    found: dict[str, Choice] = {}
    for name, calls in record.calls.items():
        if isinstance(calls.module, EpitomeLayer):
            geometry = geometry_of(calls, record)
            choice = cheapest(calls.module, geometry)
            if strategy == "dense":
                dense = executed(calls.module.spec, geometry, "folded")
                choice = replace(choice, strategy="folded", operations=dense, reason="asked for", declined=())
            found[name] = choice
    return found
