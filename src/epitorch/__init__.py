"""epitorch: Neural Epitome Search for PyTorch.

Every convolution or linear weight is generated from a much smaller learned tensor, the epitome, through learned,
fractional, circular start indices. The architecture never changes and the model size is set exactly.
"""

from epitorch.checkpoint import from_pretrained, push_to_hub, save_pretrained
from epitorch.conversion import ConversionReport, convert_, to_dense_
from epitorch.cost import Cost, Sensitivity, count, plan, sensitivity
from epitorch.deploy import Deployment
from epitorch.export import ExportReport, export
from epitorch.models.efficientnet import efficientnet_plan
from epitorch.models.mobilenetv2 import mobilenetv2_plan
from epitorch.nn import EpitomeLayer, learner_starts
from epitorch.optim import param_groups
from epitorch.plans import LayerPlan, Plan
from epitorch.tuning import deploy
from epitorch.warmstart import activation_moments, reestimate_batch_norm_

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
