"""Two processes sample the same weight: the learner averages over the global batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import epitorch
from epitorch.nn import EpitomeConv2d

STEPS, RANKS = 3, 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        EpitomeConv2d(4, 12, 3, padding=1, epitome_shape=(5, 4, 3, 3)),
        nn.ReLU(),
        EpitomeConv2d(12, 6, 1, epitome_shape=(6, 5, 1, 1)),
    ).double()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.learner.head.weight.normal_()  # starts that depend on the input
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, 5, 5, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def train(model: nn.Module, parts: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(epitorch.param_groups(model, lr=0.1), momentum=0.9)
    for part in parts:
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = network()
    train(DistributedDataParallel(model), [batch[rank::RANKS] for batch in batches()])
    torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's own, in the child processes
def test_two_ranks_give_the_single_process_result(tmp_path: Path) -> None:
    mp.spawn(one_rank, (str(tmp_path),), nprocs=RANKS)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    alone = network()
    train(alone, batches())
    torch.testing.assert_close(first, alone.state_dict(), rtol=1e-9, atol=1e-11)
    half = network()
    train(half, [batch[::RANKS] for batch in batches()])
    assert not torch.allclose(
        half.state_dict()["0.routing_map.out_starts"], first["0.routing_map.out_starts"], rtol=1e-9
    )
