"""What runs with and without training share."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from benchmarks.peers.jobs import Job
from benchmarks.peers.methods import Task
from torch import nn

import epitorch
from epitorch.checkpoint import Checkpoint, load_checkpoint
from epitorch.errors import DataError, InputError, MissingExtraError

Value = TypeVar("Value")


class MethodError(Exception):
    """A method failed: a result like any other."""


def attempt(work: Callable[[], Value]) -> Value:
    """Do what belongs to the method; its errors are told apart from those of data, folders and the machine.

    Raises:
        MethodError: With the method's own error as its cause.
    """
    try:
        return work()
    except (MissingExtraError, DataError, MethodError, OSError):
        raise
    except Exception as error:  # a package may raise anything
        if type(error) is InputError:  # its subclasses tell of the network, it alone of folders
            raise
        raise MethodError(str(error)) from error


def installed(package: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load_final(job: Job) -> Checkpoint:
    """The network that a run ended with."""
    return load_checkpoint(job.folder / "final", allow_factory=True)


@torch.no_grad()
def check_same(model: nn.Module, other: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise MethodError unless both networks say the same about random inputs of a shape."""
    probe = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    first, second = model.eval()(probe), other.eval()(probe)
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5 * float(first.abs().max())):
        raise MethodError(f"the file gives other outputs: they differ by {float((first - second).abs().max()):.2e}")


def costs(task: Task, model: nn.Module) -> dict[str, Any]:
    """Parameters and multiply-adds that the deployed network executes."""
    cost = epitorch.count(model, task.example)
    return {"params": cost.params, "madds": cost.madds, "uncounted": len(cost.uncounted)}
