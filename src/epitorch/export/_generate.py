"""Weights that the exported graph makes from the epitome."""

from __future__ import annotations

from typing import Any

import torch
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
        # ExecuTorch's kernels refuse strides in another order than the axes, those of axes of length 1 too
        starts = {axis: value.detach().cpu() for axis, value in layer.starts().items()}
        self.starts = {axis: value.clone(memory_format=torch.contiguous_format) for axis, value in starts.items()}
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
