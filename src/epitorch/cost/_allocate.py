"""Spend a budget on ladders.

The walk is a sequence of decisions "take this step if it still fits", and which step comes next depends on earlier
decisions alone, never on the budget. So take two budgets b < b' and the first step, of cost c at the total A, that they
decide differently: `total(b) <= b < A + c <= total(b')`. A smaller budget never gives a larger total.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def allocate(costs: Sequence[Sequence[int]], keys: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Choose a rung of every ladder.

    First steps are taken in the order of their keys until one does not fit. Then the remainder is spent in passes that
    give each layer at most one more step, the dearest step first, until nothing fits: no layer runs away with it.

    Args:
        costs: For each layer its rungs' costs, strictly rising.
        keys: Likewise; `keys[l][k]` is when layer `l` climbs to rung `k`, small numbers first.
        budget: Largest sum of the costs; at least the sum of the first rungs.

    Returns:
        For each layer the number of its rung.
    """
    levels = [0] * len(costs)
    rest = budget - sum(ladder[0] for ladder in costs)
    waiting = [(keys[layer][1], layer) for layer, ladder in enumerate(costs) if len(ladder) > 1]
    heapq.heapify(waiting)
    while waiting:
        _, layer = heapq.heappop(waiting)
        step = _step(costs[layer], levels[layer])
        if step > rest:
            break
        rest, levels[layer] = rest - step, levels[layer] + 1
        if levels[layer] + 1 < len(costs[layer]):
            heapq.heappush(waiting, (keys[layer][levels[layer] + 1], layer))
    while (left := _pass(costs, levels, rest)) < rest:
        rest = left
    return levels


def _pass(costs: Sequence[Sequence[int]], levels: list[int], rest: int) -> int:
    """Give each layer one more step where it fits; returns what is left."""
    steps = [(-_step(ladder, levels[k]), k) for k, ladder in enumerate(costs) if levels[k] + 1 < len(ladder)]
    for negative, layer in sorted(steps):
        if -negative <= rest:
            rest, levels[layer] = rest + negative, levels[layer] + 1
    return rest


def _step(ladder: Sequence[int], level: int) -> int:
    return ladder[level + 1] - ladder[level]
