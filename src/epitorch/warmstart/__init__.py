"""Warm start: epitomes and starts from pretrained dense weights."""

from epitorch.warmstart._calibration import activation_moments, reestimate_batch_norm_
from epitorch.warmstart._fit import FitResult, fit_epitome, fit_layer

__all__ = ["FitResult", "activation_moments", "fit_epitome", "fit_layer", "reestimate_batch_norm_"]
