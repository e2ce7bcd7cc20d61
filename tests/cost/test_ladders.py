"""Ladders against the slow formulas, and the allocation on ladders of any kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from epitorch.conversion import convert_
from epitorch.cost import count, plan
from epitorch.cost._allocate import allocate
from epitorch.cost._ladder import (
    epitome_params,
    epitome_shapes,
    executed_madds,
    fewest_madds,
    ladder,
    make_spec,
    rank_of,
)
from epitorch.cost._survey import Candidate
from epitorch.cost.analysis import interpolated_by
from epitorch.cost.formulas import Geometry, parameters
from epitorch.errors import InputError
from epitorch.init import evenly_spread
from epitorch.plans._table import rank_bounds

WEIGHTS = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 3))
FORMS = st.sampled_from(["auto", "separable", "grid", "fine", "partial"])
STARTS = st.sampled_from(["separable", "grid", "fine", "partial"])
AXES = st.sampled_from(["auto", "out", "in", "both"])


def candidate(weight: tuple[int, ...], groups: int = 1, transposed: bool = False, own: bool = False) -> Candidate:
    return Candidate("layer", weight, Geometry(35, 24, groups, transposed), True, own, prod(weight))


@given(WEIGHTS, st.integers(1, 20), st.integers(1, 20), STARTS, st.booleans(), st.data())
@settings(deadline=None, max_examples=300)
def test_the_fast_costs_equal_the_formulas(
    weight: tuple[int, ...], filters: int, inputs: int, starts: Any, transposed: bool, data: st.DataObject
) -> None:
    groups = data.draw(st.sampled_from([g for g in (1, 2, 3) if transposed or weight[0] % g == 0]))
    epitome = (min(filters, weight[0]), min(inputs, weight[1]), *weight[2:])
    if starts == "partial":  # one axis of a plain layer
        groups, transposed = 1, False
        epitome = (epitome[0], *weight[1:]) if data.draw(st.booleans()) else (weight[0], *epitome[1:])
    layer = candidate(weight, groups, transposed)
    spec = make_spec(weight, epitome, starts)
    assert epitome_params(weight, epitome, starts) == parameters(spec).total
    assert fewest_madds(layer, epitome, starts) == executed_madds(layer, spec)
    on_positions = interpolated_by(spec, evenly_spread(spec, whole=True))
    whole = fewest_madds(layer, epitome, starts, whole_starts=True)
    assert whole == executed_madds(layer, spec, on_positions) <= executed_madds(layer, spec)


def test_fixed_starts_leave_a_budget_of_multiply_adds_more_room() -> None:
    model, x = nn.Sequential(nn.Conv2d(16, 64, 3), nn.Conv2d(64, 64, 3)), torch.zeros(1, 16, 12, 12)
    plans = {index: plan(model, x, madds=1_000_000, index=index) for index in ("fixed", "direct")}
    assert plans["fixed"].params > plans["direct"].params
    assert plans["fixed"].madds == plans["fixed"].madds_fresh <= 1_000_000
    convert_(model, plans["fixed"])
    assert count(model, x).madds == plans["fixed"].madds
    edited = {name: replace(layer, index="direct") for name, layer in plans["fixed"].layers.items()}
    assert replace(plans["fixed"], layers=edited).madds is None  # it was counted for whole starts


@given(WEIGHTS, st.sampled_from(["params", "madds"]), FORMS, AXES, st.sampled_from([1, 4, 8]))
@settings(deadline=None, max_examples=200)
def test_a_ladder_rises_to_the_dense_layer(
    weight: tuple[int, ...], kind: Any, form: Any, axes: Any, align: int
) -> None:
    if form == "partial" and axes == "both":
        with pytest.raises(InputError, match="one channel axis"):
            ladder(candidate(weight), kind, form, axes, align)
        return
    rungs = ladder(candidate(weight), kind, form, axes, align)
    assert all(a.cost < b.cost and a.share < b.share for a, b in pairwise(rungs))
    assert rungs[-1].epitome is None
    assert rungs[-1].cost == prod(weight) * (1 if kind == "params" else 24)
    for rung in rungs[:-1]:
        assert rung.epitome is not None
        assert all(e == w or (e < w and e % align == 0) for e, w in zip(rung.epitome[:2], weight[:2], strict=True))
        assert rung.epitome[2:] == weight[2:]


@given(WEIGHTS, st.sampled_from(["params", "madds"]), st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=200)
def test_no_separable_epitome_within_the_budget_has_more_rank_than_partial_products(
    weight: tuple[int, ...], kind: Any, align: int
) -> None:
    """Of few positions all filters are nearly alike; there the ladder goes on with separable starts on both axes."""
    rungs, others = (ladder(candidate(weight), kind, form, "auto", align) for form in ("partial", "separable"))
    ranks = {rung: rank_bounds(spec)[1] for rung in (*rungs, *others) if (spec := rung.spec(weight)) is not None}
    for rung, after in pairwise(rungs):
        best = max((ranks[other] for other in others[:-1] if other.cost < after.cost), default=0)
        assert rung.starts == "separable" or ranks[rung] >= best


@given(WEIGHTS, st.data())
@settings(deadline=None, max_examples=200)
def test_the_fast_rank_is_the_bound(weight: tuple[int, ...], data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["partial", "separable"]))
    axes = data.draw(st.sampled_from(["auto", "out", "in"]))
    for rung in ladder(candidate(weight), "params", form, axes, 1)[:-1]:  # type: ignore[arg-type]
        spec = rung.spec(weight)
        assert spec is not None
        assert rank_of(weight, rung) == rank_bounds(spec)[1]


@pytest.mark.parametrize(
    ("weight", "wanted"),
    [
        ((24, 24, 1), 0),
        ((24, 4, 1), 0),
        ((4, 24, 1), 1),
        ((24, 24, 3), 1),
        ((24, 12, 3), 1),
        ((24, 3, 3), 0),  # the steps of three inputs are coarse
        ((3, 24, 3), 1),
        ((24, 13, 1), 1),  # 13 inputs have no even parts
        ((13, 24, 1), 0),
    ],
)
def test_which_axis_partial_products_shorten(weight: tuple[int, ...], wanted: int) -> None:
    rungs = [rung for rung in ladder(candidate(weight), "params", "partial", "auto", 1) if rung.starts == "partial"]
    shapes = [rung.epitome for rung in rungs]
    assert shapes
    assert all(shape is not None and shape[wanted] < weight[wanted] for shape in shapes)


@given(WEIGHTS)
@settings(deadline=None)
def test_layers_without_partial_products_have_the_separable_ladder(weight: tuple[int, ...]) -> None:
    for layer in (candidate((2 * weight[0], *weight[1:]), groups=2), candidate(weight, transposed=True)):
        rungs = {form: ladder(layer, "params", form, "auto", 1) for form in ("partial", "separable")}  # type: ignore[arg-type]
        assert rungs["partial"] == rungs["separable"]


def test_partial_products_at_a_small_budget_keep_more_rank_than_one_axis_can() -> None:
    weight = (16, 16, 1)
    chosen = {
        axes: [r for r in ladder(candidate(weight), "params", "partial", axes, 1) if r.cost <= 24][-1]
        for axes in ("auto", "out")
    }
    assert {axes: rung.epitome for axes, rung in chosen.items()} == {"auto": (4, 4, 1), "out": (1, 16, 1)}
    assert {axes: rank_of(weight, rung) for axes, rung in chosen.items()} == {"auto": 4, "out": 1}


def test_channels_without_even_parts_get_separable_starts() -> None:
    """Of 127 and 13 no number of parts from 2 to 8 is a divisor."""
    rungs = {form: ladder(candidate((127, 13, 1)), "params", form, "auto", 1) for form in ("partial", "separable")}  # type: ignore[arg-type]
    assert rungs["partial"] == rungs["separable"]


@given(WEIGHTS)
@settings(deadline=None)
def test_auto_starts_are_separable_where_no_rank_is_lost_or_grid_would_be_the_same(
    weight: tuple[int, ...],
) -> None:
    for rung in ladder(candidate(weight), "params", "auto", "auto", 1)[:-1]:
        spec = rung.spec(weight)
        assert spec is not None
        separable = make_spec(weight, spec.epitome_shape, "separable")
        dense, bound = rank_bounds(separable)
        same = spec.num_out_blocks == 1 or spec.epitome_shape[1] == 1
        assert (rung.starts == "separable") == (bound == dense or same)


@pytest.mark.parametrize(
    ("weight", "axes", "wanted"),
    [
        ((6, 2, 3), "auto", [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 2)]),
        ((2, 6, 1), "auto", [(1, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 6)]),
        ((3, 3, 3), "auto", [(1, 1), (2, 2), (3, 3)]),
        ((3, 2, 1), "out", [(1, 2), (2, 2), (3, 2)]),
        ((3, 2, 1), "in", [(3, 1), (3, 2)]),
        ((6, 3, 1), "both", [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)]),
    ],
)
def test_which_axis_shrinks_first(weight: tuple[int, ...], axes: Any, wanted: list[tuple[int, int]]) -> None:
    assert list(epitome_shapes(weight, axes, 1)) == [(*pair, weight[2]) for pair in wanted]


def test_an_aligned_ladder_has_multiples_or_whole_axes() -> None:
    assert list(epitome_shapes((20, 10), "auto", 8)) == [(8, 8), (16, 10), (20, 10)]


def test_a_subclass_has_no_ladder_of_madds() -> None:
    layer = candidate((16, 16, 3), own=True)
    assert len(ladder(layer, "madds", "auto", "auto", 1)) == 1
    assert len(ladder(layer, "params", "auto", "auto", 1)) > 1


# ---- allocation ----

LADDERS = st.lists(
    st.lists(st.integers(1, 60), min_size=1, max_size=7, unique=True).map(sorted), min_size=1, max_size=5
)


def total(costs: list[list[int]], levels: list[int]) -> int:
    return sum(ladder[level] for ladder, level in zip(costs, levels, strict=True))


@given(LADDERS, st.randoms(use_true_random=False), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=400)
def test_allocation_keeps_the_bound_leaves_no_step_and_is_monotone(
    costs: list[list[int]], random: Any, one: float, other: float
) -> None:
    keys = [sorted(random.random() for _ in ladder) for ladder in costs]
    least, most = (sum(ladder[end] for ladder in costs) for end in (0, -1))
    totals = []
    for share in sorted((one, other)):
        budget = least + int(share * (most - least))
        levels = allocate(costs, keys, budget)
        spent = total(costs, levels)
        assert spent <= budget
        steps = [c[k + 1] - c[k] for c, k in zip(costs, levels, strict=True) if k + 1 < len(c)]
        assert all(spent + step > budget for step in steps)
        # What was decided for a budget holds for any other between the total and it.
        assert allocate(costs, keys, spent) == levels
        totals.append(spent)
    assert totals[0] <= totals[1]


def test_an_allocation_that_looks_at_the_budget_is_not_monotone() -> None:
    """Negative control: every layer first takes its part of the budget, then the remainder is spent in order."""
    costs = [[0, 8], [0, 5, 7]]
    assert [by_parts(costs, budget) for budget in (10, 11)] == [8, 7]
    keys = [[0.0, 0.2], [0.0, 0.1, 0.3]]
    assert [total(costs, allocate(costs, keys, budget)) for budget in (10, 11)] == [7, 7]


def by_parts(costs: list[list[int]], budget: int) -> int:
    whole = sum(rungs[-1] for rungs in costs)
    levels = [sum(cost * whole <= budget * rungs[-1] for cost in rungs) - 1 for rungs in costs]
    for k, rungs in enumerate(costs):
        for before, after in pairwise(rungs[levels[k] :]):
            if total(costs, levels) + after - before > budget:
                break
            levels[k] += 1
    return total(costs, levels)


def test_the_remainder_is_spread_not_given_to_one_layer() -> None:
    costs = [[0, 100, 200], [0, 1, 2, 3, 4, 5, 6], [0, 2, 4, 6, 8, 10, 12]]
    keys = [[0, 0.1, 0.2], [0, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7], [0, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7]]
    assert allocate(costs, keys, 110) == [1, 4, 3]
