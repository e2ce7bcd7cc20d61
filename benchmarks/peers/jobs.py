"""The runs of a part: which there are, what each needs first, where they lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.budgets import parse_budget
from benchmarks.peers.methods import METHODS
from benchmarks.peers.parts import Part

from epitorch.errors import InputError, explain, suggest

RESULT = "result.json"


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        part: What is compared.
        method: Name.
        budget: Name.
        seed: Of the run.
        data: Folder or file of the data.
        out: Folder of all runs.
        smoke: Two steps on a tiny set.
    """

    part: Part
    method: str
    budget: str
    seed: int
    data: str
    out: Path
    smoke: bool = False

    @property
    def name(self) -> str:
        """Of its folder and of its result."""
        return f"{self.method}-{self.budget}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """Of its files."""
        return self.out / self.part.name / self.name

    def other(self, method: str) -> Job:
        """The run of the same seed that another method makes, at the same budget if it has budgets."""
        budget = "own" if METHODS[method].budgets == ("own",) else self.budget
        return Job(self.part, method, budget, self.seed, self.data, self.out, self.smoke)

    def needed(self) -> list[Job]:
        """Runs that must be finished before."""
        method = METHODS[self.method]
        if method.begins == "fresh" or (method.begins == "half" and not self.part.trains):
            return []
        return [self.other("start" if method.begins == "half" else method.begins), *self._dense()]

    def _dense(self) -> list[Job]:
        """A budget in bytes is a share of the dense network's file."""
        return [self.other("dense")] if self.budget.startswith("bytes") else []

    def identity(self) -> dict[str, Any]:
        """What a finished run must have in common with this one to be kept."""
        return {
            "part": self.part.name,
            "method": self.method,
            "budget": self.budget,
            "seed": self.seed,
            "epochs": [self.part.epochs, self.part.start_epochs],
            "recipe": json.loads(json.dumps([self.part.recipe, self.part.tuning, self.part.arguments])),
            "smoke": self.smoke,
        }

    def result(self) -> dict[str, Any] | None:
        """What it measured, failures too; None if it is not finished or was another run."""
        try:
            found: dict[str, Any] = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if found.get("identity") == self.identity() else None


def jobs_of(
    part: Part,
    data: str,
    out: Path,
    *,
    methods: Sequence[str] = (),
    budgets: Sequence[str] = (),
    seeds: Sequence[int] = (),
    smoke: bool = False,
) -> list[Job]:
    """All runs of a part in an order in which each finds what it needs; those that others need among them.

    Raises:
        InputError: If the part has no such method.
    """
    for name in methods:
        if name not in part.methods:
            why = part.left_out.get(name, f"unknown{suggest(name, list(part.methods))}")
            raise InputError(
                explain(f"'{name}' is not in part {part.name}", expected=", ".join(part.methods), got=f"{name}: {why}")
            )
    found: dict[str, Job] = {}
    for seed in seeds or part.seeds:
        for budget in ("own", *(budgets or part.budgets)):
            for method in [name for name in part.methods if not methods or name in methods]:
                if parse_budget(budget).kind in METHODS[method].budgets:
                    _add(Job(part, method, budget, seed, data, out, smoke), found)
    return list(found.values())


def _add(job: Job, found: dict[str, Job]) -> None:
    for before in job.needed():
        _add(before, found)
    found.setdefault(job.name, job)
