"""Ladders: the epitome shapes that a layer may have, from the smallest to the whole weight. Integers only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

from epitorch.cost._survey import Candidate
from epitorch.cost.formulas import Interpolated, best
from epitorch.errors import InputError, explain, suggest
from epitorch.plans import BudgetKind
from epitorch.spec import ChannelStarts, EpitomeSpec

Starts = Literal["separable", "grid", "fine", "partial"]
"""Per block as long as the epitome's axis, per pair of such blocks, per channel, or per pair on the shortened axis."""
Form = Literal["auto", "separable", "grid", "fine", "partial"]
Axes = Literal["auto", "out", "in", "both"]
FORMS: tuple[str, ...] = ("auto", "separable", "grid", "fine", "partial")
AXES: tuple[str, ...] = ("auto", "out", "in", "both")
MOST_PARTS = 8
"""Of a channel axis with partial products: each is one more addition for every channel of the other."""


@dataclass(frozen=True)
class Rung:
    """One choice for a layer.

    Args:
        cost: In units of the budget.
        share: Elements of the epitome over those of the weight.
        epitome: Semantic shape; None leaves the layer dense.
        starts: What has a start of its own.
    """

    cost: int
    share: float
    epitome: tuple[int, ...] | None = None
    starts: Starts = "separable"

    def spec(self, weight: tuple[int, ...]) -> EpitomeSpec | None:
        """All shapes; None for the dense layer."""
        return None if self.epitome is None else make_spec(weight, self.epitome, self.starts)


Ladder = tuple[Rung, ...]


def ladder(
    layer: Candidate, kind: BudgetKind, form: Form, axes: Axes, align: int, *, whole_starts: bool = False
) -> Ladder:
    """Rungs of strictly rising cost; the last one is the dense layer.

    A rung that costs as much as a larger one is dropped, so a ladder of one rung has nothing to offer.
    """
    dense = Rung(layer.params if kind == "params" else layer.madds, 1.0)
    price = partial(_cost, layer, kind, whole_starts=whole_starts)
    axis = _one_axis(layer, axes) if form == "partial" else None
    if axis is None:
        starts_of = partial(_starts, layer, kind=kind, form="separable" if form == "partial" else form)
        shapes = [(shape, starts_of(shape)) for shape in epitome_shapes(layer.shape, axes, align)]
        return _rising(dense, shapes, price)
    above = _rising(dense, [(shape, "partial") for shape in epitome_shapes(layer.shape, axis, align)], price)
    if axes != "auto":
        return above
    below = _rising(dense, [(shape, "separable") for shape in epitome_shapes(layer.shape, axes, align)], price)
    return _joined(layer.shape, below[:-1], above)


def _rising(
    dense: Rung, shapes: Sequence[tuple[tuple[int, ...], Starts]], price: Callable[[tuple[int, ...], Starts], int]
) -> Ladder:
    rungs, elements = [dense], prod(shapes[-1][0])
    for shape, starts in reversed(shapes):
        cost = price(shape, starts)
        if cost < rungs[-1].cost:
            rungs.append(Rung(cost, prod(shape) / elements, shape, starts))
    return tuple(reversed(rungs))


def _joined(weight: tuple[int, ...], below: Ladder, above: Ladder) -> Ladder:
    """Partial products as long as no separable starts on both axes keep more rank within the same budget, then those.

    On one axis that is cut too far all filters are nearly alike; and with two positions the additions can cost more
    than the products.
    """
    costs = [rung.cost for rung in below]
    kept = [above[-1]]
    for rung in reversed(above[:-1]):
        within = below[: bisect_left(costs, kept[-1].cost)]  # budgets that reach this rung and not the next
        if within and rank_of(weight, within[-1]) > rank_of(weight, rung):
            break
        kept.append(rung)
    last = kept[-1]
    return (*(rung for rung in below if rung.cost < last.cost and rung.share < last.share), *reversed(kept))


def _cost(
    layer: Candidate, kind: BudgetKind, epitome: tuple[int, ...], starts: Starts, *, whole_starts: bool = False
) -> int:
    if kind == "params":
        return epitome_params(layer.shape, epitome, starts)
    return fewest_madds(layer, epitome, starts, whole_starts=whole_starts)


