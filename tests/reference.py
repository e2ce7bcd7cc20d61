"""The method in literal loops, float64, one element at a time. Shares no code with the library.

Slow on purpose: each function reads like the equation that it states, so that a wrong library cannot agree
with it by construction. Shapes are semantic, `(out, in, *kernel)`, and nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, floor, prod

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Starts = Mapping[str, Array]
Pair = tuple[int, int]  # output block r, input block s
Tap = tuple[int, float]  # position on an axis of the epitome, fraction
PER_PAIR = {
    "separable": "",
    "grid": ("out", "in"),
    "grid_out": ("out",),
    "grid_in": ("in",),
}  # axes with a start per pair


@dataclass(frozen=True)
class Layout:
    """One weight and its epitome, in the method's own terms."""

    weight_shape: tuple[int, ...]  # (C_out, C_in/groups, *K)
    epitome_shape: tuple[int, ...]  # (O, I, *L)
    block_out: int
    block_in: int
    spatial_starts: str = "in"
    channel_starts: str = "separable"
    group_length: int = 1
    spatial_shift: bool = False

    @property
    def blocks(self) -> tuple[int, int]:
        """R_cout, R_cin."""
        return ceil(self.weight_shape[0] / self.block_out), ceil(self.weight_shape[1] / self.block_in)

    @property
    def spatial_axes(self) -> list[int]:
        """Spatial axes with starts: longer than 1, and of another length than the kernel or asked for."""
        sizes = enumerate(zip(self.weight_shape[2:], self.epitome_shape[2:], strict=True))
        return [k for k, (K, L) in sizes if L > 1 and (L != K or self.spatial_shift)]


def start_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Which starts exist, by the rules of the method's section 1 and of channel starts per pair of blocks."""
    (rows, columns), per_pair = layout.blocks, PER_PAIR[layout.channel_starts]
    (c_out, c_in), (o, i) = layout.weight_shape[:2], layout.epitome_shape[:2]
    shapes: dict[str, tuple[int, ...]] = {}
    if 1 < o < c_out:
        shapes["out"] = (rows, columns) if "out" in per_pair else (rows,)
    if i > 1 and (i < c_in or ("in" in per_pair and rows > 1)):
        shapes["in"] = (rows, columns) if "in" in per_pair else (columns,)
    if layout.spatial_axes:
        owner = {"in": (columns,), "out": (rows,), "grid": (rows, columns)}[layout.spatial_starts]
        shapes["spatial"] = (*owner, len(layout.spatial_axes))
    return shapes


def taps(start: float, offset: int, size: int, group: int = 1) -> list[Tap]:
    """Positions on the circle, fractions: G((n - x)/g) over n in multiples of g, moved by the offset."""
    found = []
    for multiple in range(floor(start / group) - 2, floor(start / group) + 4):
        n = multiple * group
        fraction = max(0.0, 1.0 - abs(n - start) / group)
        if fraction > 0:
            found.append(((n + offset) % size, fraction))
    return found


def channel_taps(layout: Layout, starts: Starts, axis: int, n: int, pair: Pair) -> list[Tap]:
    """Epitome channels that weight channel `n` of the axis (0 out, 1 in) mixes, in the block pair (r, s)."""
    name, block = ("out", "in")[axis], (layout.block_out, layout.block_in)[axis]
    size = layout.epitome_shape[axis]
    if name not in start_shapes(layout):
        return [(n % size, 1.0)]
    owner = pair if name in PER_PAIR[layout.channel_starts] else (pair[axis],)
    return taps(float(starts[name][owner]), n % block, size, layout.group_length)


def spatial_taps(layout: Layout, starts: Starts, axis: int, k: int, pair: Pair) -> list[Tap]:
    """Epitome positions that kernel position `k` of a spatial axis mixes, in the block pair (r, s)."""
    size = layout.epitome_shape[2 + axis]
    if axis not in layout.spatial_axes:
        return [(k % size, 1.0)]
    owner = {"in": pair[1:], "out": pair[:1], "grid": pair}[layout.spatial_starts]
    return taps(float(starts["spatial"][(*owner, layout.spatial_axes.index(axis))]), k, size)


