"""Cost of one epitome layer as formulas in whole numbers. No torch.

Units: parameters are elements; one multiply-add (MAdd) counts 1, per sample, batch norm merged and without
bias. A pure addition and each multiply of an interpolation count as one operation: a lerp of two channels is
2, an addition 1.

Axes are semantic, as in `EpitomeSpec`. Of a convolution the weight's filter axis holds all groups and its
input axis is repeated by each group; of a transposed convolution it is the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, get_args

from epitorch.cost.diagonals import DiagonalLayout, map_additions, map_rows, response_total
from epitorch.spec import EpitomeSpec

Strategy = Literal[
    "product_map",
    "wrapping",
    "both",
    "diagonals",
    "integral",
    "wrapped_diagonals",
    "wrapped_integral",
    "folded",
]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""A closed list, in the order of preference where operations are equal; folding stands last.

The two ending in "diagonals" and "integral" make product positions and sum them along diagonals, tap by tap or by
the integral map; "wrapped" ones wrap the input channels first.
"""

ON_DIAGONALS: frozenset[Strategy] = frozenset({"diagonals", "integral", "wrapped_diagonals", "wrapped_integral"})
INTEGRAL: frozenset[Strategy] = frozenset({"integral", "wrapped_integral"})
WRAPPED: frozenset[Strategy] = frozenset({"wrapping", "both", "wrapped_diagonals", "wrapped_integral"})
EXPANDED: frozenset[Strategy] = frozenset({"product_map", "both"})

Kind = Literal["convolution", "linear", "matrix product", "attention", "interpolation"]
KINDS: tuple[Kind, ...] = ("convolution", "linear", "matrix product", "attention", "interpolation")
"""Kinds of operation in `Cost.by_kind`. Interpolation is the reuse's lerps and additions."""

Reason = Literal[
    "fewest operations",
    "asked for",
    "axis not compressed",
    "groups need as many channels as the layer has",
    "spatial starts on input blocks",
    "spatial starts on output blocks",
    "spatial starts on pairs of blocks",
    "channel starts on pairs of blocks",
    "blocks of unequal length",
    "flattened kernel mixes channels and space",
    "no spatial starts",
    "stride of a transposed convolution",
    "no saving",
    "not run by the example input",
    "a forward of its own",
    "fastest here",
    "smallest that is fast enough",
    "nothing is faster than folding",
    "part of the fastest network",
    "cost model",
]
"""Why a layer runs as it does, or why a strategy was declined. A closed list."""

NO_NEED: frozenset[Reason] = frozenset({"axis not compressed", "no spatial starts"})
"""Reasons that name no obstacle: there is nothing to reuse."""


@dataclass(frozen=True)
class Geometry:
    """What the weight's shape does not tell.

    Args:
        in_positions: Spatial positions of the input (linear layers: rows), per sample, summed over all calls.
        out_positions: The same of the output.
        groups: Groups of the convolution.
        transposed: The layer is a transposed convolution.
        flattened: The weight is generated as a matrix (`flatten_kernel`).
        read_positions: Positions of the padded input from the first to the last that the outputs read, at stride 1;
            None: as many as the input has.
        strided: A stride is above 1.
    """

    in_positions: int
    out_positions: int
    groups: int = 1
    transposed: bool = False
    flattened: bool = False
    read_positions: int | None = None
    strided: bool = False

    @property
    def kernel_positions(self) -> int:
        """Positions at which the whole kernel is applied: outputs, or inputs of a transposed convolution."""
        return self.in_positions if self.transposed else self.out_positions

    @property
    def out_repeats(self) -> int:
        """How often the layer's channels repeat the weight's filter axis."""
        return self.groups if self.transposed else 1

    @property
    def in_repeats(self) -> int:
        """How often the layer's channels repeat the weight's input axis."""
        return 1 if self.transposed else self.groups


