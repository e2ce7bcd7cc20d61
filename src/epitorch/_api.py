"""The names of `import epitorch`, gathered; the package loads this module when one of them is asked for."""

# ruff: noqa: F401

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
