"""Conversion in place: dense layers to epitome layers by a plan, and back."""

from epitorch.conversion._convert import Init, convert_
from epitorch.conversion._layers import EPITOME_CLASSES, refuse_scripted, weight_layers, why_left
from epitorch.conversion._report import ConversionReport, LayerReport
from epitorch.conversion._surgery import keep_hooks, refuse_derived, replace_modules, to_dense_

__all__ = [
    "EPITOME_CLASSES",
    "ConversionReport",
    "Init",
    "LayerReport",
    "convert_",
    "keep_hooks",
    "refuse_derived",
    "refuse_scripted",
    "replace_modules",
    "to_dense_",
    "weight_layers",
    "why_left",
]
