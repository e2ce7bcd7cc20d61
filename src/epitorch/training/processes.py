"""Several processes that train one network together: Lightning over torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from epitorch.errors import InputError, explain
from epitorch.training.ranks import ALONE, Ranks


def launched(devices: int | None, nodes: int | None) -> tuple[int, int]:
    """Return processes per machine and machines: as given, else as `torchrun` has started them, else one."""
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_WORLD_SIZE" not in os.environ:  # not torchrun
        local = world = 1
    return devices or local, nodes or max(1, world // local)


def is_first() -> bool:
    """Whether this process is the one that prints, as Lightning sees it."""
    return getattr(rank_zero_only, "rank", 0) == 0


def find_ranks(accelerator: str, devices: int, nodes: int) -> Ranks:
    """Ask Lightning which process this is: under torchrun, SLURM, or its own launcher.

    Raises:
        InputError: If there are not so many devices, or the launcher has started another number of processes.
    """
    if devices * nodes == 1:
        return ALONE
    try:
        probe = pl.Trainer(
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=DDPStrategy(),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        raise InputError(
            explain(
                "cannot train with so many processes",
                expected=f"{devices} devices on each of {nodes} machines",
                got=str(error).splitlines()[0],
                where="--devices, --nodes",
            )
        ) from error
    return Ranks(probe.global_rank, probe.world_size, probe.local_rank)


def strategy(ranks: Ranks, *, some_unused: bool) -> Any:
    """Return Lightning's strategy.

    Args:
        ranks: This process.
        some_unused: Some parameters stop to take part in the loss: a learner whose routing map is frozen.
    """
    if ranks.world == 1:
        return "auto"
    # Routing maps are equal on every rank by themselves and running statistics matter at evaluation only (see
    # `share_buffers`): torch's broadcast before every pass, evaluation included, would wait for ranks without a batch.
    return DDPStrategy(broadcast_buffers=False, find_unused_parameters=some_unused)


@contextmanager
def group_ended() -> Iterator[None]:
    """Leave no process group behind that began inside."""
    before = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        yield
    finally:
        if not before and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