def element_taps(layout: Layout, starts: Starts, position: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Epitome elements with their fractions for one element of the weight: the product over all axes."""
    n, m, *kernel = position
    pair = (n // layout.block_out, m // layout.block_in)
    axes = [channel_taps(layout, starts, 0, n, pair), channel_taps(layout, starts, 1, m, pair)]
    axes += [spatial_taps(layout, starts, axis, k, pair) for axis, k in enumerate(kernel)]
    for combination in product(*axes):
        yield tuple(index for index, _ in combination), prod(fraction for _, fraction in combination)


def sample_weight(epitome: Array, starts: Starts, layout: Layout) -> Array:
    """tau of the method's section 2, element by element."""
    weight = np.zeros(layout.weight_shape)
    for position in product(*map(range, layout.weight_shape)):
        for index, fraction in element_taps(layout, starts, position):
            weight[position] += fraction * epitome[index]
    return weight


def gather_weight(epitome: Array, starts: Starts, layout: Layout) -> Array:
    """The weight for starts on whole positions: one epitome element each, no arithmetic on values."""
    weight = np.zeros(layout.weight_shape)
    for position in product(*map(range, layout.weight_shape)):
        ((index, fraction),) = element_taps(layout, starts, position)
        if fraction != 1.0:
            raise ValueError(f"a start between positions at {position}: fraction {fraction}")
        weight[position] = epitome[index]
    return weight


def mean_square_factor(layout: Layout, starts: Starts) -> float:
    """Mean over the weight of the sum of squared shares: what mixing does to the variance of iid elements."""
    total = 0.0
    for position in product(*map(range, layout.weight_shape)):
        shares: dict[tuple[int, ...], float] = {}
        for index, fraction in element_taps(layout, starts, position):
            shares[index] = shares.get(index, 0.0) + fraction
        total += sum(share**2 for share in shares.values())
    return total / prod(layout.weight_shape)


def initial_starts(size: int, count: int) -> list[float]:
    """Even spread `(r + 1/2) * size / R` over one axis."""
    return [(r + 0.5) * size / count for r in range(count)]


def moving_average(start: Array, outputs: Sequence[Array], momentum: float) -> Array:
    """`M <- mu*M + (1 - mu)*S(eta(F))`, once per entry of `outputs`."""
    average = np.array(start, dtype=np.float64)
    for output in outputs:
        for index in np.ndindex(average.shape):
            average[index] = momentum * average[index] + (1.0 - momentum) * output[index]
    return average


def scale(sigmoid: Array, size: int, group: int = 1) -> Array:
    """S: `size * sigmoid`, or `g * sigmoid * (size/g - 1)` with group length g."""
    return np.array([size * p if group == 1 else group * p * (size / group - 1) for p in sigmoid])


def wrapped_channels(layout: Layout, starts: Starts) -> list[dict[int, float]]:
    """For each epitome input channel, the input channels that meet it with their fractions (wrapping)."""
    wrapped: list[dict[int, float]] = [{} for _ in range(layout.epitome_shape[1])]
    for channel in range(layout.weight_shape[1]):
        for index, fraction in channel_taps(layout, starts, 1, channel, (0, channel // layout.block_in)):
            wrapped[index][channel] = wrapped[index].get(channel, 0.0) + fraction
    return wrapped


def convolve(x: Array, weight: Array, stride: int = 1, dilation: int = 1, groups: int = 1) -> Array:
    """Cross-correlation of one padded sample `(C_in, *D)` with `(C_out, C_in/groups, *K)`, in plain loops."""
    c_out, depth, *kernel = weight.shape
    sizes = [(d - dilation * (k - 1) - 1) // stride + 1 for d, k in zip(x.shape[1:], kernel, strict=True)]
    y = np.zeros((c_out, *sizes))
    for n, m, *place in product(range(c_out), range(depth), *map(range, sizes), *map(range, kernel)):
        at, k = place[: len(sizes)], place[len(sizes) :]
        channel = n // (c_out // groups) * depth + m
        read = tuple(p * stride + q * dilation for p, q in zip(at, k, strict=True))
        y[(n, *at)] += weight[(n, m, *k)] * x[(channel, *read)]
    return y


def product_positions(x: Array, rows: Array) -> Array:
    """`P[o, *l, *t] = <x_t, E[o, :, l]>` for one padded sample `(C, *D)` and filters `(O, C, *L)`."""
    found = np.zeros((rows.shape[0], *rows.shape[2:], *x.shape[1:]))
    for o, *place in product(range(rows.shape[0]), *map(range, rows.shape[2:]), *map(range, x.shape[1:])):
        at, t = tuple(place[: rows.ndim - 2]), tuple(place[rows.ndim - 2 :])
        found[(o, *at, *t)] = sum(rows[(o, c, *at)] * x[(c, *t)] for c in range(x.shape[0]))
    return found


def diagonal(products: Array, start: tuple[int, ...], t: tuple[int, ...], kernel: tuple[int, ...], step: int) -> Array:
    """`sum_k P[o, (p + k) mod L, t + k d]` over all kernel positions k, for every o."""
    window = products.shape[1 : 1 + len(kernel)]
    total = np.zeros(products.shape[0])
    for k in product(*map(range, kernel)):
        at = tuple((p + i) % size for p, i, size in zip(start, k, window, strict=True))
        total += products[(slice(None), *at, *(q + i * step for q, i in zip(t, k, strict=True)))]
    return total


def integral_map_1d(products: Array, kernel: int, step: int) -> Array:
    """`S[l, t] = S[l - 1, t - d] + P[l mod L, t]`, l from 0 to L + K - 2."""
    filters, window, size = products.shape
    sums = np.zeros((filters, window + kernel - 1, size))
    for o, n, t in np.ndindex(sums.shape):
        before = sums[o, n - 1, t - step] if n and t >= step else 0.0
        sums[o, n, t] = before + products[o, n % window, t]
    return sums


def integral_map_2d(products: Array, kernel: tuple[int, int], step: int) -> Array:
    """`S[p, q, t, u] = P + S[p-1, q, t-d, u] + S[p, q-1, t, u-d] - S[p-1, q-1, t-d, u-d]`."""
    filters, *window = products.shape[:3]
    sums = np.zeros((filters, window[0] + kernel[0] - 1, window[1] + kernel[1] - 1, *products.shape[3:]))
    for o, p, q, t, u in np.ndindex(sums.shape):
        up, left = p and t >= step, q and u >= step
        total = products[o, p % window[0], q % window[1], t, u]
        total += sums[o, p - 1, q, t - step, u] if up else 0.0
        total += sums[o, p, q - 1, t, u - step] if left else 0.0
        total -= sums[o, p - 1, q - 1, t - step, u - step] if up and left else 0.0
        sums[o, p, q, t, u] = total
    return sums


def printed_integral_map_2d(products: Array, kernel: tuple[int, int], step: int) -> Array:
    """The paper's recurrence: one diagonal through all axes, `S = P + S[p-1, q-1, t-d, u-d]`."""
    filters, *window = products.shape[:3]
    sums = np.zeros((filters, window[0] + kernel[0] - 1, window[1] + kernel[1] - 1, *products.shape[3:]))
    for o, p, q, t, u in np.ndindex(sums.shape):
        before = sums[o, p - 1, q - 1, t - step, u - step] if p and q and t >= step and u >= step else 0.0
        sums[o, p, q, t, u] = before + products[o, p % window[0], q % window[1], t, u]
    return sums
