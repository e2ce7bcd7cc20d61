"""What the check of an exported file compares: every output, whole numbers exactly, and other image sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch.deploy import ParityError
from epitorch.deploy._parity import check_parity
from epitorch.errors import InputError
from epitorch.export._parity import compare
from epitorch.export._prepare import deployed, other_size

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


class Remembers(nn.Module):
    """Its exported graph has the width of the example in it; torch computes with the width that is there."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (9.0 if torch.compiler.is_exporting() else float(x.shape[-1]))


@pytest.mark.parametrize("target", ["onnx", "pt2"])
def test_another_image_size_is_compared(target: Any, tmp_path: Path) -> None:
    x, out = torch.randn(2, 3, 9, 9), tmp_path / f"net.{target}"
    assert epitorch.export(Remembers(), x, target, out, dynamic="batch").difference < 1e-6  # right on this size
    out.unlink()
    with pytest.raises(ParityError, match=r"input of shape \(2, 3, 11, 12\)"):
        epitorch.export(Remembers(), x, target, out, dynamic="all")
    assert not list(tmp_path.iterdir())


def test_sizes_that_torch_refuses_are_passed_over(tmp_path: Path) -> None:
    x, out = torch.randn(2, 3, 8, 8), tmp_path / "net.pt2"
    report = epitorch.export(nn.PixelUnshuffle(4), x, "pt2", tmp_path / "a.pt2", dynamic="none")
    assert report.checked == ((2, 3, 8, 8),)
    net = deployed(nn.PixelUnshuffle(4), (x,), "dense")
    assert [tuple(one.shape) for (one,) in other_size(net, (x,), [(x,)])] == [(2, 3, 16, 16)]
    assert other_size(net, (x,), [(torch.randn(1, 3, 4, 12),)]) == []
    assert len(other_size(net, (x,), [(torch.randn(1, 3, 8, 12),)])) == 1  # one axis is as in the example
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    with pytest.raises(InputError, match="runs in no other image size"):
        epitorch.export(fixed, x, "pt2", out, dynamic="all")
    assert not out.exists()
