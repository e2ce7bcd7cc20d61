"""A plan: which layers of a model get an epitome of which shape. Plain data, saved as YAML or JSON."""

from epitorch.plans._data import REASONS, Budget, BudgetKind, LayerPlan, Plan, Reason, WeightFacts, planned_params
from epitorch.plans._read import read_layer_plan
from epitorch.plans._select import Selector, check_selectors, selected
from epitorch.plans._write import check_suffix, plan_to_data

__all__ = [
    "REASONS",
    "Budget",
    "BudgetKind",
    "LayerPlan",
    "Plan",
    "Reason",
    "Selector",
    "WeightFacts",
    "check_selectors",
    "check_suffix",
    "plan_to_data",
    "planned_params",
    "read_layer_plan",
    "selected",
]
