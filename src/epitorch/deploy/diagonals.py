"""How a layer runs on product positions: its kernel, which rows its outputs read, where their diagonals begin."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epitorch.cost.diagonals import DiagonalLayout, ProductMap
from epitorch.deploy._mixing import Run, Runs
from epitorch.deploy.integral import (
    Reach,
    Tap,
    diagonal_taps,
    integral_map,
    integral_sizes,
    integral_taps,
    responses,
    tap_index,
)
from epitorch.errors import ShapeError, explain
from epitorch.functional import sample_weight, split_starts
from epitorch.spec import Axis

_CONV = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Beginnings:
    """Where diagonals begin in the window.

    Args:
        lower: Whole positions, shape (owners, d).
        upper: Their neighbours.
        fraction: Shares of the upper neighbours, float64.
    """

    lower: Tensor
    upper: Tensor
    fraction: Tensor

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes that are interpolated: any start on them lies between two positions."""
        return tuple(axis for axis, share in enumerate(self.fraction.unbind(1)) if share.any())


@dataclass(frozen=True)
class Reads:
    """Which rows the outputs read; no tensors.

    Args:
        layout: How the layer is cut.
        rows: For each segment.
        runs: How the output channels mix the rows read, those of all segments side by side.
    """

    layout: DiagonalLayout
    rows: tuple[tuple[int, ...], ...]
    runs: Runs

    def of(self, served: ProductMap) -> list[tuple[int, int]]:
        """For each response that a product map gives: row within the map, and owner of its spatial starts."""
        first = served.first_group * self.layout.rows_per_group
        pairs = zip(self.layout.segments(), self.rows, strict=True)
        return [
            (row - first, self.layout.owner(segment, served))
            for segment, rows in pairs
            if segment.reads(served)
            for row in rows
        ]


@dataclass(frozen=True)
class Entries:
    """What the responses read, those of all product maps side by side (`integral.responses`).

    Args:
        index: Shape (2^j, taps, R).
        shares: Shape (j, R).
        widths: Responses of each map; their sum is R.
    """

    index: Tensor
    shares: Tensor
    widths: tuple[int, ...]


def reads_of(layout: DiagonalLayout, runs: Runs) -> Reads:
    """Work out which rows every segment reads.

    Args:
        layout: How the layer is cut.
        runs: How the output channels mix all rows, in the order of the channels.
    """
    width, channels = layout.rows_per_group, [run.channel for run in runs]
    found: list[tuple[int, ...]] = []
    mixed: list[Run] = []
    for segment in layout.segments():
        last = segment.channel + segment.length
        near = runs[bisect_right(channels, segment.channel) - 1 : bisect_left(channels, last)]
        own = [_cut(run, segment.channel, last) for run in near]
        every = range(segment.first_group * width, (segment.first_group + segment.groups) * width)
        rows = tuple(sorted({row for run in own for row in _rows_of(run)}) if layout.by_output else every)
        before = sum(map(len, found))
        local = {row: before + n for n, row in enumerate(rows)}
        for run in own:
            moved = replace(run, lower=local[run.lower], upper=local[run.upper] if run.fraction else 0)
            if mixed and mixed[-1].continued_by(moved.lower, moved.upper, moved.fraction):
                moved = replace(mixed[-1], length=mixed.pop().length + moved.length)
            mixed.append(moved)
        found.append(rows)
    return Reads(layout, tuple(found), tuple(mixed))


def _cut(run: Run, first: int, last: int) -> Run:
    """The part of a run that makes the channels from first to last."""
    start, stop = max(run.channel, first), min(run.channel + run.length, last)
    skip = start - run.channel
    return Run(start, run.lower + skip, run.upper + skip, stop - start, run.fraction)


def _rows_of(run: Run) -> set[int]:
    lower = set(range(run.lower, run.lower + run.length))
    return lower | set(range(run.upper, run.upper + run.length)) if run.fraction else lower


