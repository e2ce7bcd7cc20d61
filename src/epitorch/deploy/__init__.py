"""From a trained model to a plain module for inference."""

from epitorch.deploy._deploy import deploy
from epitorch.deploy._parity import ParityError
from epitorch.deploy.report import Deployment, LayerDeployment

__all__ = ["Deployment", "LayerDeployment", "ParityError", "deploy"]
