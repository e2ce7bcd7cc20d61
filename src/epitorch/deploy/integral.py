"""Product positions, sums along diagonals and the integral map (method section 5 item 4): pure tensor functions.

`P[t, l] = <x_t, E_l>` holds the product of every position t of the padded input with every position l of the
epitome's window, which is a circle. The response of a filter that starts at p is `sum_k P[t + k d, p + k]`, one
diagonal for every output position t.

Tensors of positions have the shape (N, rows, *L, *T).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


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


@dataclass(frozen=True)
class Tap:
    """One entry that a response takes, relative to its start; one number per spatial axis.

    Args:
        step: In the window.
        offset: In space.
        sign: 1 or -1.
    """

    step: tuple[int, ...]
    offset: tuple[int, ...]
    sign: int = 1


def diagonal_taps(reach: Reach) -> tuple[Tap, ...]:
    """All of the diagonal: prod(K) products."""
    return tuple(
        Tap(k, tuple(i * d for i, d in zip(k, reach.dilation, strict=True))) for k in product(*map(range, reach.kernel))
    )


def integral_taps(reach: Reach) -> tuple[Tap, ...]:
    """Both ends of the diagonal on every axis: the far end less what lies before its beginning; 2^d entries."""
    ends = [
        ((k, k * d, 1), (0, 0, -1)) if k > 1 else ((0, 0, 1),)
        for k, d in zip(reach.kernel, reach.dilation, strict=True)
    ]
    chosen = [tuple(zip(*corner, strict=True)) for corner in product(*ends)]
    return tuple(Tap(step, offset, prod(signs)) for step, offset, signs in chosen)


def integral_sizes(kernel: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...]:
    """Entries of the integral map along the axes of the window."""
    return tuple(size + k if k > 1 else size for k, size in zip(kernel, window, strict=True))


def tap_index(rows: Tensor, starts: Tensor, taps: Sequence[Tap], sizes: tuple[int, ...]) -> Tensor:
    """Where the taps lie when rows and the window's axes are one axis.

    Args:
        rows: Row of each response, shape (R,).
        starts: Where its diagonal begins, shape (R, d), whole.
        taps: From `diagonal_taps` or `integral_taps`.
        sizes: Entries along the axes of the window, each a circle.

    Returns:
        Shape (taps, R).
    """
    found = []
    for tap in taps:
        flat = rows
        for axis, size in enumerate(sizes):
            flat = flat * size + (starts[:, axis] + tap.step[axis]).remainder(size)
        found.append(flat)
    return torch.stack(found)


def responses(source: Tensor, index: Tensor, shares: Tensor, taps: Sequence[Tap], reach: Reach) -> Tensor:
    """Responses of many rows at once, each from its own start; half and bfloat16 are summed in float32.

    Args:
        source: Products or integral map, rows and window in one axis: shape (N, rows * cells, *T).
        index: Shape (2^j, taps, R): a `tap_index` for the starts and their neighbours on the j axes that are
            interpolated, the last axis changing fastest.
        shares: Of the upper neighbours, shape (j, R).
        taps: What `index` was made for.
        reach: What the outputs read.

    Returns:
        Shape (N, R, *sizes), float32 or wider.
    """
    values = [_summed_taps(source, corner, taps, reach) for corner in index.unbind()]
    for share in reversed(shares.unbind()):
        weight = share.to(values[0].dtype).view(-1, *[1] * len(reach.kernel))
        values = [torch.lerp(low, high, weight) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _summed_taps(source: Tensor, index: Tensor, taps: Sequence[Tap], reach: Reach) -> Tensor:
    wide = torch.float64 if source.dtype == torch.float64 else torch.float32
    total = _at(source.index_select(1, index[0]), taps[0], reach).to(wide, copy=True)
    for tap, rows in zip(taps[1:], index.unbind()[1:], strict=True):
        part = _at(source.index_select(1, rows), tap, reach)  # selecting from a slice would copy all of it first
        total = total.add_(part) if tap.sign > 0 else total.sub_(part)
    return total


def _at(source: Tensor, tap: Tap, reach: Reach) -> Tensor:
    """Every output's position, shifted."""
    axes = zip(tap.offset, reach.stride, reach.sizes, strict=True)
    every: tuple[slice, ...] = (slice(None), slice(None))
    return source[every + tuple(slice(o, o + s * (n - 1) + 1, s) for o, s, n in axes)]