@dataclass(frozen=True)
class Operations:
    """Operations per sample.

    Args:
        multiply_adds: Of the convolution or matrix product.
        interpolation: Lerps and additions around it.
    """

    multiply_adds: int
    interpolation: int = 0

    @property
    def total(self) -> int:
        """What the layer executes."""
        return self.multiply_adds + self.interpolation


class Interpolated(NamedTuple):
    """What lies between two positions; the rest is copied or added.

    Args:
        out_channels: Channels of the weight's filter axis whose start does; with starts per pair of blocks in each of
            the input blocks.
        in_channels: The same of its input axis, in each of the output blocks.
        out_blocks: By output block, whether its channel start does; empty: all.
        axes: Spatial axes on which any start does; None: all that have starts.
    """

    out_channels: int
    in_channels: int
    out_blocks: tuple[bool, ...] = ()
    axes: int | None = None


@dataclass(frozen=True)
class Choice:
    """How one layer runs, and why not otherwise; seconds of one pass where they were measured."""

    strategy: Strategy
    operations: Operations
    reason: Reason
    declined: tuple[tuple[Strategy, Reason], ...] = ()
    seconds: tuple[tuple[Strategy, float], ...] = ()


@dataclass(frozen=True)
class LayerParams:
    """Parameters of one layer by kind."""

    epitome: int
    routing: int
    other: int

    @property
    def total(self) -> int:
        """All that inference keeps."""
        return self.epitome + self.routing + self.other


def parameters(spec: EpitomeSpec, bias: int = 0) -> LayerParams:
    """Parameters of an epitome layer: `prod(O, I, *L)`, the number of starts, and the bias.

    In the paper's 2-D setting this is the denominator of its Eq. (2d compress),
    `W^E H^E C_in^E C_out^E + 3 R_cin + R_cout`.
    """
    return LayerParams(spec.num_epitome, spec.num_starts, bias)


def interpolated_channels(length: int, block: int, fractional: Sequence[bool]) -> int:
    """Channels of an axis of `length` in the blocks whose start is not a whole position."""
    return sum(min(block, length - r * block) for r, between in enumerate(fractional) if between)


def all_interpolated(spec: EpitomeSpec) -> Interpolated:
    """The usual case: every start that exists lies between two positions."""
    return Interpolated(
        spec.weight_shape[0] * input_parts(spec) if spec.has_out_starts else 0,
        spec.weight_shape[1] * output_parts(spec) if spec.has_in_starts else 0,
    )


def input_parts(spec: EpitomeSpec) -> int:
    """Product maps that are added up for a filter: one for each input block where each has a start on the filters."""
    return spec.num_in_blocks if spec.has_out_starts and spec.owners("out") == "grid" else 1


def output_parts(spec: EpitomeSpec) -> int:
    """Ways to wrap the input: one for each output block where each has a start on the input channels."""
    return spec.num_out_blocks if spec.has_in_starts and spec.owners("in") == "grid" else 1


def dense_madds(spec: EpitomeSpec, geometry: Geometry) -> int:
    """Multiply-adds of the plain layer with the generated weight."""
    return spec.num_weight * geometry.kernel_positions


def paper_madds(spec: EpitomeSpec, geometry: Geometry) -> int:
    """The paper's "Reduced MAdd" in multiply-adds, rounded up.

        ((2 I L - 1) T O  +  T L O  +  2 R_in T' beta_1  +  2 R_out T beta_2) / 2

    with L = prod of the epitome's window, T and T' the positions of output and input. Departures from the
    print: it counts a multiply-add as 2, so the sum is halved; its last term lacks W*H (here T); its first
    term has C_in where its own ratio has C_in^E (here I), which is what wrapping leaves. The last two terms
    stand only for an axis that is compressed: the others are not sampled. The paper has no groups: here an
    axis that all groups share counts once for each of them, but never more than the layer has.
    """
    (out, in_), (filters, inputs) = spec.weight_shape[:2], spec.epitome_shape[:2]
    convolved = min(out, filters * geometry.in_repeats)
    gathered = min(in_, inputs * geometry.out_repeats)
    window, positions = prod(spec.window), geometry.kernel_positions
    doubled = (2 * gathered * window - 1) * positions * convolved + positions * window * convolved
    if inputs < in_:
        doubled += 2 * spec.num_in_blocks * spec.block_in * geometry.in_repeats * geometry.in_positions
    if filters < out:
        doubled += 2 * spec.num_out_blocks * spec.block_out * geometry.out_repeats * geometry.out_positions
    return (doubled + 1) // 2


