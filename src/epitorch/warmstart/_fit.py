"""Epitome and starts that reconstruct a dense weight best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from epitorch.errors import InputError, ShapeError, StartsError, explain
from epitorch.functional import check_start_shapes
from epitorch.init import evenly_spread
from epitorch.nn import EpitomeLayer
from epitorch.spec import Axis, EpitomeSpec
from epitorch.warmstart._begin import distinct_blocks, whole
from epitorch.warmstart._problem import Target
from epitorch.warmstart._search import Rules, improve_starts
from epitorch.warmstart._solve import solve

Search = Literal["alternating", "none"]
SEARCHES = ("alternating", "none")
_QUICK = 40  # conjugate-gradient steps between two choices of the starts
_ENOUGH = 1e-4  # a round that lowers the loss by less than this share is the last


@dataclass(frozen=True)
class FitResult:
    """What a fit found.

    Args:
        epitome: Shape `(O, I, *L)`, semantic order, the weight's dtype.
        starts: One tensor for each axis of `spec.start_shapes`, float32 or wider, in positions.
        error: `||D (W - tau(E, starts))|| / ||D W||`, Frobenius norms, D the input weights.
        error_spread: The same for evenly spread starts with the best epitome for those.
    """

    epitome: Tensor
    starts: dict[Axis, Tensor]
    error: float
    error_spread: float


@dataclass(frozen=True)
class _State:
    """An epitome that is the best for its starts, up to the rounds of the solver."""

    starts: dict[Axis, Tensor]
    epitome: Tensor
    loss: float


@torch.no_grad()
def fit_epitome(
    weight: Tensor,
    spec: EpitomeSpec,
    *,
    input_weight: Tensor | None = None,
    starts: Mapping[Axis, Tensor] | None = None,
    search: Search = "alternating",
    rounds: int = 8,
    fractional: bool = True,
    within_reach: bool = False,
) -> FitResult:
    """Find the epitome, and starts, whose generated weight is nearest to a dense one (inverse of the paper's tau).

    For given starts the best epitome is a linear least-squares problem and is solved. Starts are searched by turns: the
    best start of every block for the epitome, the best epitome for the starts, as long as the error falls. The search
    begins from evenly spread starts and from an epitome tiled with blocks of the weight; the better result is taken,
    never worse than evenly spread starts with the same solve.

    Args:
        weight: Shape `spec.weight_shape`, semantic order `(C_out, C_in/groups, *K)`.
        spec: The shapes.
        input_weight: Importance of each input channel, shape `(C_in/groups,)`, not negative: the root mean square of
            that channel's activations makes the error that of the layer's output (for uncorrelated channels).
        starts: Where to begin, and what `search="none"` keeps; evenly spread starts if left out.
        search: `"alternating"`, or `"none"` to solve for the given starts only.
        rounds: Most turns of the search.
        fractional: Allow starts between positions. Whole starts fit a little worse and run faster.
        within_reach: Keep to `[0, size - g]`, what an index learner with a group length g > 1 can return.

    Returns:
        Epitome, starts and relative errors.

    Raises:
        ShapeError: If `weight` or `input_weight` has a wrong shape.
        StartsError: If `starts` do not fit the spec.
        InputError: If a value is not finite, an input weight is negative, or an option is unknown.

    Example:
        >>> spec = EpitomeSpec.create((4, 2), (2, 2))
        >>> fit_epitome(torch.eye(2).repeat(2, 1), spec).error < 1e-6
        True
    """
    _check(weight, spec, input_weight, search, rounds)
    target = _target(weight, spec, input_weight)
    rules = Rules(fractional, within_reach)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    even = evenly_spread(spec, within_reach=within_reach, whole=not fractional, device=weight.device)
    even = {axis: value.double() for axis, value in even.items()}
    spread = _solved(target, even)
    best = spread
    if starts is not None:
        _check_starts(starts, spec)
        best = _solved(target, {axis: starts[axis].detach().to(weight.device, dtype).double() for axis in even})
    if search == "alternating" and even:
        best = _search(target, best, rules, rounds, dtype)
    return FitResult(
        best.epitome.to(weight.dtype),
        {axis: value.to(dtype) for axis, value in best.starts.items()},
        target.relative(best.loss),
        target.relative(spread.loss),
    )


@torch.no_grad()
def fit_layer(
    layer: EpitomeLayer,
    weight: Tensor,
    *,
    moments: Tensor | None = None,
    search: Search = "alternating",
    rounds: int = 8,
    fractional: bool = True,
) -> FitResult:
    """Fit an epitome layer to a dense weight and write epitome and starts into it; dtype and device stay.

    A learner is made to return the new starts. The bias is left alone.

    Args:
        layer: Any epitome layer.
        weight: The dense layer's, shape `layer.weight_shape` (torch's storage order).
        moments: Mean square of each input channel, shape `(C_in/groups,)` (transposed convolutions and linear layers:
            all inputs), as `activation_moments` gives it.
        search: As in `fit_epitome`.
        rounds: As in `fit_epitome`.
        fractional: As in `fit_epitome`.

    Returns:
        What was found, epitome in semantic order.

    Raises:
        ShapeError: If the weight or the moments do not fit the layer.
        InputError: If a value is not finite.
    """
    where = layer.qualified_name or type(layer).__name__
    if tuple(weight.shape) != tuple(layer.weight_shape):
        wrong = "the dense weight does not fit the epitome layer"
        raise ShapeError(explain(wrong, expected=tuple(layer.weight_shape), got=tuple(weight.shape), where=where))
    semantic = weight.detach().to(layer.epitome.device)
    semantic = semantic.transpose(0, 1) if layer.transposed else semantic
    fit = fit_epitome(
        semantic.reshape(layer.spec.weight_shape),
        layer.spec,
        input_weight=None if moments is None else _input_weight(layer, moments, semantic, where),
        search=search,
        rounds=rounds,
        fractional=fractional,
        within_reach=layer.learner is not None,
    )
    epitome = fit.epitome.transpose(0, 1) if layer.transposed else fit.epitome
    layer.epitome.copy_(epitome)
    layer.set_starts(fit.starts)
    return fit


def _input_weight(layer: EpitomeLayer, moments: Tensor, weight: Tensor, where: str) -> Tensor:
    """Root of the moments, one per input of the matrix that the epitome generates.

    A thousandth of the mean is added, so that a channel that was silent on the few calibration images keeps a say.
    """
    if tuple(moments.shape) != (weight.shape[1],):
        wrong = "the moments do not fit the layer"
        raise ShapeError(explain(wrong, expected=(weight.shape[1],), got=tuple(moments.shape), where=where))
    squares = moments.detach().to(weight.device, torch.float64)
    if not torch.isfinite(squares).all() or (squares < 0).any():
        wrong = "moments must be finite and not negative"
        raise InputError(explain(wrong, expected="mean squares", got=squares, where=where))
    taps = prod(weight.shape[2:]) if layer.flatten_kernel else 1
    return (squares + 1e-3 * squares.mean()).sqrt().repeat_interleave(taps)


# ---- search ----


def _solved(target: Target, starts: dict[Axis, Tensor], rounds: int = 1000) -> _State:
    epitome = solve(target, starts, rounds=rounds)
    return _State(starts, epitome, target.loss(epitome, starts))


def _search(target: Target, best: _State, rules: Rules, rounds: int, dtype: torch.dtype) -> _State:
    """Whole positions first, from several beginnings, then fractions from the best of them."""
    coarse = Rules(False, rules.within_reach)
    begin = _solved(target, whole(target, best.starts, rules.within_reach))
    best = best if rules.fractional else begin
    found = [_alternate(target, begin, coarse, rounds, dtype)]
    tiled = distinct_blocks(target, begin.epitome)
    if tiled is not None:
        starts = improve_starts(target, tiled, begin.starts, coarse)
        found.append(_alternate(target, _solved(target, starts), coarse, rounds, dtype))
    nearest = min([best, *found], key=lambda state: state.loss)
    return _alternate(target, nearest, rules, max(1, rounds // 4), dtype) if rules.fractional else nearest


def _alternate(target: Target, state: _State, rules: Rules, rounds: int, dtype: torch.dtype) -> _State:
    """Starts for the epitome, epitome for the starts, as long as the loss falls."""
    steps = _QUICK
    for _ in range(rounds):
        chosen = improve_starts(target, state.epitome, state.starts, rules)
        chosen = {axis: value.to(dtype).double() for axis, value in chosen.items()}  # what will be returned
        new = _solved(target, chosen, steps)
        if not new.loss < state.loss:
            break
        enough = new.loss > (1 - _ENOUGH) * state.loss
        state = new
        if enough:
            break
    return state


# ---- input ----


def _target(weight: Tensor, spec: EpitomeSpec, input_weight: Tensor | None) -> Target:
    wide = weight.detach().double()
    importance = wide.new_ones(spec.weight_shape[1])
    if input_weight is not None:
        importance = input_weight.detach().to(wide).square()
    return Target(wide.contiguous(), importance, spec)


def _check_starts(starts: Mapping[Axis, Tensor], spec: EpitomeSpec) -> None:
    check_start_shapes(starts, spec)
    for axis, value in starts.items():
        if not torch.isfinite(value).all():
            raise StartsError(explain("starts must be finite", expected="numbers", got=f"{axis}: {value}"))


def _check(weight: Tensor, spec: EpitomeSpec, input_weight: Tensor | None, search: str, rounds: int) -> None:
    if tuple(weight.shape) != spec.weight_shape:
        wrong = "the weight does not fit its spec"
        raise ShapeError(explain(wrong, expected=spec.weight_shape, got=tuple(weight.shape)))
    if not weight.is_floating_point() or weight.is_meta or not torch.isfinite(weight).all():
        got = f"{weight.dtype} on {weight.device}"
        raise InputError(explain("the weight cannot be fitted", expected="finite real numbers", got=got))
    if search not in SEARCHES:
        raise InputError(explain("search is not valid", expected=" | ".join(SEARCHES), got=repr(search)))
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
        raise InputError(explain("rounds is not valid", expected="a whole number from 0 up", got=repr(rounds)))
    if input_weight is None:
        return
    if tuple(input_weight.shape) != spec.weight_shape[1:2]:
        wrong = "input_weight does not fit the weight"
        raise ShapeError(explain(wrong, expected=spec.weight_shape[1:2], got=tuple(input_weight.shape)))
    if not torch.isfinite(input_weight).all() or (input_weight < 0).any():
        wrong = "input_weight must be finite and not negative"
        raise InputError(explain(wrong, expected="one number from 0 up per input channel", got=input_weight))
