"""What counts as the same output: values that are not finite have to be the same ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epitorch.deploy._parity import ParityError, check_parity, relative_difference

INF, NAN = float("inf"), float("nan")
ODD = torch.tensor([1.0, INF, -INF, NAN])


def test_the_same_values_agree_finite_or_not() -> None:
    assert relative_difference(ODD, ODD.clone()) == 0
    assert relative_difference(ODD, ODD * 1.001) == pytest.approx(1e-3, rel=1e-3)
    assert relative_difference(ODD.half(), ODD.double()) == 0


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("other", [INF, -INF, NAN, 0.0])
def test_values_that_are_not_finite_differ_from_others(at: int, other: float) -> None:
    got = ODD.clone()
    got[at] = other
    same = str(float(ODD[at])) == str(other)
    assert relative_difference(ODD, got) == (0 if same else INF)
    if not same:
        with pytest.raises(ParityError, match="does not compute"):
            check_parity(ODD, got)


def test_complex_numbers_by_their_parts() -> None:
    one = torch.complex(torch.tensor([1.0, INF]), torch.tensor([2.0, 1.0]))
    assert relative_difference(one, one.clone()) == 0
    assert relative_difference(one, one * 1.0) == INF  # multiplied, its second imaginary part is NaN
    assert relative_difference(one[:1], one[:1] + 0.002j) == pytest.approx(1e-3, rel=1e-3)
    assert relative_difference(one[:1], one[:1].conj()) == 2


@pytest.mark.parametrize("got", [torch.zeros(0), torch.ones(0)])
def test_nothing_is_equal_to_nothing(got: Tensor) -> None:
    assert relative_difference(torch.zeros(0), got) == 0
