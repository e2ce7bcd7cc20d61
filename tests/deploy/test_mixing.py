"""Product map and channel wrapping as functions on channels, against literal loops."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from epitorch.deploy import _mixing_graph
from epitorch.deploy._mixing import Runs, channel_runs, expand_channels, wrap_channels
from epitorch.deploy._mixing_graph import expand_in_graph, wrap_in_graph

EXACT = {"rtol": 1e-13, "atol": 1e-13}


def test_worked_wrapping_example() -> None:
    """Method section 5.2, to the digit: three epitome channels, starts 0.6 and 0.3."""
    runs = channel_runs(torch.tensor([0.6, 0.3], dtype=torch.float64), 6, 3, 3)
    got = wrap_channels(torch.eye(6, dtype=torch.float64), runs, 3, 0)
    expected = torch.tensor(
        [
            [0.4, 0.0, 0.6, 0.7, 0.0, 0.3],  # E1: 0.4 F1 + 0.6 F3 + 0.7 F4 + 0.3 F6
            [0.6, 0.4, 0.0, 0.3, 0.7, 0.0],  # E2: 0.6 F1 + 0.4 F2 + 0.3 F4 + 0.7 F5
            [0.0, 0.6, 0.4, 0.0, 0.3, 0.7],  # E3: 0.6 F2 + 0.4 F3 + 0.3 F5 + 0.7 F6
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(got, expected, **EXACT)
    figure = wrap_channels(torch.eye(6, dtype=torch.float64), channel_runs(torch.tensor([0.4, 0.7]), 6, 3, 3), 3, 0)
    assert (figure - expected).abs().max() > 0.1  # the paper's figure has the fractions of these starts


def test_worked_example_backwards_is_the_product_map() -> None:
    runs = channel_runs(torch.tensor([0.6, 0.3], dtype=torch.float64), 6, 3, 3)
    identity = torch.eye(6, dtype=torch.float64)
    expand = expand_channels(torch.eye(3, dtype=torch.float64), runs, 0)
    torch.testing.assert_close(expand, wrap_channels(identity, runs, 3, 0).t(), **EXACT)


def axis_matrix(starts: Tensor | None, length: int, size: int, block: int, group: int) -> np.ndarray:
    """A of method section 2 in loops: share of epitome channel m in channel n."""
    matrix = np.zeros((length, size))
    for n in range(length):
        taps = [(n % size, 1.0)]
        if starts is not None:
            taps = reference.taps(float(starts[n // block]), n % block, size, group)
        for index, fraction in taps:
            matrix[n, index] += fraction
    return matrix


@st.composite
def axes(draw: st.DrawFn) -> tuple[Tensor | None, int, int, int, int]:
    group = draw(st.sampled_from([1, 1, 2, 3]))
    size = group * draw(st.integers(1, 5))
    block = draw(st.integers(1, size))
    length = draw(st.integers(1, 14))
    count = -(-length // block)
    values = st.sampled_from([0.0, 1.0, 2.25, 4.5, 13.75, -0.5, -3.0]) | st.floats(0, size, width=32)
    starts = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.float64)
    return (None if size == 1 else starts), length, size, block, group


@settings(deadline=None, derandomize=True, max_examples=150)
@given(axes())
def test_runs_are_the_sparse_matrix(axis: tuple[Tensor | None, int, int, int, int]) -> None:
    starts, length, size, block, group = axis
    runs = channel_runs(starts, length, size, block, group_length=group)
    matrix = torch.from_numpy(axis_matrix(starts, length, size, block, group))
    expanded = expand_channels(torch.eye(size, dtype=torch.float64), runs, 0)
    torch.testing.assert_close(expanded, matrix, **EXACT)
    if size <= length:
        wrapped = wrap_channels(torch.eye(length, dtype=torch.float64), runs, size, 0)
        torch.testing.assert_close(wrapped, matrix.t(), **EXACT)


@pytest.mark.parametrize("most", [256, 0], ids=["pieces", "gathers"])
@settings(deadline=None, derandomize=True, max_examples=100)
@given(axes())
def test_graphs_to_export_are_the_sparse_matrix(most: int, axis: tuple[Tensor | None, int, int, int, int]) -> None:
    starts, length, size, block, group = axis
    runs = channel_runs(starts, length, size, block, group_length=group)
    matrix = torch.from_numpy(axis_matrix(starts, length, size, block, group))
    with patch.multiple(_mixing_graph, MOST_PIECES=most, MOST_RUNS=most):
        expanded = expand_in_graph(torch.eye(size, dtype=torch.float64), runs, 0)
        torch.testing.assert_close(expanded, matrix, **EXACT)
        if size <= length:
            wrapped = wrap_in_graph(torch.eye(length, dtype=torch.float64), runs, size, 0)
            torch.testing.assert_close(wrapped, matrix.t(), **EXACT)


@pytest.mark.parametrize("most", [256, 0], ids=["pieces", "gathers"])
def test_graphs_of_groups(most: int) -> None:
    straddling = channel_runs(torch.tensor([0.0, 1.5, 2.0]), 8, 3, 3, shared_by=2)
    repeated = channel_runs(torch.tensor([0.5, 1.25]), 6, 3, 3, repeats=2)
    product_map, x = torch.randn(2, 6, 4), torch.randn(2, 12, 4)
    with patch.multiple(_mixing_graph, MOST_PIECES=most, MOST_RUNS=most):
        expected = expand_channels(product_map, straddling, -2)
        torch.testing.assert_close(expand_in_graph(product_map, straddling, -2), expected)
        torch.testing.assert_close(wrap_in_graph(x, repeated, 6, -2), wrap_channels(x, repeated, 6, -2))


def covered(runs: Runs) -> list[int]:
    return [channel for run in runs for channel in range(run.channel, run.channel + run.length)]


def test_groups_that_repeat_an_axis() -> None:
    starts = torch.tensor([0.5, 1.25])
    once, twice = channel_runs(starts, 6, 3, 3), channel_runs(starts, 6, 3, 3, repeats=2)
    assert covered(twice) == list(range(12))
    x = torch.randn(12, 2)
    apart = torch.cat([wrap_channels(part, once, 3, 0) for part in x.split(6)])
    torch.testing.assert_close(wrap_channels(x, twice, 6, 0), apart)


def test_blocks_that_straddle_groups() -> None:
    """Two groups of four filters, blocks of three: the second block feeds both groups."""
    runs = channel_runs(torch.tensor([0.0, 1.0, 2.0]), 8, 3, 3, shared_by=2)
    product_map = torch.arange(6.0)  # three channels of each group
    assert expand_channels(product_map, runs, 0).tolist() == [0, 1, 2, 1, 5, 3, 5, 3]


def test_whole_starts_are_copied_to_the_bit() -> None:
    runs = channel_runs(torch.tensor([2.0, 1.0, 3.0]), 10, 4, 4)
    assert {run.fraction for run in runs} == {0.0}
    x = torch.randn(4)
    index = [(start + a) % 4 for start in (2, 1, 3) for a in range(4)][:10]
    assert torch.equal(expand_channels(x, runs, 0), x[index])


@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_channel_axis_anywhere_and_strided(dim: int) -> None:
    runs = channel_runs(torch.tensor([0.5, 3.75]), 7, 4, 4)
    x = torch.randn(2, 7, 7, 7).to(memory_format=torch.channels_last)
    moved = wrap_channels(x.transpose(0, dim).contiguous(), runs, 4, 0).transpose(0, dim)
    torch.testing.assert_close(wrap_channels(x, runs, 4, dim), moved)


def test_wrapping_keeps_channels_last() -> None:
    runs = channel_runs(torch.tensor([0.5, 3.75]), 7, 4, 4)
    wrapped = wrap_channels(torch.randn(2, 7, 5, 5).to(memory_format=torch.channels_last), runs, 4, -3)
    assert wrapped.is_contiguous(memory_format=torch.channels_last)


def test_a_moved_start_changes_the_result() -> None:
    x = torch.randn(6)
    runs = [channel_runs(torch.tensor([start, 0.3]), 6, 3, 3) for start in (0.6, 0.61)]
    assert not torch.allclose(wrap_channels(x, runs[0], 3, 0), wrap_channels(x, runs[1], 3, 0))
    assert not torch.allclose(expand_channels(x[:3], runs[0], 0), expand_channels(x[:3], runs[1], 0))
    assert not torch.allclose(wrap_in_graph(x, runs[0], 3, 0), wrap_in_graph(x, runs[1], 3, 0))
    assert not torch.allclose(expand_in_graph(x[:3], runs[0], 0), expand_in_graph(x[:3], runs[1], 0))