def executed(
    spec: EpitomeSpec, geometry: Geometry, strategy: Strategy, interpolated: Interpolated | None = None
) -> Operations:
    """What a deployed layer executes under a strategy (method section 5), per sample.

    The product map convolves with O filters; then each output channel is a lerp of two channels (2
    operations) or, where its start is a whole position, a copy (0). Wrapping convolves I channels; before
    that each input channel is added to two epitome channels with their shares (2 multiply-adds) or to one (1
    addition). With `channel_starts="grid_out"` each input block has a product map with its part of the O filters, and
    each output channel is their sum; with "grid_in" each output block convolves inputs that are wrapped its own way.

    Diagonals and integral map multiply every input position with every position of the epitome's window, and read
    sums at the output positions (`cost.diagonals`); then each output channel is a lerp of two rows.

    Args:
        spec: The shapes.
        geometry: Positions, groups and kind of layer.
        strategy: One of `STRATEGIES`; it is not checked here that it applies (`why_not`).
        interpolated: What has fractional starts; default all.
    """
    between = all_interpolated(spec) if interpolated is None else interpolated
    if strategy in ON_DIAGONALS:
        return _on_diagonals(spec, geometry, strategy, between)
    (out, in_), (filters, inputs) = spec.weight_shape[:2], spec.epitome_shape[:2]
    taps = prod(spec.weight_shape[2:])
    interpolation = 0
    if strategy in EXPANDED:
        out = filters * geometry.in_repeats
        interpolation += _expansion(geometry, between)
        interpolation += (input_parts(spec) - 1) * spec.weight_shape[0] * geometry.out_positions
    if strategy in WRAPPED:
        in_ = inputs * geometry.out_repeats
        interpolation += _wrapping(spec, geometry, between)
    return Operations(out * in_ * taps * geometry.kernel_positions, interpolation)


def _expansion(geometry: Geometry, between: Interpolated) -> int:
    return 2 * between.out_channels * geometry.out_repeats * geometry.out_positions


def _wrapping(spec: EpitomeSpec, geometry: Geometry, between: Interpolated) -> int:
    added = spec.weight_shape[1] * output_parts(spec)
    return (added + between.in_channels) * geometry.in_repeats * geometry.in_positions


def _on_diagonals(spec: EpitomeSpec, geometry: Geometry, strategy: Strategy, between: Interpolated) -> Operations:
    wrapped, integral = strategy in WRAPPED, strategy in INTEGRAL
    layout = DiagonalLayout(spec, geometry.groups, geometry.transposed, wrapped)
    rows = layout.rows_per_group * geometry.groups
    products = rows * layout.inputs_per_group * prod(spec.window) * geometry.in_positions
    out_blocks = between.out_blocks or (spec.has_out_starts,) * spec.num_out_blocks
    axes = len(spec.spatial_axes) if between.axes is None else between.axes
    interpolation = response_total(layout, integral, out_blocks, axes) * geometry.out_positions
    interpolation += _expansion(geometry, between)
    if integral:
        read = geometry.in_positions if geometry.read_positions is None else geometry.read_positions
        interpolation += map_rows(layout) * map_additions(spec.kernel, spec.window) * read
    if wrapped:
        interpolation += _wrapping(spec, geometry, between)
    return Operations(products, interpolation)


def _owners(spec: EpitomeSpec) -> int:
    """Blocks, or pairs of blocks, with spatial starts of their own; 1 where there are none or one for all."""
    return prod(spec.start_shapes.get("spatial", (1,))[:-1])


