"""Budgets: what they are, and how a method spends one over its layers."""

from __future__ import annotations

import pytest
from benchmarks.peers.budgets import Budget, parse_budget, spread
from hypothesis import given
from hypothesis import strategies as st

from epitorch.errors import InputError


@pytest.mark.parametrize("text", ["params-0.5", "madds-0.25", "bytes-0.125", "own"])
def test_a_budget_is_read_by_its_name(text: str) -> None:
    assert parse_budget(text).name == text


@pytest.mark.parametrize("text", ["", "params", "own-0.5", "params-0", "params-1.5", "params-half", "weights-0.5"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no budget"):
        parse_budget(text)


def test_a_budget_is_a_share() -> None:
    assert parse_budget("madds-0.25") == Budget("madds", 0.25)


@given(
    tops=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    share=st.floats(0, 1),
)
def test_levels_fit_and_none_can_be_raised(tops: list[int], weights: list[int], share: float) -> None:
    layers = {f"layer{i}": top for i, top in enumerate(tops)}
    price = dict(zip(layers, weights, strict=False))

    def size(levels: dict[str, int]) -> int:
        return sum(price[name] * level for name, level in levels.items())

    lowest, highest = size(dict.fromkeys(layers, 1)), size(layers)
    limit = round(lowest + share * (highest - lowest))
    levels = spread(layers, size, limit)
    assert size(levels) <= limit
    assert all(1 <= levels[name] <= top for name, top in layers.items())
    assert all(size({**levels, name: levels[name] + 1}) > limit for name in layers if levels[name] < layers[name])


def test_a_budget_below_the_lowest_levels_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be met"):
        spread({"a": 4}, lambda levels: 10 * levels["a"], 9)
