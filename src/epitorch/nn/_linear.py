"""EpitomeLinear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epitorch.errors import ShapeError, explain
from epitorch.nn._base import EpitomeLayer, Index
from epitorch.spec import ChannelStarts, SpatialStarts


class EpitomeLinear(EpitomeLayer):
    """`torch.nn.Linear` whose weight `(out_features, in_features)` is generated from an epitome `(O, I)`.

    Args:
        in_features: Size of each input sample.
        out_features: Size of each output sample.
        bias: Learn an additive bias.
        epitome_shape: `(O, I)`.
        block_out: Patch length along the filters; default `O`.
        block_in: Patch length along the inputs; default `I`.
        spatial_starts: Without effect; a linear layer has no spatial axes.
        channel_starts: `"separable"`, `"grid"`, `"grid_out"` or `"grid_in"`; see `EpitomeConv2d`.
        index: `"learner"`, `"direct"` or `"fixed"`.
        group_length: Super-index length.
        flatten_kernel: Without effect; the weight is a matrix already.
        momentum: mu of the routing map.
        spatial_shift: Without effect.

    Raises:
        ShapeError: If sizes do not fit together.

    Example:
        >>> EpitomeLinear(64, 10, epitome_shape=(10, 16))(torch.zeros(2, 64)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        epitome_shape: Sequence[int],
        block_out: int | None = None,
        block_in: int | None = None,
        spatial_starts: SpatialStarts = "in",
        channel_starts: ChannelStarts = "separable",
        index: Index = "learner",
        group_length: int | None = None,
        flatten_kernel: bool = False,
        momentum: float = 0.97,
        spatial_shift: bool = False,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                wrong = f"{name} is not valid"
                raise ShapeError(explain(wrong, expected="a whole number from 1 up", got=repr(size), where=self._where))
        self.in_features, self.out_features = in_features, out_features
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._build(
            (out_features, in_features),
            epitome_shape,
            in_features,
            bias,
            factory,
            block_out=block_out,
            block_in=block_in,
            spatial_starts=spatial_starts,
            channel_starts=channel_starts,
            index=index,
            group_length=group_length,
            flatten_kernel=False,
            momentum=momentum,
            spatial_shift=spatial_shift,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to shape (..., in_features); returns (..., out_features)."""
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ShapeError(
                explain(
                    "the input does not fit the layer",
                    expected=f"shape (..., {self.in_features})",
                    got=tuple(input.shape),
                    where=self._where,
                )
            )
        return F.linear(input, self._weight_for(input), self.bias)

    def to_dense(self) -> nn.Linear:
        """Return a `torch.nn.Linear` with the generated weight."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        self._fill_dense(dense)
        return dense

    def extra_repr(self) -> str:
        """Arguments, as torch shows them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            + self._epitome_repr()
        )
