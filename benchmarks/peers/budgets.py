"""What a compressed network may cost, and how a method spends it over its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from epitorch.errors import InputError, explain

KINDS = ("params", "madds", "bytes", "own")
Levels = dict[str, int]


@dataclass(frozen=True)
class Budget:
    """A share of what the dense network costs.

    Args:
        kind: Parameters, executed multiply-adds of one input or bytes of the file; "own" where the method has one size.
        share: Of the dense network's.
    """

    kind: str
    share: float = 1.0

    @property
    def name(self) -> str:
        """For tables and folders."""
        return self.kind if self.kind == "own" else f"{self.kind}-{self.share:g}"


def parse_budget(text: str) -> Budget:
    """Read `params-0.5`, `madds-0.25`, `bytes-0.125` or `own`.

    Raises:
        InputError: If it is none of them.
    """
    kind, _, share = text.partition("-")
    try:
        budget = Budget(kind, float(share or 1))
    except ValueError:
        budget = Budget("")
    if budget.kind not in KINDS or not 0 < budget.share <= 1 or (budget.kind == "own") != (not share):
        raise InputError(explain("this is no budget", expected="params-0.5, madds-0.25, bytes-0.125, own", got=text))
    return budget


def spread(
    tops: Mapping[str, int],
    size: Callable[[Levels], int],
    limit: int,
    weights: Mapping[str, float] | None = None,
) -> Levels:
    """Give every layer the same share of its highest level, then one level more in turn while that fits.

    Args:
        tops: Highest level (rank, channels, bits) of each layer; the lowest is 1.
        size: What the network costs at given levels; it must not fall when a level rises.
        limit: Largest allowed size.
        weights: What each layer's share is in proportion to, as long as it is below 1; the same for all by default.

    Raises:
        InputError: If the lowest levels are too many.
    """

    weight = dict.fromkeys(tops, 1.0) if weights is None else weights
    whole = 1 / min(weight.values())  # at which all have their highest level

    def at(share: float) -> Levels:
        return {name: min(top, max(1, int(share * whole * weight[name] * top))) for name, top in tops.items()}

    if size(at(0)) > limit:
        raise InputError(explain("the budget cannot be met", expected=f">= {size(at(0))}, its smallest", got=limit))
    low, high = 0.0, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if size(at(middle)) <= limit else (low, middle)
    return _filled(at(low), tops, size, limit)


def _filled(levels: Levels, tops: Mapping[str, int], size: Callable[[Levels], int], limit: int) -> Levels:
    growing = [name for name in sorted(tops, key=lambda name: -tops[name]) if levels[name] < tops[name]]
    while growing:
        grown = []
        for name in growing:
            more = {**levels, name: levels[name] + 1}
            if size(more) <= limit:
                levels = more
                grown.append(name)
        growing = [name for name in grown if levels[name] < tops[name]]
    return levels
