"""The best epitome for given starts: linear least squares."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor

from epitorch.functional import sample_weight
from epitorch.spec import EpitomeSpec
from epitorch.warmstart._problem import Starts, Target, Window, gathered, windows

_CHUNK = 20_000_000  # elements of one intermediate tensor


def solve(target: Target, starts: Starts, *, rounds: int = 1000, tolerance: float = 1e-8) -> Tensor:
    """Return an epitome that minimises the loss for these starts, shape `(O, I, *L)`, float64.

    Where tau separates, `E = pinv(A_out) W pinv(A_in)^T` (and the same for space). Otherwise the normal equations are
    assembled: they couple a position with its direct neighbours only, and not even those where starts are whole.

    Args:
        target: What to fit.
        starts: One tensor for each axis that has starts, float64.
        rounds: Most steps of the conjugate gradient.
        tolerance: It stops at a step that lowers the loss by less than this share.
    """
    if target.spec.separable:
        return _solve_separable(target, starts)
    places = windows(starts, target.spec, target.weight)
    right = gathered(target.blocks, places, target.spec.epitome_shape)
    stencil = _normal_equations(target, places)
    centre = stencil.pop((0,) * right.dim())
    scale = torch.where(centre > 0, centre.reciprocal(), torch.zeros_like(centre))  # unused positions stay 0
    if not stencil:
        return right * scale
    steps = [place.shift.group for place in places]
    normal = partial(_apply, centre, stencil, steps)
    return _conjugate_gradient(normal, right, scale, loss=target.size, rounds=rounds, tolerance=tolerance)


# ---- separable ----


def _solve_separable(target: Target, starts: Starts) -> Tensor:
    epitome = target.weight
    for dim in range(epitome.dim()):
        matrix = axis_matrix(dim, starts, target.spec, target.weight)
        weights = target.importance if dim == 1 else matrix.new_ones(matrix.shape[0])
        rest = epitome.movedim(dim, 0)
        solved = _pseudo_inverse(matrix, weights) @ rest.reshape(rest.shape[0], -1)
        epitome = solved.reshape(-1, *rest.shape[1:]).movedim(0, dim)
    return epitome.contiguous()


def axis_matrix(dim: int, starts: Starts, spec: EpitomeSpec, like: Tensor) -> Tensor:
    """A of one axis, shape (weight size, epitome size): row n says which positions the n-th of the weight mixes."""
    size, length = spec.epitome_shape[dim], spec.weight_shape[dim]
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    if dim >= 2:
        one = EpitomeSpec.create((size, 1, length), (size, 1, size), spatial_shift=spec.spatial_shift)
        given: Starts = {}
        if dim - 2 in spec.spatial_axes:
            given = {"spatial": starts["spatial"].reshape(-1)[spec.spatial_axes.index(dim - 2)].reshape(1, 1)}
        return sample_weight(eye.view(size, 1, size), given, one)[:, 0].t()
    axis, block = (("out", spec.block_out), ("in", spec.block_in))[dim]
    group = spec.group_length if axis in starts else None
    one = EpitomeSpec.create((length, size), (size, size), block_out=block, group_length=group)
    return sample_weight(eye, {"out": starts[axis]} if axis in starts else {}, one)  # type: ignore[index]


def _pseudo_inverse(matrix: Tensor, weights: Tensor) -> Tensor:
    """(A^T D A)^+ A^T D, with the diagonal scaled to 1 first: importances span many orders of magnitude."""
    weighted = matrix.t() * weights
    normal = weighted @ matrix
    diagonal = normal.diagonal()
    scale = torch.where(diagonal > 0, diagonal.clamp_min(1e-300).rsqrt(), torch.zeros_like(diagonal))
    normal = normal * scale * scale.unsqueeze(1)
    if torch.equal(normal, torch.diag(normal.diagonal())):  # whole starts
        return weighted * (scale * scale).unsqueeze(1)
    inverse = torch.linalg.pinv(normal, hermitian=True, rtol=1e-12)
    return scale.unsqueeze(1) * inverse * scale @ weighted


# ---- one start per pair of blocks, or spatial starts per block ----


def _normal_equations(target: Target, places: list[Window]) -> dict[tuple[int, ...], Tensor]:
    """The matrix of the normal equations by its diagonals: offset in steps per axis -> shape `(O, I, *L)`.

    In one pair of blocks the design matrix is a Kronecker product over the axes, hence its Gram matrix too; on each
    axis that couples a position with itself and the next one. Of an offset and its opposite only one is kept.
    """
    spec = target.spec
    along = [target.rows.unsqueeze(1), target.columns.unsqueeze(0)]
    along += [target.weight.new_ones(1, 1, kernel) for kernel in spec.kernel]
    pairs = (spec.num_out_blocks, spec.num_in_blocks)
    grams = [_axis_gram(place, weight, pairs) for place, weight in zip(places, along, strict=True)]
    offsets = [o for o in itertools.product(*map(sorted, grams)) if o >= (0,) * len(grams)]
    return {offset: _sum_of_products([gram[o] for gram, o in zip(grams, offset, strict=True)]) for offset in offsets}


def _axis_gram(place: Window, along: Tensor, pairs: tuple[int, int]) -> dict[int, Tensor]:
    """Coupling of each position with the one 0, 1 or -1 steps on, by pair of blocks: shape (R_out * R_in, L)."""
    size, step = place.shift.size, place.shift.group
    lower = place.shift.window(place.length)
    fraction = place.shift.fraction.unsqueeze(-1)
    lead = [max(a, b) for a, b in zip(lower.shape, along.shape, strict=True)]
    lower, along = lower.expand(lead), along.expand(lead)
    upper = (lower + step).remainder(size)

    def add(*terms: tuple[Tensor, Tensor]) -> Tensor:
        total = along.new_zeros(*lead[:2], size)
        for index, share in terms:
            total.scatter_add_(-1, index, along * share)
        return total.expand(*pairs, size).reshape(-1, size)

    gram = {0: add((lower, (1 - fraction) ** 2), (upper, fraction**2))}
    if place.mixes:
        gram[1] = add((lower, fraction * (1 - fraction)))
        gram[-1] = gram[1].roll(step, -1)
    return gram


def _sum_of_products(factors: list[Tensor]) -> Tensor:
    """Sum over pairs of the outer product of their rows, shape (size of each factor)."""
    sizes = [factor.shape[-1] for factor in factors]
    total = factors[0].new_zeros(sizes[0], prod(sizes[1:]))
    for part in zip(*(factor.split(max(1, _CHUNK // prod(sizes[1:]))) for factor in factors), strict=True):
        rest = part[1]
        for factor in part[2:]:
            rest = (rest.unsqueeze(-1) * factor.unsqueeze(1)).flatten(1)
        total += part[0].t() @ rest
    return total.view(sizes)


def _apply(centre: Tensor, stencil: dict[tuple[int, ...], Tensor], steps: list[int], x: Tensor) -> Tensor:
    """The normal equations times x."""
    y = centre * x
    dims = tuple(range(x.dim()))
    for offset, diagonal in stencil.items():
        ahead = tuple(o * step for o, step in zip(offset, steps, strict=True))
        y += diagonal * x.roll(tuple(-a for a in ahead), dims)
        y += (diagonal * x).roll(ahead, dims)
    return y


def _conjugate_gradient(
    apply: Callable[[Tensor], Tensor], right: Tensor, scale: Tensor, *, loss: float, rounds: int, tolerance: float
) -> Tensor:
    """Solve a positive semidefinite system, preconditioned by its diagonal, from 0, where the loss is `loss`.

    Every step lowers the loss by a known amount, which tells when to stop.
    """
    x, residual = torch.zeros_like(right), right.clone()
    direction = scale * residual
    energy = float((residual * direction).sum())
    floor = 1e-15 * loss  # what float64 resolves
    for _ in range(rounds):
        image = apply(direction)
        curvature = float((direction * image).sum())
        if curvature <= 0:
            break
        length = energy / curvature
        x += length * direction
        loss = max(loss - length * energy, floor)
        if length * energy <= tolerance * loss:
            break
        residual -= length * image
        scaled = scale * residual
        before, energy = energy, float((residual * scaled).sum())
        direction = scaled + (energy / before) * direction
    return x
