from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_fit
from epitorch.functional import sample_weight
from epitorch.init import evenly_spread
from epitorch.warmstart import fit_epitome
from epitorch.warmstart._problem import Target
from epitorch.warmstart._search import Rules, improve_starts
from fit_cases import SEARCHED, SENSITIVE, SPECS, as_numpy, create, layout_of, random_starts

# ---- the search ----


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("fractional", [True, False], ids=["fractional", "whole"])
@pytest.mark.parametrize("name", SEARCHED)
def test_search_is_never_worse_than_evenly_spread(name: str, fractional: bool, weighted: bool) -> None:
    spec = SPECS[name]
    weight = torch.randn(spec.weight_shape)
    scale = torch.rand(spec.weight_shape[1]) + 0.1 if weighted else None
    fit = fit_epitome(weight, spec, input_weight=scale, fractional=fractional)
    there = (layout_of(spec), as_numpy(fit.starts), None if scale is None else scale.double().numpy())
    told = reference_fit.relative_error(weight.double().numpy(), fit.epitome.double().numpy(), *there)
    assert fit.error == pytest.approx(told, abs=2e-5)  # it is the error of what was returned, in float32
    even = (layout_of(spec), as_numpy(evenly_spread(spec, whole=not fractional)), there[2])
    _, spread = reference_fit.best_epitome(weight.double().numpy(), *even)
    assert fit.error_spread == pytest.approx(spread, rel=1e-4, abs=1e-6)
    if fractional:
        assert fit.error <= fit.error_spread
    else:
        for axis, value in fit.starts.items():
            torch.testing.assert_close(torch.remainder(value, spec.group(axis)), torch.zeros_like(value))


