"""The integral map and sums along diagonals against literal loops; their precision."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from epitorch.deploy.integral import Reach, diagonal_taps, integral_map, integral_taps, responses, tap_index

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


@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.3, 0.0), (0.3, 0.6)])
@pytest.mark.parametrize("reach", [*REACHES_1D, *REACHES_2D])
def test_responses_are_the_sums_along_the_diagonals(reach: Reach, shares: tuple[float, float]) -> None:
    dims = len(reach.kernel)
    window, values = (5, 4)[:dims], products(reach, (5, 4)[:dims])
    starts = [at for at in product(*map(range, window)) for _ in range(2)]  # both rows at every start
    expected = torch.stack([loops(values, at, shares[:dims], reach)[n % 2] for n, at in enumerate(starts)])
    sums = integral_map(library(values), reach)
    for integral, source in ((False, library(values)), (True, sums)):
        got = read(source, starts, shares[:dims], reach, integral)
        torch.testing.assert_close(got, expected)
        other = read(source, [*starts[2:], *starts[:2]], shares[:dims], reach, integral)  # negative control
        assert not torch.allclose(other, expected)


def read(source: Tensor, starts: list[Any], shares: tuple[float, ...], reach: Reach, integral: bool) -> Tensor:
    """Responses of two rows in turn; all starts have the same shares."""
    taps = integral_taps(reach) if integral else diagonal_taps(reach)
    lower, rows = torch.tensor(starts), torch.arange(len(starts)) % 2
    mixed = [n for n, share in enumerate(shares) if share]
    corners = product(*((0, 1) if share else (0,) for share in shares))
    sizes = tuple(source.shape[2 : 2 + len(shares)])
    window = torch.tensor((5, 4)[: len(shares)])
    index = [tap_index(rows, (lower + torch.tensor(up)).remainder(window), taps, sizes) for up in corners]
    weights = torch.tensor([shares[n] for n in mixed], dtype=torch.float64).view(-1, 1).expand(-1, len(starts))
    flat = source.flatten(1, 1 + len(shares))
    return responses(flat, torch.stack(index), weights, taps, reach)[0]


def loops(values: Any, start: tuple[int, ...], shares: tuple[float, ...], reach: Reach) -> Tensor:
    """Every output position and every corner of the start, one by one."""
    window, found = values.shape[1 : 1 + len(start)], np.zeros((values.shape[0], *reach.sizes))
    for place in product(*map(range, reach.sizes)):
        t = tuple(n * s for n, s in zip(place, reach.stride, strict=True))
        for up in product((0, 1), repeat=len(start)):
            at = tuple((p + n) % size for p, n, size in zip(start, up, window, strict=True))
            share = prod(f if n else 1 - f for n, f in zip(up, shares, strict=True))
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
    """A window of 1024 positions in float32: the difference of two sums of a thousand products."""
    reach = Reach((5,), (1,), (1,), (1024,))
    generator = torch.Generator().manual_seed(0)
    values = 100 + torch.randn(1, 1, 1024, reach.span[0], generator=generator)
    exact = one(values.double(), diagonal_taps(reach), 1024, reach)
    sums, size = integral_map(values, reach), 1029
    assert sums.dtype == torch.float64
    assert relative(one(sums, integral_taps(reach), size, reach), exact) < 1e-6
    assert relative(one(sums.float(), integral_taps(reach), size, reach), exact) > 1e-6  # negative control


def one(source: Tensor, taps: Any, size: int, reach: Reach) -> Tensor:
    """The response that starts at 1020."""
    index = tap_index(torch.tensor([0]), torch.tensor([[1020]]), taps, (size,)).unsqueeze(0)
    return responses(source.flatten(1, 2), index, torch.empty(0, 1), taps, reach)


def relative(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).abs().max() / exact.abs().max())


def test_narrow_products_are_summed_in_float32() -> None:
    reach = Reach((16,), (1,), (1,), (64,))
    values = torch.rand(1, 1, 16, reach.span[0], generator=torch.Generator().manual_seed(0)).bfloat16()
    index = tap_index(torch.tensor([0]), torch.tensor([[3]]), diagonal_taps(reach), (16,)).unsqueeze(0)
    flat, none = values.flatten(1, 2), torch.empty(0, 1)
    got = responses(flat, index, none, diagonal_taps(reach), reach)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, responses(flat.float(), index, none, diagonal_taps(reach), reach))