def entries_of(reads: Reads, start: Beginnings, integral: bool) -> Entries:
    """Work out which entries of the products, or of the integral map, every response reads.

    Args:
        reads: From `reads_of`.
        start: By owner of spatial starts.
        integral: From the integral map.
    """
    spec = reads.layout.spec
    each = [reads.of(served) for served in reads.layout.maps()]
    rows, owners = torch.tensor([pair for pairs in each for pair in pairs]).unbind(1)
    ones = (1,) * len(spec.kernel)
    taps = taps_of(Reach(spec.kernel, ones, ones, ones), integral)  # only the steps matter here
    sizes = integral_sizes(spec.kernel, spec.window) if integral else spec.window
    index = []
    for corner in product(*((False, True) if axis in start.axes else (False,) for axis in range(len(ones)))):
        begin = torch.where(torch.tensor(corner), start.upper, start.lower)
        index.append(tap_index(rows, begin[owners], taps, sizes))
    shares = start.fraction[owners][:, list(start.axes)].T.contiguous()
    return Entries(torch.stack(index), shares, tuple(map(len, each)))


def taps_of(reach: Reach, integral: bool) -> tuple[Tap, ...]:
    """What one response takes."""
    return integral_taps(reach) if integral else diagonal_taps(reach)


@dataclass(frozen=True)
class Products:
    """Makes product positions, or the integral map; no tensors.

    Args:
        layout: How the layer is cut.
        reach: What the outputs read.
        padding: As `F.pad` takes it, over space.
        mode: Of `F.pad`.
        integral: Make the integral map.
    """

    layout: DiagonalLayout
    reach: Reach
    padding: tuple[int, ...]
    mode: str
    integral: bool

    def responses(self, features: Tensor, kernel: Tensor, entries: Entries) -> Tensor:
        """Responses of all segments, summed over the product maps.

        Args:
            features: Shape (N, C, *space), wrapped already if the layout says so.
            kernel: From `product_kernel`.
            entries: From `entries_of`, on the features' device.

        Returns:
            Shape (N, rows read, *sizes), in the products' dtype.
        """
        totals: dict[int, Tensor] = {}
        taps = taps_of(self.reach, self.integral)
        parts = zip(entries.index.split(entries.widths, -1), entries.shares.split(entries.widths, -1), strict=True)
        for served, (index, shares) in zip(self.layout.maps(), parts, strict=True):
            positions = self._positions(features, kernel, served)
            found = responses(self._source(positions, served), index, shares, taps, self.reach)
            key = served.first_group
            totals[key] = totals[key].add_(found) if key in totals else found
        return torch.cat(list(totals.values()), 1).to(positions.dtype)

    def _positions(self, features: Tensor, kernel: Tensor, served: ProductMap) -> Tensor:
        """One map, shape (N, rows * prod(L), *T); pointwise, so padding the products is padding the input."""
        layout, dims = self.layout, features.dim() - 2
        inputs = features.unflatten(1, (layout.groups, layout.inputs_per_group))
        inputs = inputs.narrow(1, served.first_group, served.groups).narrow(2, served.column, served.length)
        rows = kernel.unflatten(0, (layout.groups, -1)).narrow(0, served.first_group, served.groups)
        weight = rows.flatten(0, 1).narrow(1, served.column, served.length)
        weight = weight.reshape(*weight.shape, *[1] * dims)
        positions = _CONV[dims - 1](inputs.flatten(1, 2), weight, groups=served.groups)
        return F.pad(positions, self.padding, mode=self.mode) if any(self.padding) else positions

    def _source(self, positions: Tensor, served: ProductMap) -> Tensor:
        """What the responses are read from, rows and window in one axis."""
        if not self.integral:
            return positions
        dims = len(self.reach.kernel)
        for dim, size in zip(range(-dims, 0), self.reach.span, strict=True):
            positions = positions.narrow(dim, 0, size)
        rows = served.groups * self.layout.rows_per_group
        sums = integral_map(positions.unflatten(1, (rows, *self.layout.spec.window)), self.reach)
        return sums.flatten(1, 1 + dims)


