"""A plan: which layers of a model get an epitome of which shape. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from epitorch.spec import ChannelStarts, EpitomeSpec, SpatialStarts

Reason = Literal[
    "not_in_plan",
    "stem",
    "depthwise",
    "no_expansion",
    "middle",
    "last_conv",
    "classifier",
    "already_epitome",
    "other_kind",
    "no_weight",
    "lazy",
    "quantized",
    "scripted",
]
"""Why a layer that has a weight was left dense. A closed list."""


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is converted: the keyword-only arguments of an epitome layer.

    Args:
        epitome_shape: In the layer's storage order, as the layer takes it.
        block_out: beta_2; None is the whole axis.
        block_in: beta_1; None is the whole axis.
        spatial_starts: Owners of spatial starts.
        channel_starts: One start per block or per pair of blocks.
        index: "learner", "direct" or "fixed".
        group_length: Super-index length.
        flatten_kernel: Treat the weight as a matrix.
        momentum: mu of the routing map.
        spatial_shift: Spatial starts also where the epitome's window equals the kernel.
    """

    epitome_shape: tuple[int, ...]
    block_out: int | None = None
    block_in: int | None = None
    spatial_starts: SpatialStarts = "in"
    channel_starts: ChannelStarts = "separable"
    index: Literal["learner", "direct", "fixed"] = "learner"
    group_length: int | None = None
    flatten_kernel: bool = False
    momentum: float = 0.97
    spatial_shift: bool = False

    def spec(self, dense: nn.Module) -> EpitomeSpec:
        """Shapes of the epitome layer that would replace `dense`."""
        weight: Any = dense.weight
        return EpitomeSpec.for_layer(
            tuple(weight.shape),
            self.epitome_shape,
            transposed=isinstance(dense, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d),
            flatten_kernel=self.flatten_kernel,
            block_out=self.block_out,
            block_in=self.block_in,
            spatial_starts=self.spatial_starts,
            channel_starts=self.channel_starts,
            group_length=self.group_length,
            spatial_shift=self.spatial_shift,
        )


@dataclass(frozen=True)
class Plan:
    """What to convert, by qualified module name, and why the rest is left.

    Example:
        >>> plan = Plan({"conv1": LayerPlan((16, 3, 3, 3))})
    """

    layers: Mapping[str, LayerPlan]
    left: Mapping[str, Reason] = field(default_factory=dict)


def planned_params(model: nn.Module, plan: Plan) -> int:
    """Total parameters after converting: epitomes, routing maps and all that stays; no learners."""
    modules = dict(model.named_modules())
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, layer in plan.layers.items():
        spec = layer.spec(modules[name])
        total += spec.num_epitome + spec.num_starts - spec.num_weight
    return total
