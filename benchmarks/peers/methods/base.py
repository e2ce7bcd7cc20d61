"""What a method is: where it begins, what it does to the network, and what a user writes to get it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from benchmarks.peers.budgets import Budget
from benchmarks.peers.networks import Layers, base_network
from torch import Tensor, nn

import epitorch


@dataclass(frozen=True)
class Task:
    """What a method is asked to do.

    Args:
        base: Name of the dense network.
        arguments: Of its factory.
        init: How `networks.built` draws convolutions.
        example: One input of zeros.
        budget: What the result may cost.
        skip: Layers that methods working layer by layer leave as they are.
        seed: Of the run.
        samples: Normalised training inputs that calibrate. shape: (N, C, ...).
        start: Checkpoint of the dense network trained for the first part of the epochs; None where there is none.
        dense_bytes: Of the dense network's file.
    """

    base: str
    arguments: Mapping[str, Any]
    init: str | None
    example: Tensor
    budget: Budget
    skip: tuple[str, ...]
    seed: int
    samples: Callable[[], Tensor]
    start: Path | None = None
    dense_bytes: int = 0

    def dense(self) -> nn.Module:
        """A dense network with fresh weights."""
        return base_network(self.base, self.arguments)

    def size(self, model: nn.Module) -> int:
        """What a network costs in units of the budget: parameters or multiply-adds."""
        if self.budget.kind == "madds":
            return epitorch.count(model, self.example).madds
        return sum(parameter.numel() for parameter in model.parameters())

    @cached_property
    def limit(self) -> int:
        """The budget as a number."""
        whole = self.dense_bytes if self.budget.kind == "bytes" else self.size(self.dense())
        return int(self.budget.share * whole)


Changes = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One way to make a network small.

    Args:
        name: Of folders and rows.
        label: In tables.
        budgets: Kinds that it can be matched on.
        begins: "fresh" weights, trained for all epochs; "half": the dense network trained for the first part, then
            fine-tuned for the rest; or the name of the method whose finished network it works on without training.
        changes: Sections to change in the dense network's recipe. Of "fresh" and "half".
        prepare: Takes the dense network, gives the smaller one, and the layers by which `networks.built` makes it.
            Of "half" where the recipe cannot say it.
        finish: Takes a finished network and a folder, writes the small file there, and gives the network that it holds
            and the file.
        convert: Takes the dense network and gives the smaller one without training, where the recipe says it else.
        needs: Distributions whose versions belong to the result.
        code: Functions that a user has to write; where empty the method is the lines of its recipe.
        timed_as: The method whose network runs alike, where this one changes the file alone.
    """

    name: str
    label: str
    budgets: tuple[str, ...]
    begins: str = "fresh"
    changes: Callable[[Task], Changes] | None = None
    prepare: Callable[[nn.Module, Task], tuple[nn.Module, Layers]] | None = None
    finish: Callable[[nn.Module, Task, Path], tuple[nn.Module, Path]] | None = None
    convert: Callable[[nn.Module, Task], nn.Module] | None = None
    needs: tuple[str, ...] = ()
    code: tuple[Callable[..., Any], ...] = field(default=())
    timed_as: str | None = None


def user_lines(method: Method, changes: Changes) -> int:
    """Lines of code, or of a recipe, that a user writes for this method beside training the dense network.

    Counted are the lines of the method's functions that hold code: no blank ones, comments or docstrings; of a method
    without functions the lines of YAML that its recipe has and the dense network's has not.
    """
    if method.code:
        return sum(code_lines(function) for function in method.code)
    return len(yaml.safe_dump(changes, default_flow_style=None, width=120).splitlines()) if changes else 0


def code_lines(function: Callable[..., Any]) -> int:
    """Lines of a function that hold code."""
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source)
    told: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            told |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(1 for number, line in lines if number not in told and line.strip() and not line.strip().startswith("#"))
