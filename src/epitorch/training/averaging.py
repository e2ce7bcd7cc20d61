"""The moving average of the weights (EMA) that is evaluated and kept in place of the last weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from epitorch.nn import EpitomeLayer


class WeightAverage:
    """torch's `AveragedModel` over parameters and buffers, right for epitome layers too.

    Epitomes, learned starts, learners, routing maps and running statistics are all averaged alike: starts are
    positions on a line that only `snap` wraps around, so that their mean is a position between them. A frozen map is
    taken over as it is, with its flag: from then on the weights are trained for this map. Counters are copied.

    Not Lightning's `WeightAveraging`: it averages integer and boolean buffers too, copies the whole module (teacher
    included), and swaps tensors but not the flags that belong to them.

    Args:
        model: The model in training; it is copied.
        decay: Part of the old average that stays at each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._averaged = AveragedModel(model, multi_avg_fn=_ema(decay), use_buffers=True)
        self._averaged.requires_grad_(False)

    @property
    def model(self) -> nn.Module:
        """The averaged model."""
        return self._averaged.module

    def update(self, model: nn.Module) -> None:
        """Take in the weights after an optimiser step; the first time they are copied."""
        self._averaged.update_parameters(model)
        for own, other in zip(self.model.modules(), model.modules(), strict=True):
            if isinstance(own, EpitomeLayer) and isinstance(other, EpitomeLayer) and other.routing_map.is_frozen:
                own.routing_map.set(other.routing_map.as_dict())
                own.freeze_routing()

    def to(self, device: torch.device | str) -> None:
        """Move it."""
        self._averaged.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return average and count."""
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._averaged.load_state_dict(state)


def _ema(decay: float) -> Callable[[Sequence[Tensor], Sequence[Tensor], Any], None]:
    """Update tensors of one dtype: `decay * average + (1 - decay) * value` for floats, the value for others."""

    @torch.no_grad()
    def update(averaged: Sequence[Tensor], values: Sequence[Tensor], _count: Any) -> None:
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(list(averaged), list(values), 1 - decay)
            return
        for average, value in zip(averaged, values, strict=True):
            average.copy_(value)

    return update
