"""epitorch: Neural Epitome Search for PyTorch.

Every convolution or linear weight is generated from a much smaller learned tensor, the epitome, through learned,
fractional, circular start indices. The architecture never changes and the model size is set exactly.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epitorch._api import (
        ConversionReport,
        Cost,
        Deployment,
        EpitomeLayer,
        ExportReport,
        LayerPlan,
        Plan,
        Sensitivity,
        activation_moments,
        convert_,
        count,
        deploy,
        efficientnet_plan,
        export,
        from_pretrained,
        learner_starts,
        mobilenetv2_plan,
        param_groups,
        plan,
        push_to_hub,
        reestimate_batch_norm_,
        save_pretrained,
        sensitivity,
        to_dense_,
    )

__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "Cost",
    "Deployment",
    "EpitomeLayer",
    "ExportReport",
    "LayerPlan",
    "Plan",
    "Sensitivity",
    "activation_moments",
    "convert_",
    "count",
    "deploy",
    "efficientnet_plan",
    "export",
    "from_pretrained",
    "learner_starts",
    "mobilenetv2_plan",
    "param_groups",
    "plan",
    "push_to_hub",
    "reestimate_batch_norm_",
    "save_pretrained",
    "sensitivity",
    "to_dense_",
]


class _Package(ModuleType):
    """This module: `deploy` and `export` are functions here, also after the packages of these names are loaded."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Load everything when the first name is asked for: `epitorch --help` then runs without torch."""
    if not name.startswith("_"):
        api = importlib.import_module("epitorch._api")
        globals().update({public: getattr(api, public) for public in __all__})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
