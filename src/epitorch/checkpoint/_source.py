"""Where a model comes from: its name and arguments, its plan and its preprocessing, read off the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from epitorch._inputs import CHECKPOINT, ModelInput, noted_input
from epitorch.checkpoint._data import CheckpointConfig
from epitorch.models.resolve import origin_of
from epitorch.nn import EpitomeLayer
from epitorch.plans import LayerPlan, Plan


@dataclass(frozen=True)
class Source:
    """What rebuilds the dense model. `model` is None where nothing says."""

    model: str | None
    arguments: dict[str, Any]


def remember(model: nn.Module, config: CheckpointConfig) -> None:
    """Note on a model the configuration that it was loaded by."""
    model.__dict__[CHECKPOINT] = config


def known_config(model: nn.Module) -> CheckpointConfig | None:
    """The configuration that the model was loaded by; None for one that was not."""
    return model.__dict__.get(CHECKPOINT)


def find_source(model: nn.Module) -> Source:
    """Name and arguments: of the checkpoint that it was loaded from, of `build_model`, or what timm notes."""
    config = known_config(model)
    if config is not None:
        return Source(config.model, config.arguments)
    origin = origin_of(model)
    if origin is not None:
        return Source(origin.name, dict(origin.arguments))
    architecture = _timm(model).get("architecture")
    if not architecture:
        return Source(None, {})
    classes = getattr(model, "num_classes", None)
    return Source(f"timm:{architecture}", {} if classes is None else {"num_classes": classes})


def find_input(model: nn.Module) -> ModelInput | None:
    """Preprocessing: of the checkpoint that it was loaded from, or what timm notes."""
    if known_config(model) is not None:
        return noted_input(model)
    noted = _timm(model)
    if not all(noted.get(key) for key in ("input_size", "mean", "std")):
        return None
    return ModelInput(tuple(noted["input_size"]), tuple(noted["mean"]), tuple(noted["std"]), ())


def _timm(model: nn.Module) -> Mapping[str, Any]:
    noted = getattr(model, "pretrained_cfg", None)
    return noted if isinstance(noted, Mapping) else {}


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that makes the model's epitome layers; None if it has none."""
    layers = {name: _layer(layer) for name, layer in model.named_modules() if isinstance(layer, EpitomeLayer)}
    config = known_config(model)
    left = {} if config is None or config.plan is None else dict(config.plan.left)
    return Plan(layers, left) if layers else None


def _layer(layer: EpitomeLayer) -> LayerPlan:
    spec = layer.spec
    return LayerPlan(
        tuple(layer.epitome.shape),
        spec.block_out,
        spec.block_in,
        spec.spatial_starts,
        spec.channel_starts,
        layer.index,
        spec.group_length if spec.group_length > 1 else None,
        layer.flatten_kernel,
        float(layer.momentum),
        spec.spatial_shift,
    )
