"""Channel pruning of EfficientNet-Lite0, for comparison with epitomes (`lite0.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hidden:
    """The layers around one set of hidden channels."""

    before: Any
    norms: tuple[Any, ...]
    depthwise: Any | None
    after: Any

    @property
    def channels(self) -> int:
        """How many there are."""
        return self.before.weight.shape[0]

    @property
    def params_per_channel(self) -> int:
        """What one of them costs in all layers."""
        own = self.before.weight[0].numel() + self.after.weight.shape[0] + 2 * len(self.norms)
        return own + (self.depthwise.weight[0].numel() if self.depthwise is not None else 0)


def prune(model: Any, method: str, budget: int) -> int:
    """Silence the channels of least norm: what removing them does, since ReLU6(0) = 0 and nothing pads a value in.

    l1: the expanding filter (Li et al., 2017). l2: the projecting column.
    """
    groups = [
        Hidden(b._expand_conv, (b._bn0, b._bn1), b._depthwise_conv, b._project_conv)
        for b in model._blocks
        if hasattr(b, "_expand_conv")
    ]
    groups.append(Hidden(model._conv_head, (model._bn1,), None, model._fc))
    whole = sum(parameter.numel() for parameter in model.parameters())
    rest = whole - sum(g.channels * g.params_per_channel for g in groups)

    def total(share: float) -> int:
        return rest + sum(max(1, int(share * g.channels)) * g.params_per_channel for g in groups)

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) <= budget else (low, middle)
    for group in groups:
        _silence(group, method, max(1, int(low * group.channels)))
    return total(low)


def _silence(group: Hidden, method: str, keep: int) -> None:
    if method == "prune-l1":
        norm = group.before.weight.detach().flatten(1).abs().sum(1)
    else:
        norm = group.after.weight.detach().flatten(1).norm(dim=0)
    gone = norm.argsort(descending=True, stable=True)[keep:]
    for bn in group.norms:
        bn.weight.data[gone] = 0
        bn.bias.data[gone] = 0
