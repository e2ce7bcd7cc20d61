"""Least squares for an epitome in literal loops: the design matrix written out, shares no code with the library."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np

from reference import Array, Layout, Starts, element_taps


def design_matrix(layout: Layout, starts: Starts) -> Array:
    """tau as a matrix: row = element of the weight, column = element of the epitome, both in C order."""
    matrix = np.zeros((prod(layout.weight_shape), prod(layout.epitome_shape)))
    for row, position in enumerate(product(*map(range, layout.weight_shape))):
        for index, fraction in element_taps(layout, starts, position):
            column = 0
            for i, size in zip(index, layout.epitome_shape, strict=True):
                column = column * size + i
            matrix[row, column] += fraction
    return matrix


def element_weights(layout: Layout, input_weight: Array) -> Array:
    """The input weight that each element of the weight is multiplied with, in C order."""
    return np.array([input_weight[position[1]] for position in product(*map(range, layout.weight_shape))])


def best_epitome(
    weight: Array, layout: Layout, starts: Starts, input_weight: Array | None = None
) -> tuple[Array, float]:
    """Solve the whole system at once; returns the epitome and its relative error."""
    ones = np.ones(layout.weight_shape[1])
    scale = element_weights(layout, ones if input_weight is None else input_weight)
    matrix = design_matrix(layout, starts) * scale[:, None]
    right = weight.reshape(-1) * scale
    solution, *_ = np.linalg.lstsq(matrix, right, rcond=1e-10)
    error = np.linalg.norm(matrix @ solution - right) / np.linalg.norm(right)
    return solution.reshape(layout.epitome_shape), float(error)


def relative_error(
    weight: Array, epitome: Array, layout: Layout, starts: Starts, input_weight: Array | None = None
) -> float:
    """Relative error of a given epitome."""
    ones = np.ones(layout.weight_shape[1])
    scale = element_weights(layout, ones if input_weight is None else input_weight)
    made = design_matrix(layout, starts) @ epitome.reshape(-1)
    return float(np.linalg.norm((made - weight.reshape(-1)) * scale) / np.linalg.norm(weight.reshape(-1) * scale))


def best_start_1d(rows: Array, epitome: Array, steps: int) -> tuple[float, float]:
    """Best start of one block (rows of a matrix) by trying `steps` starts per position: (start, squared error)."""
    size = len(epitome)
    best = (0.0, float("inf"))
    for i in range(size * steps):
        start = i / steps
        n, f = int(start), start - int(start)
        error = 0.0
        for a, row in enumerate(rows):
            made = (1 - f) * epitome[(n + a) % size] + f * epitome[(n + a + 1) % size]
            error += float(((row - made) ** 2).sum())
        if error < best[1]:
            best = (start, error)
    return best