def rank_of(weight: tuple[int, ...], rung: Rung) -> int:
    """`rank_bounds` of the rung's weight, many times faster; separable or partial starts."""
    (out, in_), taps = weight[:2], prod(weight[2:])
    filters, inputs = (out, in_) if rung.epitome is None else rung.epitome[:2]
    if rung.starts == "partial" and rung.epitome is not None and (filters, inputs) != (out, in_):
        axis = 0 if filters < out else 1
        length, size = weight[axis], rung.epitome[axis]
        own = length // size if length % size == 0 else length
        told = min(parts_of(weight, rung.epitome), own) * (size - 1) + 1
        filters, inputs = (told, in_) if axis == 0 else (out, told)
    return min(out, filters, min(in_, inputs) * taps)


def epitome_params(weight: tuple[int, ...], epitome: tuple[int, ...], starts: Starts) -> int:
    """Epitome and routing map of `make_spec(...)`, many times faster: a long ladder asks thousands of times."""
    (out, in_), (filters, inputs) = weight[:2], epitome[:2]
    if starts == "partial" and epitome[:2] != weight[:2]:
        axis = 0 if filters < out else 1
        return prod(epitome) + -(-weight[axis] // epitome[axis]) * parts_of(weight, epitome) * (epitome[axis] > 1)
    blocks_out, blocks_in = (out, in_) if starts == "fine" else (-(-out // filters), -(-in_ // inputs))
    grid = starts == "grid"
    has_out = 1 < filters < out
    has_in = inputs > 1 and (inputs < in_ or (grid and blocks_out > 1))
    per_out, per_in = (blocks_out * blocks_in,) * 2 if grid else (blocks_out, blocks_in)
    return prod(epitome) + has_out * per_out + has_in * per_in


def fewest_madds(layer: Candidate, epitome: tuple[int, ...], starts: Starts, *, whole_starts: bool = False) -> int:
    """`executed_madds` of `make_spec(...)`, likewise fast: the cheapest of folding, product map, wrapping and both."""
    if layer.own_forward or starts == "grid":
        return layer.madds
    (out, in_), (filters, inputs), at = layer.shape[:2], epitome[:2], layer.geometry
    if starts == "partial" and max(filters < out and filters, inputs < in_ and inputs) > 1:
        parts, between = parts_of(layer.shape, epitome), not whole_starts
        more = out * (2 * parts * between + parts - 1) * at.out_positions if filters < out else 0
        more += in_ * parts * (1 + between) * at.in_positions if inputs < in_ else 0
        return min(layer.madds, prod(epitome[:2]) * prod(layer.shape[2:]) * at.kernel_positions + more)
    lerps = 2 * out * (filters > 1 and not whole_starts) * at.out_repeats * at.out_positions
    sums = in_ * (1 + (inputs > 1 and not whole_starts)) * at.in_repeats * at.in_positions
    rows = [(out, 0), (filters * at.in_repeats, lerps)][: 1 + (filters < out and filters * at.in_repeats < out)]
    columns = [(in_, 0), (inputs * at.out_repeats, sums)][: 1 + (inputs < in_ and inputs * at.out_repeats < in_)]
    taps = prod(layer.shape[2:]) * at.kernel_positions
    return min(r * c * taps + more + extra for r, more in rows for c, extra in columns)


def executed_madds(layer: Candidate, spec: EpitomeSpec, between: Interpolated | None = None) -> int:
    """What the converted layer executes per sample; default: every start lies between two positions."""
    return layer.madds if layer.own_forward else best(spec, layer.geometry, between).operations.total


def epitome_shapes(weight: tuple[int, ...], axes: Axes, align: int) -> Iterator[tuple[int, ...]]:
    """Yield shapes of rising size; kernel axes are whole, channel axes whole or multiples of `align`.

    "auto" minds the rank of the weight: one cap for both channel axes, so the longer axis shrinks first, down to the
    shorter one, and from there both. "both" keeps the proportion of the two.
    """
    out, in_, *kernel = weight
    if axes == "out":
        pairs = [(size, in_) for size in _sizes(out, align)]
    elif axes == "in":
        pairs = [(out, size) for size in _sizes(in_, align)]
    elif axes == "auto":
        pairs = [(min(out, cap), min(in_, cap)) for cap in _sizes(max(out, in_), align)]
    else:
        longer = max(out, in_)
        pairs = [(_scaled(out, n, longer, align), _scaled(in_, n, longer, align)) for n in _sizes(longer, align)]
    for pair in dict.fromkeys(pairs):
        yield (*pair, *kernel)


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse a word that is none of the known ones."""
    if value not in known:
        hint = suggest(value, list(known)) if isinstance(value, str) else ""
        raise InputError(explain(f"{name} is not valid{hint}", expected=" | ".join(known), got=repr(value)))


def parts_of(weight: tuple[int, ...], epitome: tuple[int, ...]) -> int:
    """Blocks of the axis that is not shortened: as many as the dense weight's rank takes, 2 at least.

    Of S blocks the weight can have `S (size - 1) + 1` directions on the axis that is shortened, and of its own R whole
    blocks `R (size - 1) + 1` (`rank_bounds`). They divide it evenly, and are at most `MOST_PARTS`; 1 where it has no
    other divisor.
    """
    axis, taps = 0 if epitome[0] < weight[0] else 1, prod(weight[2:])
    wanted = min(weight[0], weight[1] * taps) if axis == 0 else min(weight[1], -(-weight[0] // taps))
    own = weight[axis] // epitome[axis] if weight[axis] % epitome[axis] == 0 else weight[axis]
    least = max(2, min(own, -(-(wanted - 1) // max(1, epitome[axis] - 1))))
    even = _even_parts(weight[1 - axis])
    return next((n for n in even if n >= least), even[-1])


def _one_axis(layer: Candidate, axes: Axes) -> Axes | None:
    """The axis with partial products; None where there are none: deployment would fold, or there would be one part.

    As long as nothing else is said, the longer axis where the kernel is 1x1. Larger kernels have full rank with few
    input channels, so the inputs take fewer parts, which are larger groups: faster, and as accurate
    (docs/strategies.md); not where they are less than half as many as the filters, and the ladder's steps coarse.
    An axis whose other one has no even parts gives way.
    """
    weight, at = layer.shape, layer.geometry
    if at.groups > 1 or at.transposed or at.flattened:
        return None
    if axes == "both":
        raise InputError(
            explain("partial products shorten one channel axis", expected="axes 'auto', 'out' or 'in'", got="'both'")
        )
    inputs = 2 * weight[1] >= weight[0] if prod(weight[2:]) > 1 else weight[1] > weight[0]
    order: tuple[Axes, ...] = (axes,) if axes != "auto" else ("in", "out") if inputs else ("out", "in")
    return next((axis for axis in order if len(_even_parts(weight[0 if axis == "in" else 1])) > 1), None)


def _even_parts(length: int) -> list[int]:
    return [n for n in range(1, MOST_PARTS + 1) if length % n == 0]


def _sizes(length: int, align: int) -> list[int]:
    return [*range(align, length, align), length]


def _scaled(length: int, numerator: int, denominator: int, align: int) -> int:
    """`length * numerator / denominator`, down to a multiple of `align` of at least one; whole from there on."""
    if numerator == denominator:
        return length
    return min(length, max(1, length * numerator // denominator // align) * align)


def _starts(layer: Candidate, epitome: tuple[int, ...], kind: BudgetKind, form: Form) -> Starts:
    """What has a start where it is not partial; starts per pair of blocks only where they buy something.

    Where the filters are whole or the epitome has one input channel, both forms generate the same weights; and with
    "auto", where the separable form already has the dense weight's rank, further starts would only cost.
    """
    if form in ("separable", "fine"):
        return form
    weight = layer.shape
    if form == "auto" and kind == "madds":
        return "separable"
    if epitome[0] >= weight[0] or epitome[1] == 1:
        return "separable"
    taps = prod(weight[2:])
    keeps_rank = min(epitome[0], epitome[1] * taps) >= min(weight[0], weight[1] * taps)
    return "separable" if form == "auto" and keeps_rank else "grid"


def make_spec(weight: tuple[int, ...], epitome: tuple[int, ...], starts: Starts) -> EpitomeSpec:
    """Shapes with blocks as long as the epitome's axes, or of one channel on those that are compressed."""
    if starts == "partial" and epitome[:2] != weight[:2]:
        (out, in_), parts = weight[:2], parts_of(weight, epitome)
        if epitome[0] < out:
            return EpitomeSpec(weight, epitome, epitome[0], in_ // parts, channel_starts="grid_out")
        return EpitomeSpec(weight, epitome, out // parts, epitome[1], channel_starts="grid_in")
    if starts != "fine":
        pairs: ChannelStarts = "grid" if starts == "grid" else "separable"
        return EpitomeSpec(weight, epitome, epitome[0], epitome[1], channel_starts=pairs)
    blocks = [1 if size < length else size for size, length in zip(epitome[:2], weight[:2], strict=True)]
    return EpitomeSpec(weight, epitome, blocks[0], blocks[1])