def reach_of(layer: Any, input: Tensor, padding: list[int]) -> Reach:
    """What a layer's outputs read.

    Args:
        layer: With torch's attributes of a convolution.
        input: Shape (N, C_in, *space) or (C_in, *space).
        padding: As `F.pad` takes it.

    Raises:
        ShapeError: If the input has other channels, or no space for one output.
    """
    dims = len(layer.kernel_size)
    stride = (1,) * dims if layer.transposed else layer.stride
    sizes = []
    for k, size in enumerate(input.shape[-dims:]):
        before, after = padding[2 * (dims - 1 - k) :][:2]
        reached = size + before + after - layer.dilation[k] * (layer.kernel_size[k] - 1) - 1
        sizes.append(reached // stride[k] + 1)
    channels = input.shape[-1 - dims] if input.dim() in (dims + 1, dims + 2) else None
    if channels != layer.in_channels or min(sizes) < 1:
        raise ShapeError(
            explain(
                "the input does not fit the layer",
                expected=f"{layer.in_channels} channels, and space for a kernel of {layer.kernel_size}",
                got=tuple(input.shape),
                where=type(layer).__name__,
            )
        )
    return Reach(layer.kernel_size, layer.dilation, stride, tuple(sizes))


def beginnings(layout: DiagonalLayout, starts: Mapping[Axis, Tensor]) -> Beginnings:
    """One for each owner of spatial starts, all owners in one line.

    In a transposed convolution the diagonals run t - k: read backwards they begin at their end, in a window that is
    turned round (`product_kernel`), and the upper neighbour lies one position before.
    """
    spec = layout.spec
    lower = torch.zeros(1, len(spec.kernel), dtype=torch.long)
    fraction = torch.zeros(1, len(spec.kernel), dtype=torch.float64)
    if "spatial" in starts:
        values = starts["spatial"].detach().cpu().flatten(0, -2)
        lower, fraction = lower.repeat(len(values), 1), fraction.repeat(len(values), 1)
        for column, axis in enumerate(spec.spatial_axes):
            shift = split_starts(values[:, column], spec.window[axis])
            lower[:, axis], fraction[:, axis] = shift.base, shift.fraction
    window, step = torch.tensor(spec.window), -1 if layout.transposed else 1
    if layout.transposed:
        lower = window - torch.tensor(spec.kernel) - lower
    return Beginnings(lower.remainder(window), (lower + step).remainder(window), fraction)


def product_kernel(epitome: Tensor, starts: Mapping[Axis, Tensor], layout: DiagonalLayout) -> Tensor:
    """The weight of the pointwise product: E with its window unrolled, sampled along the input channels only.

    Args:
        epitome: Shape (O, I, *L), semantic.
        starts: In positions; spatial ones are not used.
        layout: The layer.

    Returns:
        Shape (groups * rows * prod(L), inputs per group), filters before positions.
    """
    spec, groups = layout.spec, layout.groups
    filters, inputs = spec.epitome_shape[:2]
    out = filters if layout.compressed else spec.weight_shape[0]
    in_ = inputs if layout.wrapped else spec.weight_shape[1]
    flat = replace(
        spec,
        weight_shape=(out, in_, *spec.window),
        block_out=filters if layout.compressed else spec.block_out,
        block_in=inputs if layout.wrapped else spec.block_in,
        spatial_shift=False,
    )
    kernel = sample_weight(epitome, {axis: starts[axis] for axis in flat.start_shapes}, flat)
    if layout.transposed:
        kernel = kernel.flip(tuple(range(2, kernel.dim())))
        parts = [kernel] * groups if layout.wrapped else kernel.split(layout.inputs_per_group, 1)
        kernel = torch.cat(list(parts))
    elif layout.compressed:
        kernel = kernel.repeat(groups, *[1] * (kernel.dim() - 1))
    return kernel.movedim(1, -1).flatten(0, -2).contiguous()
