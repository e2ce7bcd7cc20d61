"""From a trained model to a plain module for inference."""

from epitorch.deploy._deploy import deploy
from epitorch.deploy._fused_native import native_available, native_problem
from epitorch.deploy._fused_pass import FusionReport, fuse
from epitorch.deploy._parity import ParityError
from epitorch.deploy.fused import FusedInvertedResidual
from epitorch.deploy.report import Deployment, LayerDeployment

__all__ = [
    "Deployment",
    "FusedInvertedResidual",
    "FusionReport",
    "LayerDeployment",
    "ParityError",
    "deploy",
    "fuse",
    "native_available",
    "native_problem",
]
