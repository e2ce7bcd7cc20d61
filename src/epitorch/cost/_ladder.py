"""Ladders: the epitome shapes that a layer may have, from the smallest to the whole weight. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from epitorch.cost._survey import Candidate
from epitorch.cost.formulas import Interpolated, best
from epitorch.errors import InputError, explain, suggest
from epitorch.plans import BudgetKind
from epitorch.spec import EpitomeSpec

Starts = Literal["separable", "grid", "fine"]
"""Per block as long as the epitome's axis, per pair of such blocks, or per channel."""
Form = Literal["auto", "separable", "grid", "fine"]
Axes = Literal["auto", "out", "in", "both"]
FORMS: tuple[str, ...] = ("auto", "separable", "grid", "fine")
AXES: tuple[str, ...] = ("auto", "out", "in", "both")


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
    shapes = list(epitome_shapes(layer.shape, axes, align))
    rungs = [dense]
    elements = prod(layer.shape)
    for shape in reversed(shapes):
        starts = _starts(layer.shape, shape, kind, form)
        if kind == "params":
            cost = epitome_params(layer.shape, shape, starts)
        else:
            cost = fewest_madds(layer, shape, starts, whole_starts=whole_starts)
        if cost < rungs[-1].cost:
            rungs.append(Rung(cost, prod(shape) / elements, shape, starts))
    return tuple(reversed(rungs))


def epitome_params(weight: tuple[int, ...], epitome: tuple[int, ...], starts: Starts) -> int:
    """Epitome and routing map of `make_spec(...)`, many times faster: a long ladder asks thousands of times."""
    (out, in_), (filters, inputs) = weight[:2], epitome[:2]
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


def _sizes(length: int, align: int) -> list[int]:
    return [*range(align, length, align), length]


def _scaled(length: int, numerator: int, denominator: int, align: int) -> int:
    """`length * numerator / denominator`, down to a multiple of `align` of at least one; whole from there on."""
    if numerator == denominator:
        return length
    return min(length, max(1, length * numerator // denominator // align) * align)


def _starts(weight: tuple[int, ...], epitome: tuple[int, ...], kind: BudgetKind, form: Form) -> Starts:
    """What has a start; starts per pair of blocks only where they buy something.

    Where the filters are whole or the epitome has one input channel, both forms generate the same weights; and with
    "auto", where the separable form already has the dense weight's rank, further starts would only cost.
    """
    if form in ("separable", "fine"):
        return form
    if form == "auto" and kind == "madds":
        return "separable"
    if epitome[0] >= weight[0] or epitome[1] == 1:
        return "separable"
    taps = prod(weight[2:])
    keeps_rank = min(epitome[0], epitome[1] * taps) >= min(weight[0], weight[1] * taps)
    return "separable" if form == "auto" and keeps_rank else "grid"


def make_spec(weight: tuple[int, ...], epitome: tuple[int, ...], starts: Starts) -> EpitomeSpec:
    """Shapes with blocks as long as the epitome's axes, or of one channel on those that are compressed."""
    if starts != "fine":
        return EpitomeSpec(weight, epitome, epitome[0], epitome[1], channel_starts=starts)
    blocks = [1 if size < length else size for size, length in zip(epitome[:2], weight[:2], strict=True)]
    return EpitomeSpec(weight, epitome, blocks[0], blocks[1])
