"""Padding amounts as torch's convolutions work them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from epitorch.errors import ShapeError, explain


def amounts_before_and_after(
    padding: tuple[int, ...] | str, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> list[int]:
    """What `F.pad` wants: (before, after) for each axis, the last axis first."""
    amounts: list[int] = []
    for k in reversed(range(len(kernel))):
        if padding == "same":
            total = dilation[k] * (kernel[k] - 1)
            amounts += [total // 2, total - total // 2]
        else:
            amounts += [0, 0] if isinstance(padding, str) else [padding[k], padding[k]]
    return amounts


def output_padding(layer: Any, input: Tensor, output_size: Sequence[int], where: str) -> tuple[int, ...]:
    """Rows that a transposed convolution adds on one side so that the output has the size that was asked for.

    Args:
        layer: With torch's attributes of a transposed convolution.
        input: Shape (N, C_in, *space) or (C_in, *space).
        output_size: Spatial sizes, or the whole shape.
        where: The layer's name, for the message.

    Raises:
        ShapeError: If stride and dilation cannot reach that size.
    """
    dims = len(layer.kernel_size)
    wanted = tuple(output_size)[-dims:]
    least, most = [], []
    for k, size in enumerate(input.shape[-dims:]):
        reach = layer.dilation[k] * (layer.kernel_size[k] - 1)
        least.append((size - 1) * layer.stride[k] - 2 * layer.padding[k] + reach + 1)
        most.append(least[-1] + max(layer.stride[k], layer.dilation[k]) - 1)
    fits = len(wanted) == dims and all(low <= size <= high for low, size, high in zip(least, wanted, most, strict=True))
    if not fits:
        raise ShapeError(
            explain(
                "output_size cannot be reached",
                expected=f"from {tuple(least)} to {tuple(most)}",
                got=tuple(output_size),
                where=where,
            )
        )
    return tuple(size - low for size, low in zip(wanted, least, strict=True))
