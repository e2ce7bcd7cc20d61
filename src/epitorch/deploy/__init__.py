"""From a trained model to a plain module for inference."""

from epitorch.deploy._deploy import Chooser, deploy_as, deploy_by
from epitorch.deploy._fused_native import native_available, native_problem
from epitorch.deploy._fused_pass import FusionReport, fuse
from epitorch.deploy._layout import LaidOutLayer, NetworkLayout, Rotate, lay_out
from epitorch.deploy._parity import ParityError
from epitorch.deploy.choose import DeployStrategy
from epitorch.deploy.fused import FusedInvertedResidual
from epitorch.deploy.report import Deployment, LayerDeployment

__all__ = [
    "Chooser",
    "DeployStrategy",
    "Deployment",
    "FusedInvertedResidual",
    "FusionReport",
    "LaidOutLayer",
    "LayerDeployment",
    "NetworkLayout",
    "ParityError",
    "Rotate",
    "deploy_as",
    "deploy_by",
    "fuse",
    "lay_out",
    "native_available",
    "native_problem",
]
