"""Does the file compute, in its runtime, what the model computes in torch?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epitorch.deploy import ParityError
from epitorch.deploy._parity import is_exact, relative_difference, same_values
from epitorch.errors import explain

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.complex128: 1e-10, torch.complex64: 1e-4}
_TOLERANCE_16 = 2e-2  # half precision, stored or computed


def compare(expected: Sequence[Tensor], got: Sequence[Tensor], shape: tuple[int, ...], *, half: bool) -> float:
    """Compare the outputs for one input.

    Args:
        expected: Of torch.
        got: Of the runtime.
        shape: Of the input, for the message.
        half: The file holds its weights in 16 bits.

    Returns:
        The largest difference over the largest value of the tensor that it is in.

    Raises:
        ParityError: If the outputs differ, or show nothing.
    """
    shapes = [[tuple(tensor.shape) for tensor in outputs] for outputs in (expected, got)]
    if shapes[0] != shapes[1]:
        raise _error("the exported file returns other shapes than torch", f"{shapes[0]}", f"{shapes[1]}", shape)
    if not any(bool((tensor.isfinite() & (tensor != 0)).any()) for tensor in expected):
        wanted = "an input on which the model's output has finite values other than 0"
        raise _error("the outputs show nothing: empty, zero, or not finite", wanted, f"{shapes[0]}", shape)
    worst = 0.0
    for position, (one, other) in enumerate(zip(expected, got, strict=True)):
        if is_exact(one):
            _check_equal(one, other, position, shape)
            continue
        difference, tolerance = relative_difference(one, other), _tolerance(one, half)
        if not difference <= tolerance:
            wanted = f"a difference of at most {tolerance:.0e} of the largest output"
            raise _error("the exported file does not compute what torch computes", wanted, f"{difference:.1e}", shape)
        worst = max(worst, difference)
    return worst


def _check_equal(expected: Tensor, got: Tensor, position: int, shape: tuple[int, ...]) -> None:
    """Whole numbers and truth values are not rounded: every one of them counts."""
    if not same_values(expected, got):
        what = f"output {position} of the exported file ({expected.dtype}) is not what torch computes"
        raise _error(what, "equal values, for whole numbers and truth values exactly", "others", shape)


def _tolerance(tensor: Tensor, half: bool) -> float:
    return _TOLERANCE_16 if half else _TOLERANCE.get(tensor.dtype, _TOLERANCE_16)


def _error(what: str, expected: str, got: str, shape: tuple[int, ...]) -> ParityError:
    return ParityError(explain(what, expected=expected, got=got, where=f"input of shape {shape}"))
