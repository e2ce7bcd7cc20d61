"""Does the deployed model compute what the trained one computes?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epitorch.cost._trace import tensors
from epitorch.errors import EpitorchError, explain

_TOLERANCE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
AMPLIFIED = 100  # on the tolerance, where float64 shows that a difference in float32 is rounding, made larger
_TOLERANCE_TF32 = 1e-2  # torch lets cuDNN convolve float32 in TF32, which has 10 bits


class ParityError(EpitorchError):
    """The deployed model's output differs from the trained model's."""


def check_parity(trained: Any, deployed: Any, slack: float = 1.0) -> float:
    """Compare two outputs; tolerances stand far above rounding and far below a wrong layer.

    Args:
        trained: Output of the trained model: a tensor or nested containers.
        deployed: Output of the deployed model.
        slack: Factor on the tolerance.

    Returns:
        The largest difference over the largest value of the tensor that it is in.

    Raises:
        ParityError: If the outputs differ, or hold nothing that could be compared.
    """
    pairs = list(zip(tensors(trained), tensors(deployed), strict=False))
    shapes = [[tuple(t.shape) for t in tensors(output)] for output in (trained, deployed)]
    if shapes[0] != shapes[1] or not pairs:
        raise ParityError(
            explain("the outputs cannot be compared", expected=f"tensors of shapes {shapes[0]}", got=shapes[1])
        )
    if not any(bool((t.detach().isfinite() & (t.detach() != 0)).any()) for t in tensors(trained)):
        raise ParityError(
            explain(
                "the outputs show nothing: empty, zero, or not finite",
                expected="an example input on which the model's output has finite values other than 0",
                got=f"outputs of shapes {shapes[0]}",
                fix="give an example with at least one real sample",
            )
        )
    _check_whole_numbers(pairs)
    rounded = [pair for pair in pairs if not is_exact(pair[0])]
    differences = [(relative_difference(*pair), slack * _tolerance(pair[0])) for pair in rounded]
    for difference, tolerance in differences:
        if not difference <= tolerance:
            raise ParityError(
                explain(
                    "the deployed model does not compute what the trained one computes",
                    expected=f"a difference of at most {tolerance:.0e} of the largest output",
                    got=f"{difference:.1e}",
                    fix="deploy with strategy='dense'; if that differs too, the model's output does not"
                    " depend on its input alone",
                )
            )
    return max((difference for difference, _ in differences), default=0.0)


def _check_whole_numbers(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Whole numbers and truth values must be equal; that an argmax may turn over where two values tie is no excuse."""
    for position, (expected, got) in enumerate(pairs):
        if is_exact(expected) and not same_values(expected, got):
            raise ParityError(
                explain(
                    f"output {position} of the deployed model ({expected.dtype}) is not what the trained one computes",
                    expected="equal values, for whole numbers and truth values exactly",
                    got=f"others, in an output of shape {tuple(expected.shape)}",
                    fix="if it is an argmax or a comparison of values that tie, give an example on which they do not",
                )
            )


def is_exact(tensor: Tensor) -> bool:
    """Whether the tensor holds whole numbers or truth values, which are never rounded."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def same_values(expected: Tensor, got: Tensor) -> bool:
    """Equality of whole numbers, in any width; not by way of floats, which have no room for large ones."""
    a, b = expected.detach().cpu(), got.detach().cpu()
    return is_exact(b) and torch.equal(a.to(torch.int64), b.to(torch.int64))


def relative_difference(expected: Tensor, got: Tensor) -> float:
    """Largest absolute difference over the largest absolute value; real and imaginary parts count one by one.

    Infinite where only one of both is not finite, or where they are not finite in different ways: NaN, plus and minus
    infinity are three values.
    """
    a, b = _as_double(expected), _as_double(got)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return float("inf")
    if not torch.equal(a[~finite].nan_to_num(0.0, 1.0, -1.0), b[~finite].nan_to_num(0.0, 1.0, -1.0)):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    scale = a.abs().max().item()
    return (a - b).abs().max().item() / scale if scale else float("inf")


def _as_double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.double()


def _tolerance(tensor: Tensor) -> float:
    tolerance = _TOLERANCE.get(tensor.dtype, _TOLERANCE[torch.float32])
    if tensor.device.type == "cuda" and tensor.dtype == torch.float32:
        return _TOLERANCE_TF32
    return tolerance
