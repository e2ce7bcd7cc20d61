"""From a trained model to a plain module for inference."""

from epitorch.deploy._deploy import deploy
from epitorch.deploy._layout import LaidOutLayer, NetworkLayout, lay_out
from epitorch.deploy._parity import ParityError
from epitorch.deploy.report import Deployment, LayerDeployment

__all__ = [
    "Deployment",
    "LaidOutLayer",
    "LayerDeployment",
    "NetworkLayout",
    "ParityError",
    "deploy",
    "lay_out",
]
