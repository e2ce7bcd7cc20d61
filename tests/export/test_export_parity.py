"""What the check of an exported file compares: every output, whole numbers exactly, and other image sizes."""

from __future__ import annotations

import pytest
import torch

from epitorch.deploy import ParityError
from epitorch.deploy._parity import check_parity
from epitorch.export._parity import compare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WHOLE = {
    "int64": (torch.tensor([1000, 2000]), torch.tensor([1000, 2001])),
    "above the precision of floats": (torch.tensor([2**62 + 1]), torch.tensor([2**62])),
    "int32": (torch.tensor([500, 1], dtype=torch.int32), torch.tensor([500, 2], dtype=torch.int32)),
    "bool": (torch.tensor([True] * 99 + [False]), torch.tensor([True] * 100)),
    "another type": (torch.tensor([1, 2]), torch.tensor([1.0, 2.4])),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_compared_exactly(name: str) -> None:
    expected, got = WHOLE[name]
    score = torch.tensor([0.5])
    assert compare([score, expected], [score, expected.clone()], (1,), half=True) == 0
    assert check_parity((score, expected), (score, expected.clone())) == 0
    with pytest.raises(ParityError, match="output 1 of the exported file"):
        compare([score, expected], [score, got], (1,), half=True)
    with pytest.raises(ParityError, match="output 1 of the deployed model"):
        check_parity((score, expected), (score, got), slack=100)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_have_the_tolerance_of_their_parts(dtype: torch.dtype) -> None:
    value = torch.ones(3, dtype=dtype)
    with pytest.raises(ParityError):
        compare([value], [value * 1.001], (1,), half=False)
    assert compare([value], [value * (1 + 1e-12)], (1,), half=False) < 1e-10
