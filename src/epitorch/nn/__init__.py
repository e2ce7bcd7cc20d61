"""Epitome layers: torch's convolutions and linear layer with a generated weight."""

from epitorch.nn._adapted import AdaptedLayer, adapt, name_clashes
from epitorch.nn._base import EpitomeLayer, learner_starts
from epitorch.nn._conv import (
    EpitomeConv1d,
    EpitomeConv2d,
    EpitomeConv3d,
    EpitomeConvTranspose1d,
    EpitomeConvTranspose2d,
    EpitomeConvTranspose3d,
)
from epitorch.nn._index import IndexLearner, RoutingMap, check_finite
from epitorch.nn._linear import EpitomeLinear

__all__ = [
    "AdaptedLayer",
    "EpitomeConv1d",
    "EpitomeConv2d",
    "EpitomeConv3d",
    "EpitomeConvTranspose1d",
    "EpitomeConvTranspose2d",
    "EpitomeConvTranspose3d",
    "EpitomeLayer",
    "EpitomeLinear",
    "IndexLearner",
    "RoutingMap",
    "adapt",
    "check_finite",
    "learner_starts",
    "name_clashes",
]
