"""A plan: which layers of a model get an epitome of which shape. Plain data, saved as YAML or JSON."""

from epitorch.plans._data import REASONS, Budget, BudgetKind, LayerPlan, Plan, Reason, WeightFacts, planned_params
from epitorch.plans._read import read_layer_plan

__all__ = [
    "REASONS",
    "Budget",
    "BudgetKind",
    "LayerPlan",
    "Plan",
    "Reason",
    "WeightFacts",
    "planned_params",
    "read_layer_plan",
]
