"""Weights that the exported graph makes from the epitome."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from epitorch.functional import sample_weight
from epitorch.spec import semantic_order


class GeneratedWeight(nn.Module):
    """A parametrisation for a dense layer's weight: what is stored is the epitome.

    Args:
        layer: The trained epitome layer.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.spec, self.weight_shape, self.transposed = layer.spec, layer.weight_shape, layer.transposed
        self.starts = {axis: value.detach().cpu().clone() for axis, value in layer.starts().items()}
        self.epitome = layer.epitome.detach()

    def forward(self, epitome: Tensor) -> Tensor:
        """The weight in the layer's storage order."""
        semantic = epitome.transpose(0, 1) if self.transposed else epitome
        weight = sample_weight(semantic, self.starts, self.spec)
        weight = weight.reshape(semantic_order(self.weight_shape, self.transposed))
        return weight.transpose(0, 1) if self.transposed else weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The epitome that the weight came from."""
        return self.epitome
