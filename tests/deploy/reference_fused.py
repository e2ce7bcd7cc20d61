"""An inverted residual on epitomes in literal loops, float64; shares nothing with the library."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def activation(name: str, value: float) -> float:
    if name == "relu":
        return max(0.0, value)
    if name == "relu6":
        return min(6.0, max(0.0, value))
    if name == "silu":
        return value / (1.0 + math.exp(-value))
    if name == "hardswish":
        return value * min(6.0, max(0.0, value + 3.0)) / 6.0
    if name == "sigmoid":
        return 1.0 / (1.0 + math.exp(-value))
    if name == "hardsigmoid":
        return min(6.0, max(0.0, value + 3.0)) / 6.0
    return value


def mixing(starts: Array | None, channels: int, size: int, block: int, group: int) -> Array:
    """A_out or A_in of the method's section 1, shape (channels, size)."""
    matrix = np.zeros((channels, size))
    for c in range(channels):
        start = 0.0 if starts is None else float(starts[c // block])
        offset = c if starts is None else c % block
        below = math.floor(start / group)
        fraction = start / group - below
        matrix[c, (below * group + offset) % size] += 1.0 - fraction
        matrix[c, (below * group + group + offset) % size] += fraction
    return matrix


def depthwise(x: Array, weight: Array, bias: Array, stride: int, padding: int) -> Array:
    channels, rows, columns = x.shape
    k = weight.shape[-1]
    out = ((rows + 2 * padding - k) // stride + 1, (columns + 2 * padding - k) // stride + 1)
    y = np.zeros((channels, *out))
    for c in range(channels):
        for i in range(out[0]):
            for j in range(out[1]):
                total = bias[c]
                for u in range(k):
                    for v in range(k):
                        row, column = i * stride - padding + u, j * stride - padding + v
                        if 0 <= row < rows and 0 <= column < columns:
                            total += weight[c, u, v] * x[c, row, column]
                y[c, i, j] = total
    return y


def apply(name: str, x: Array) -> Array:
    return np.array([activation(name, float(value)) for value in x.reshape(-1)]).reshape(x.shape)


def pointwise(matrix: Array, x: Array) -> Array:
    y = np.zeros((matrix.shape[0], *x.shape[1:]))
    for n in range(matrix.shape[0]):
        for m in range(matrix.shape[1]):
            y[n] += matrix[n, m] * x[m]
    return y


def squeeze(x: Array, first: tuple[Array, Array], second: tuple[Array, Array], between: str, gate: str) -> Array:
    """Squeeze-excitation: every channel times a gate made of all channels' means; matrices with their biases."""
    means = [sum(float(value) for value in channel.reshape(-1)) / channel.size for channel in x]
    narrow = []
    for row, bias in zip(*first, strict=True):
        narrow.append(activation(between, bias + sum(w * m for w, m in zip(row, means, strict=True))))
    y = np.zeros_like(x)
    for c, (row, bias) in enumerate(zip(*second, strict=True)):
        y[c] = x[c] * activation(gate, bias + sum(w * n for w, n in zip(row, narrow, strict=True)))
    return y
