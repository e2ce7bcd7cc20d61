"""What a model costs: parameters and multiply-adds, by formulas in whole numbers."""

from epitorch.cost.analysis import Cost, LayerCost, Uncounted, count
from epitorch.cost.formulas import Geometry, Interpolated, LayerParams, Operations, Reason, Strategy

__all__ = [
    "Cost",
    "Geometry",
    "Interpolated",
    "LayerCost",
    "LayerParams",
    "Operations",
    "Reason",
    "Strategy",
    "Uncounted",
    "count",
]