@given(
    rows=st.integers(3, 12), columns=st.integers(2, 9), kernel=st.sampled_from([(), (3,)]),
    small=st.tuples(st.integers(1, 12), st.integers(1, 9)), blocks=st.tuples(st.integers(1, 12), st.integers(1, 9)),
    window=st.integers(1, 4), channels=st.sampled_from(["separable", "grid", "grid_out", "grid_in"]),
    owner=st.sampled_from(["in", "out", "grid"]), group=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_search_on_any_spec(
    rows: int,
    columns: int,
    kernel: tuple[int, ...],
    small: tuple[int, int],
    blocks: tuple[int, int],
    window: int,
    channels: str,
    owner: Any,
    group: int,
) -> None:
    sizes = [max(group, size // group * group) for size in small]
    spec = create(
        (rows, columns, *kernel), (*sizes, *[window] * len(kernel)),
        block_out=min(blocks[0], sizes[0]), block_in=min(blocks[1], sizes[1]),
        channel_starts=channels, spatial_starts=owner, group_length=group,
    )  # fmt: skip
    weight = torch.randn(spec.weight_shape, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    fit = fit_epitome(weight, spec, rounds=3)
    made = sample_weight(fit.epitome, fit.starts, spec)
    assert fit.error == pytest.approx(float((made - weight).norm() / weight.norm()), abs=1e-6)
    assert fit.error <= fit.error_spread <= 1 + 1e-9


def test_best_start_equals_a_fine_scan() -> None:
    """One block: the first turn of the search, given the epitome, is the exact minimum over all real starts."""
    spec = create((9, 4), (6, 4), block_out=3)
    weight, epitome = torch.randn(9, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    target = Target(weight, torch.ones(4, dtype=torch.float64), spec)
    found = improve_starts(target, epitome, {"out": torch.zeros(3, dtype=torch.float64)}, Rules())["out"]
    for r, start in enumerate(found):
        scanned, error = reference_fit.best_start_1d(weight[3 * r : 3 * r + 3].numpy(), epitome.numpy(), 200)
        assert abs(float(start) - scanned) <= 1 / 200
        made = sample_weight(epitome, {"out": found}, spec)[3 * r : 3 * r + 3]
        assert float((made - weight[3 * r : 3 * r + 3]).square().sum()) <= error + 1e-9


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", SENSITIVE)
def test_no_single_start_can_be_improved(name: str, weighted: bool) -> None:
    """After choosing starts for a fixed epitome, a scan over the last axis searched finds nothing better."""
    spec = SPECS[name]
    weight = torch.randn(spec.weight_shape, dtype=torch.float64)
    importance = torch.rand(spec.weight_shape[1], dtype=torch.float64) if weighted else weight.new_ones(weight.shape[1])
    epitome = torch.randn(spec.epitome_shape, dtype=torch.float64)
    target = Target(weight, importance, spec)
    begin = random_starts(spec)
    found = improve_starts(target, epitome, begin, Rules())
    loss = target.loss(epitome, found)
    assert loss < target.loss(epitome, begin)
    axis = list(found)[-1]
    last = found[axis].view(-1)
    columns = len(spec.start_sizes[axis])
    for i in range(columns - 1, last.numel(), columns):  # of several spatial axes the last one
        for step in range(20 * spec.start_sizes[axis][-1]):
            tried = {a: value.clone() for a, value in found.items()}
            tried[axis].view(-1)[i] = step / 20
            assert target.loss(epitome, tried) >= loss - 1e-9


def test_joint_search_over_both_channel_axes_is_exhaustive() -> None:
    spec = create((7, 6, 3), (4, 3, 3), channel_starts="grid")
    weight = torch.randn(spec.weight_shape, dtype=torch.float64)
    epitome = torch.randn(spec.epitome_shape, dtype=torch.float64)
    target = Target(weight, torch.rand(6, dtype=torch.float64), spec)
    found = improve_starts(target, epitome, random_starts(spec, whole=True), Rules(fractional=False))
    loss = target.loss(epitome, found)
    for r, s, out, into in np.ndindex(2, 2, 4, 3):
        tried = {axis: value.clone() for axis, value in found.items()}
        tried["out"][r, s], tried["in"][r, s] = out, into
        assert target.loss(epitome, tried) >= loss - 1e-9


@pytest.mark.parametrize("name", ["filters", "blocks", "grid", "grid_rows"])
def test_most_generated_weights_are_recovered_by_the_search(name: str) -> None:
    """Whole starts; the search is no proof, so most of them and far below evenly spread for all."""
    spec = SPECS[name]
    fits = []
    for _ in range(12):
        weight = sample_weight(torch.randn(spec.epitome_shape), random_starts(spec, whole=True), spec)
        fits.append(fit_epitome(weight, spec))
    assert sum(fit.error for fit in fits) < 0.5 * sum(fit.error_spread for fit in fits)
    assert sum(fit.error < 1e-3 for fit in fits) >= 3


def test_within_reach_keeps_to_what_a_learner_can_return() -> None:
    spec = create((24, 4), (8, 4), block_out=4, group_length=4)
    starts = {"out": torch.tensor([0.0, 4.0, 6.0, 4.0, 7.0, 0.0])}
    weight = sample_weight(torch.randn(8, 4), starts, spec)
    assert fit_epitome(weight, spec, within_reach=True).starts["out"].max() <= 4
    assert fit_epitome(weight, spec, starts=starts).error < 1e-6


def test_results_are_repeatable() -> None:
    spec, weight = SPECS["grid"], torch.randn(7, 6)
    one, two = fit_epitome(weight, spec), fit_epitome(weight, spec)
    torch.testing.assert_close(one.epitome, two.epitome, rtol=0, atol=0)
    torch.testing.assert_close(one.starts, two.starts, rtol=0, atol=0)


def test_blocks_of_one_on_both_axes_fit_into_memory() -> None:
    """Lite0's classifier took 24 GB: a curve for every pair of blocks, where their sum is enough."""
    code = """
import resource, torch
from epitorch.spec import EpitomeSpec
from epitorch.warmstart import fit_epitome
spec = EpitomeSpec.create((500, 600), (350, 400), block_out=1, block_in=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fit_epitome(torch.randn(500, 600), spec, rounds=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 700_000  # KiB; three such volumes of 500 x 600 x 350 float64 are 2.5 GB
