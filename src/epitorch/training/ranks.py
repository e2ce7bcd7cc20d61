"""Which of several processes this is, and what they do together. Needs torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is.

    Args:
        rank: Number of this process, from 0.
        world: How many there are.
        local: Number of this process on its machine: which GPU it has.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0


ALONE = Ranks()


def share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the floating-point buffers of rank 0: the running statistics of batch norm."""
    if ranks.world == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.distributed.broadcast(buffer, src=0)


def total(values: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum over all ranks; itself where there is one."""
    if ranks.world > 1:
        torch.distributed.all_reduce(values)
    return values
