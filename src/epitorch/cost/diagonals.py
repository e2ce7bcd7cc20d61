"""Product positions and diagonals: which parts of a layer read which sums, and how many operations that takes.

Method section 5: `P[t, l] = <x_t, E_l>` for every position t of the input and every position l of the epitome's
window; a filter's response is the sum along the diagonal `P[t + k d, p + k]`, taken tap by tap ("diagonals") or as a
difference of entries of the integral map ("integral"). No torch: the deployed layer and the formulas share this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from epitorch.spec import EpitomeSpec


@dataclass(frozen=True)
class ProductMap:
    """One product of input channels with all filters of some groups; spatial starts do not change inside of it.

    Args:
        first_group: First group whose filters it serves.
        groups: How many.
        block: Input block that owns its spatial starts; 0 where input blocks own none.
        column: First input channel within its group.
        length: Input channels of each group.
    """

    first_group: int
    groups: int
    block: int
    column: int
    length: int


@dataclass(frozen=True)
class Segment:
    """Consecutive output channels whose diagonals begin at the same place of the window.

    Args:
        first_group: Group of its first channel.
        groups: How many groups it spans.
        block: Output block that owns its spatial starts; 0 where output blocks own none.
        channel: First output channel of the layer.
        length: How many channels.
    """

    first_group: int
    groups: int
    block: int
    channel: int
    length: int

    def reads(self, product_map: ProductMap) -> bool:
        """Whether this map has the segment's groups."""
        first, last = product_map.first_group, product_map.first_group + product_map.groups
        return first <= self.first_group and self.first_group + self.groups <= last


@dataclass(frozen=True)
class DiagonalLayout:
    """How a layer is cut for sums along diagonals.

    Args:
        spec: The shapes; with spatial axes.
        groups: Groups of the convolution.
        transposed: The layer is a transposed convolution.
        wrapped: Input channels are wrapped first.
    """

    spec: EpitomeSpec
    groups: int = 1
    transposed: bool = False
    wrapped: bool = False

    @property
    def compressed(self) -> bool:
        """Whether filters share rows; otherwise each filter has its own row, its index being the identity."""
        return self.spec.epitome_shape[0] < self.spec.weight_shape[0]

    @property
    def filters_per_group(self) -> int:
        """Output channels of a group."""
        out = self.spec.weight_shape[0]
        return out if self.transposed else out // self.groups

    @property
    def rows_per_group(self) -> int:
        """Filters that the product of a group is made with."""
        return self.spec.epitome_shape[0] if self.compressed else self.filters_per_group

    @property
    def inputs_per_group(self) -> int:
        """Input channels of a group, after wrapping."""
        if self.wrapped:
            return self.spec.epitome_shape[1]
        in_ = self.spec.weight_shape[1]
        return in_ // self.groups if self.transposed else in_

    @property
    def by_output(self) -> bool:
        """Whether spatial starts differ between output blocks."""
        return self._owned("out") and self.spec.num_out_blocks > 1

    @property
    def by_input(self) -> bool:
        """Whether spatial starts differ between input blocks."""
        return self._owned("in") and self.spec.num_in_blocks > 1

    def _owned(self, axis: str) -> bool:
        return bool(self.spec.spatial_axes) and self.spec.spatial_starts in (axis, "grid")

    def owner(self, segment: Segment, product_map: ProductMap) -> int:
        """Row of the spatial starts, all owners in one line."""
        if self.spec.spatial_starts == "grid":
            return segment.block * self.spec.num_in_blocks + product_map.block
        return segment.block if self.spec.spatial_starts == "out" else product_map.block

    def maps(self) -> tuple[ProductMap, ...]:
        """One for all inputs, or one per input block (cut at the groups of a transposed convolution)."""
        width, block = self.inputs_per_group, self.spec.block_in
        if not self.by_input:
            return (ProductMap(0, self.groups, 0, 0, width),)
        if not self.transposed:
            return tuple(ProductMap(0, self.groups, a // block, a, b - a) for a, b in _pieces(0, width, block))
        return tuple(
            ProductMap(group, 1, a // block, a - group * width, b - a)
            for group in range(self.groups)
            for a, b in _pieces(group * width, (group + 1) * width, block)
        )

    def segments(self) -> tuple[Segment, ...]:
        """One for all outputs, or one per output block and group that it lies in."""
        width = self.filters_per_group
        if not self.by_output and not (self.transposed and self.by_input):
            return (Segment(0, self.groups, 0, 0, self.groups * width),)
        block = self.spec.block_out if self.by_output else self.spec.weight_shape[0]
        found = []
        for group in range(self.groups):
            first = 0 if self.transposed else group * width
            for a, b in _pieces(first, first + width, block):
                owner = a // block if self.by_output else 0
                found.append(Segment(group, 1, owner, group * width + a - first, b - a))
        return tuple(found)

    def rows_read(self, segment: Segment, between: bool) -> int:
        """Rows whose responses a segment needs: a start between two positions reads the upper neighbours too."""
        if not self.by_output:
            return segment.groups * self.rows_per_group
        if not (self.compressed and between):
            return min(segment.length, self.rows_per_group)
        size, step = self.spec.epitome_shape[0], self.spec.group_length
        return len({(n + shift) % size for n in range(segment.length) for shift in (0, step)})


def response_operations(kernel: tuple[int, ...], integral: bool, between: int) -> int:
    """Operations of one response.

    It reads prod(K) taps, or 2^d entries of the integral map (axes of length 1 not counted); each interpolated axis
    (any start on it lies between two positions) doubles that, and a lerp (2 operations) joins the two.

    Args:
        kernel: K.
        integral: From the integral map.
        between: Axes that are interpolated.
    """
    reads = 2 ** sum(k > 1 for k in kernel) if integral else prod(kernel)
    return 2**between * (reads - 1) + 2 * (2**between - 1)


def map_additions(kernel: tuple[int, ...], window: tuple[int, ...]) -> int:
    """Additions of the integral map per row and position: one axis after the other, extended by K - 1 positions.

    Axis by axis takes one addition per entry and axis; the recurrence of method section 5 in 2-D takes three.
    """
    extended = [size + k - 1 for k, size in zip(kernel, window, strict=True)]
    axes = range(len(kernel))
    return sum((extended[j] - 1) * prod(extended[:j]) * prod(window[j + 1 :]) for j in axes if kernel[j] > 1)


def response_total(layout: DiagonalLayout, integral: bool, out_between: tuple[bool, ...], axes: int) -> int:
    """Operations of all responses at one output position, the sum over input blocks included.

    Args:
        layout: The layer.
        integral: From the integral map.
        out_between: By output block, whether its channel start lies between two positions.
        axes: Spatial axes that are interpolated.
    """
    maps, total = layout.maps(), 0
    each = response_operations(layout.spec.kernel, integral, axes)
    for segment in layout.segments():
        read = sum(segment.reads(m) for m in maps)
        total += layout.rows_read(segment, out_between[segment.block]) * (read * each + read - 1)
    return total


def map_rows(layout: DiagonalLayout) -> int:
    """Rows of all product maps together."""
    return sum(m.groups * layout.rows_per_group for m in layout.maps())


def _pieces(start: int, stop: int, period: int) -> Iterator[tuple[int, int]]:
    """Cut `start .. stop` at the multiples of `period`."""
    while start < stop:
        end = min(stop, (start // period + 1) * period)
        yield start, end
        start = end