def why_not(spec: EpitomeSpec, geometry: Geometry, strategy: Strategy) -> Reason | None:
    """The reason why a strategy does not apply, by the table of method section 5; None if it does."""
    if strategy == "folded":
        return None
    if strategy == "both":
        return why_not(spec, geometry, "product_map") or why_not(spec, geometry, "wrapping")
    if strategy in ON_DIAGONALS:
        hindered = _diagonal_obstacle(spec, geometry)
        return hindered or (why_not(spec, geometry, "wrapping") if strategy in WRAPPED else None)
    axis, repeats = (0, geometry.in_repeats) if strategy == "product_map" else (1, geometry.out_repeats)
    if spec.epitome_shape[axis] >= spec.weight_shape[axis]:
        return "axis not compressed"
    if spec.epitome_shape[axis] * repeats >= spec.weight_shape[axis]:
        return "groups need as many channels as the layer has"
    if spec.channel_starts != "separable":
        hindered = _pairs_obstacle(spec, geometry, axis)
        if hindered is not None:
            return hindered
    if geometry.flattened and (strategy == "wrapping" or spec.channel_starts != "separable"):
        return "flattened kernel mixes channels and space"
    return _spatial_obstacle(spec, strategy)


def _pairs_obstacle(spec: EpitomeSpec, geometry: Geometry, axis: int) -> Reason | None:
    """Partial products are shared where only the reused axis has a start per pair, in plain layers of one group."""
    if spec.channel_starts != ("grid_out", "grid_in")[axis] or geometry.groups > 1 or geometry.transposed:
        return "channel starts on pairs of blocks"
    other, block = (spec.weight_shape[1], spec.block_in) if axis == 0 else (spec.weight_shape[0], spec.block_out)
    return "blocks of unequal length" if other % block else None


def _spatial_obstacle(spec: EpitomeSpec, strategy: Strategy) -> Reason | None:
    """Spatial starts hinder an axis if they differ between its blocks."""
    if _owners(spec) == 1:
        return None
    if spec.spatial_starts == "grid":
        return "spatial starts on pairs of blocks"
    if spec.spatial_starts == "out":
        return "spatial starts on output blocks" if strategy == "product_map" else None
    return "spatial starts on input blocks" if strategy == "wrapping" else None


def _diagonal_obstacle(spec: EpitomeSpec, geometry: Geometry) -> Reason | None:
    """Without spatial starts there is nothing to share along space, unless the window has another size."""
    if geometry.flattened:
        return "flattened kernel mixes channels and space"
    if not spec.spatial_axes and spec.kernel == spec.window:
        return "no spatial starts"
    if spec.channel_starts != "separable":
        return "channel starts on pairs of blocks"
    return "stride of a transposed convolution" if geometry.transposed and geometry.strided else None


def best(spec: EpitomeSpec, geometry: Geometry, interpolated: Interpolated | None = None) -> Choice:
    """The strategy that executes the fewest operations; folded where none applies or none saves."""
    declined: list[tuple[Strategy, Reason]] = []
    options: list[tuple[Strategy, Operations]] = []
    for strategy in STRATEGIES[:-1]:
        reason = why_not(spec, geometry, strategy)
        if reason is None:
            options.append((strategy, executed(spec, geometry, strategy, interpolated)))
        else:
            declined.append((strategy, reason))
    dense = executed(spec, geometry, "folded")
    strategy, operations = min(options, key=lambda option: option[1].total, default=("folded", dense))
    if geometry.kernel_positions == 0:
        return Choice("folded", dense, "not run by the example input", tuple(declined))
    if operations.total < dense.total:
        return Choice(strategy, operations, "fewest operations", tuple(declined))
    folded: Reason = "no saving" if options else _main_reason([reason for _, reason in declined])
    return Choice("folded", dense, folded, tuple(declined))


def _main_reason(reasons: list[Reason]) -> Reason:
    """An axis that needs no reuse explains little as long as another has an obstacle of its own."""
    obstacles = [reason for reason in reasons if reason not in NO_NEED]
    return obstacles[0] if obstacles else "axis not compressed"
