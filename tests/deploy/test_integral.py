"""The integral map and sums along diagonals against literal loops; their precision."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from epitorch.deploy.integral import Beginning, Reach, integral_map, integral_response, response

REACHES_1D = [
    Reach((3,), (1,), (1,), (6,)),
    Reach((4,), (2,), (1,), (5,)),
    Reach((2,), (1,), (2,), (4,)),
    Reach((5,), (3,), (3,), (2,)),
]
REACHES_2D = [
    Reach((3, 3), (1, 1), (1, 1), (3, 4)),
    Reach((2, 3), (2, 2), (1, 2), (3, 2)),
    Reach((4, 2), (1, 1), (2, 1), (2, 3)),
]


def products(reach: Reach, window: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """P of one random sample and two filters, in loops."""
    random = np.random.default_rng(seed)
    x, rows = random.standard_normal((3, *reach.span)), random.standard_normal((2, 3, *window))
    return reference.product_positions(x, rows)


def library(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).unsqueeze(0)


@pytest.mark.parametrize("window", [1, 2, 5, 9])
@pytest.mark.parametrize("reach", REACHES_1D)
def test_the_map_in_1d_is_the_recurrence(reach: Reach, window: int) -> None:
    values = products(reach, (window,))
    expected = reference.integral_map_1d(values, reach.kernel[0], reach.dilation[0])
    got = integral_map(library(values), reach)[0]
    torch.testing.assert_close(got[:, 1:, reach.dilation[0] :], torch.from_numpy(expected))
    assert not got[:, 0].any()  # the zeros in front
    assert not got[:, :, : reach.dilation[0]].any()
    other = reference.integral_map_1d(values, reach.kernel[0], reach.dilation[0] + 1)  # negative control
    assert not torch.allclose(got[:, 1:, reach.dilation[0] :], torch.from_numpy(other))


@pytest.mark.parametrize("window", [(1, 1), (3, 2), (5, 4)])
@pytest.mark.parametrize("reach", REACHES_2D)
def test_the_map_in_2d_is_the_four_term_recurrence(reach: Reach, window: tuple[int, int]) -> None:
    values, kernel, step = products(reach, window), (reach.kernel[0], reach.kernel[1]), reach.dilation[0]
    got = integral_map(library(values), reach)[0][:, 1:, 1:, step:, step:]
    torch.testing.assert_close(got, torch.from_numpy(reference.integral_map_2d(values, kernel, step)))
    printed = torch.from_numpy(reference.printed_integral_map_2d(values, kernel, step))
    assert not torch.allclose(got, printed)


@pytest.mark.parametrize("fraction", [0.0, 0.3])
@pytest.mark.parametrize("reach", [*REACHES_1D, *REACHES_2D])
def test_responses_are_the_sums_along_the_diagonals(reach: Reach, fraction: float) -> None:
    dims = len(reach.kernel)
    window = (5, 4)[:dims]
    values = products(reach, window)
    for lower in product(*map(range, window)):
        upper = tuple((p + 1) % size for p, size in zip(lower, window, strict=True))
        start = Beginning(lower, upper, (fraction, 0.0 if dims == 2 and lower[0] == 1 else fraction)[:dims])
        expected = loops(values, start, reach)
        torch.testing.assert_close(response(library(values), start, reach)[0], expected)
        sums = integral_map(library(values), reach)
        torch.testing.assert_close(integral_response(sums, start, reach, torch.float64)[0], expected)
        other = Beginning(upper, lower, start.fraction)  # negative control
        assert not torch.allclose(response(library(values), other, reach)[0], expected)


def loops(values: np.ndarray, start: Beginning, reach: Reach) -> Tensor:
    """Every output position and every corner of the start, one by one."""
    found = np.zeros((values.shape[0], *reach.sizes))
    for place in product(*map(range, reach.sizes)):
        t = tuple(n * s for n, s in zip(place, reach.stride, strict=True))
        for upper in product((False, True), repeat=len(place)):
            axes = zip(upper, start.lower, start.upper, start.fraction, strict=True)
            chosen = [(b, f) if up else (a, 1 - f) for up, a, b, f in axes]
            at, share = tuple(p for p, _ in chosen), float(np.prod([f for _, f in chosen]))
            found[(slice(None), *place)] += share * reference.diagonal(values, at, t, reach.kernel, reach.dilation[0])
    return torch.from_numpy(found)


def test_the_printed_two_term_response_sums_only_one_diagonal_of_the_kernel() -> None:
    reach, window = REACHES_2D[0], (5, 4)
    values = products(reach, window)
    printed = reference.printed_integral_map_2d(values, (3, 3), 1)
    two_terms = printed[:, 4, 3, 3, 3] - printed[:, 1, 0, 0, 0]  # start (2, 1) at (1, 1), K = 3
    on_the_diagonal = sum(values[:, 2 + i, (1 + i) % 4, 1 + i, 1 + i] for i in range(3))
    np.testing.assert_allclose(two_terms, on_the_diagonal)
    full = reference.diagonal(values, (2, 1), (1, 1), (3, 3), 1)
    assert np.abs(two_terms - full).max() > 0.1


def test_long_diagonals_keep_their_digits() -> None:
    """A window of 1024 positions in float32: the difference of two sums of thousands of products."""
    reach = Reach((5,), (1,), (1,), (1024,))
    generator = torch.Generator().manual_seed(0)
    values = 100 + torch.randn(1, 1, 1024, reach.span[0], generator=generator)
    start = Beginning((1020,), (1021,), (0.0,))
    exact = response(values.double(), start, reach)
    error = (integral_response(integral_map(values, reach), start, reach, torch.float32) - exact).abs().max()
    assert error / exact.abs().max() < 1e-6
    sums = integral_map(values, reach).float()  # negative control: sums that are kept in float32
    assert (integral_response(sums, start, reach, torch.float32) - exact).abs().max() / exact.abs().max() > 1e-6
