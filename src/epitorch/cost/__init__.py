"""What a model costs: parameters and multiply-adds, by formulas in whole numbers."""

from epitorch.cost._sensitivity import Sensitivity, sensitivity
from epitorch.cost.analysis import Cost, LayerCost, OperatorCost, Uncounted, count
from epitorch.cost.formulas import Geometry, Interpolated, Kind, LayerParams, Operations, Reason, Strategy
from epitorch.cost.planning import plan

__all__ = [
    "Cost",
    "Geometry",
    "Interpolated",
    "Kind",
    "LayerCost",
    "LayerParams",
    "Operations",
    "OperatorCost",
    "Reason",
    "Sensitivity",
    "Strategy",
    "Uncounted",
    "count",
    "plan",
    "sensitivity",
]
