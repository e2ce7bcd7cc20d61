"""Product positions, sums along diagonals and the integral map (method section 5 item 4): pure tensor functions.

`P[t, l] = <x_t, E_l>` holds the product of every position t of the padded input with every position l of the
epitome's window, which is a circle. The response of a filter that starts at p is `sum_k P[t + k d, p + k]`, one
diagonal for every output position t.

Tensors of positions have the shape (N, rows, *L, *T).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Beginning:
    """Where a diagonal begins in the window, one entry per spatial axis.

    Args:
        lower: Whole position.
        upper: Its neighbour, share `fraction`.
        fraction: 0 for a whole start: the neighbour is then not read.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    fraction: tuple[float, ...]


@dataclass(frozen=True)
class Reach:
    """Positions that the outputs read, one entry per spatial axis.

    Args:
        kernel: K.
        dilation: d.
        stride: Of the outputs.
        sizes: Output positions.
    """

    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def span(self) -> tuple[int, ...]:
        """Positions from the first that is read to the last."""
        axes = zip(self.kernel, self.dilation, self.stride, self.sizes, strict=True)
        return tuple((n - 1) * s + d * (k - 1) + 1 for k, d, s, n in axes)


def integral_map(positions: Tensor, reach: Reach) -> Tensor:
    """Sum along the diagonals, one spatial axis after the other, in float64.

    Along one axis `S[t, l] = S[t - d, l - 1] + P[t, l]` with the l axis extended circularly by K - 1; one axis
    after the other is the recurrence of method section 5 in any number of dimensions, in fewer additions. A
    difference of two long sums loses digits, so float32 and narrower are summed in float64.

    Args:
        positions: Shape (N, rows, *L, *T).
        reach: Kernel and dilation.

    Returns:
        Shape (N, rows, *M, *T'), float64. On axes with K > 1, `M = L + K` and `T' = T + d`: entry 0 and the first d
        positions are the zeros in front of every sum.
    """
    sums, axes = positions.double(), range(len(reach.kernel))
    for axis in axes:
        if reach.kernel[axis] > 1:
            sums = _summed(sums, 2 + axis, 2 + len(axes) + axis, reach.kernel[axis], reach.dilation[axis])
    long = [k > 1 for k in reach.kernel]
    front = [d * is_long for d, is_long in zip(reach.dilation, long, strict=True)]
    return F.pad(sums, [n for size in reversed([*map(int, long), *front]) for n in (size, 0)])


def _summed(values: Tensor, window_dim: int, space_dim: int, kernel: int, dilation: int) -> Tensor:
    size, kept = values.shape[window_dim], values.shape[space_dim] - dilation
    behind = [0, 0] * (values.dim() - 1 - space_dim)
    slabs = [values.narrow(window_dim, 0, 1)]
    for n in range(1, size + kernel - 1):
        moved = F.pad(slabs[-1].narrow(space_dim, 0, kept), [*behind, dilation, 0])
        slabs.append(moved.add_(values.narrow(window_dim, n % size, 1)))
    return torch.cat(slabs, window_dim)


def response(positions: Tensor, start: Beginning, reach: Reach) -> Tensor:
    """Sum along diagonals tap by tap; half and bfloat16 are summed in float32.

    Args:
        positions: Shape (N, rows, *L, *T).
        start: Where the diagonals begin.
        reach: What the outputs read.

    Returns:
        Shape (N, rows, *sizes).
    """
    return _interpolated(start, lambda corner: _taps(positions, corner, reach).to(positions.dtype))


def integral_response(sums: Tensor, start: Beginning, reach: Reach, dtype: torch.dtype) -> Tensor:
    """The same as `response` from the integral map: 2^d entries for a whole start, 4^d for a fractional one.

    Args:
        sums: From `integral_map`.
        start: Where the diagonals begin.
        reach: What the outputs read.
        dtype: Of the result; the differences are taken in float64.
    """
    return _interpolated(start, lambda corner: _entries(sums, corner, reach).to(dtype))


def _interpolated(start: Beginning, at: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """Lerp over the axes whose start lies between two positions; the last axis changes fastest."""
    axes = list(zip(start.lower, start.upper, start.fraction, strict=True))
    values = [at(corner) for corner in product(*((a, b) if f else (a,) for a, b, f in axes))]
    for share in reversed([f for f in start.fraction if f]):
        values = [torch.lerp(a, b, share) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _taps(positions: Tensor, corner: tuple[int, ...], reach: Reach) -> Tensor:
    window, total = positions.shape[2 : 2 + len(corner)], None
    wide = torch.float64 if positions.dtype == torch.float64 else torch.float32
    for taps in product(*map(range, reach.kernel)):
        at = [(p + k) % size for p, k, size in zip(corner, taps, window, strict=True)]
        part = _entry(positions, at, [k * d for k, d in zip(taps, reach.dilation, strict=True)], reach)
        total = part.to(wide, copy=True) if total is None else total.add_(part)
    assert total is not None
    return total


def _entries(sums: Tensor, corner: tuple[int, ...], reach: Reach) -> Tensor:
    """Both ends of the diagonal on every axis: the far end less what lies before its beginning."""
    ends = [
        ((1, k, k * d), (-1, 0, 0)) if k > 1 else ((1, 0, 0),)
        for k, d in zip(reach.kernel, reach.dilation, strict=True)
    ]
    total = None
    for chosen in product(*ends):
        at = [p + step for p, (_, step, _) in zip(corner, chosen, strict=True)]
        part = _entry(sums, at, [offset for _, _, offset in chosen], reach)
        if total is None:
            total = part.clone()
        else:
            total = total.add_(part) if prod(sign for sign, _, _ in chosen) > 0 else total.sub_(part)
    assert total is not None
    return total


def _entry(values: Tensor, at: Sequence[int], offsets: Sequence[int], reach: Reach) -> Tensor:
    """One position of the window at every output's position, shifted by offsets in space."""
    axes = zip(offsets, reach.stride, reach.sizes, strict=True)
    every, space = slice(None), [slice(o, o + s * (n - 1) + 1, s) for o, s, n in axes]
    index: tuple[int | slice, ...] = (every, every, *at, *space)
    return values[index]
