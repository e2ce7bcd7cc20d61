"""How a layer runs on product positions: its kernel, which rows its outputs read, where their diagonals begin."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epitorch.cost.diagonals import DiagonalLayout, ProductMap, Segment
from epitorch.deploy._mixing import Run, Runs
from epitorch.deploy.integral import Beginning, Reach, integral_map, integral_response, response
from epitorch.errors import ShapeError, explain
from epitorch.functional import sample_weight, split_starts
from epitorch.spec import Axis

_CONV = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class SegmentRows:
    """Rows of the product that a segment reads.

    Args:
        segment: Output channels.
        ranges: (first row, length), rising.
        runs: How the channels mix the rows of the ranges, side by side.
    """

    segment: Segment
    ranges: tuple[tuple[int, int], ...]
    runs: Runs


@dataclass(frozen=True)
class Diagonals:
    """What a layer does with its product positions; no tensors.

    Args:
        layout: How the layer is cut.
        rows: For each segment of `layout`.
        beginnings: By owner of spatial starts.
        integral: Sum by the integral map.
    """

    layout: DiagonalLayout
    rows: tuple[SegmentRows, ...]
    beginnings: tuple[Beginning, ...]
    integral: bool

    def responses(self, features: Tensor, kernel: Tensor, padding: list[int], mode: str, reach: Reach) -> list[Tensor]:
        """Responses of the rows that each segment reads, summed over the product maps.

        Args:
            features: Shape (N, C, *space), wrapped already if the layout says so.
            kernel: From `product_kernel`.
            padding: As `F.pad` takes it, over space.
            mode: Of `F.pad`.
            reach: What the outputs read.

        Returns:
            One tensor per segment, shape (N, rows, *sizes).
        """
        totals: dict[int, Tensor] = {}
        for served in self.layout.maps():
            positions = self._positions(features, kernel, served)
            positions = F.pad(positions, padding, mode=mode) if any(padding) else positions
            for n, found in self._read(positions, served, reach):
                totals[n] = totals[n].add_(found) if n in totals else found
        return [totals[n] for n in range(len(self.rows))]

    def _positions(self, features: Tensor, kernel: Tensor, served: ProductMap) -> Tensor:
        """One map, shape (N, rows * prod(L), *space); pointwise, so padding the products is padding the input."""
        layout, dims = self.layout, features.dim() - 2
        inputs = features.unflatten(1, (layout.groups, layout.inputs_per_group))
        inputs = inputs.narrow(1, served.first_group, served.groups).narrow(2, served.column, served.length)
        rows = kernel.unflatten(0, (layout.groups, -1)).narrow(0, served.first_group, served.groups)
        weight = rows.flatten(0, 1).narrow(1, served.column, served.length)
        weight = weight.reshape(*weight.shape, *[1] * dims)
        return _CONV[dims - 1](inputs.flatten(1, 2), weight, groups=served.groups)

    def _read(self, positions: Tensor, served: ProductMap, reach: Reach) -> list[tuple[int, Tensor]]:
        """Number of the segment and what it reads, for every segment that reads this map."""
        width, dims = self.layout.rows_per_group, len(reach.kernel)
        for dim, size in zip(range(-dims, 0), reach.span, strict=True):
            positions = positions.narrow(dim, 0, size)
        source = positions.unflatten(1, (served.groups * width, *self.layout.spec.window))
        source = integral_map(source, reach) if self.integral else source
        found = []
        for n, rows in enumerate(self.rows):
            if rows.segment.reads(served):
                start = self.beginnings[self.layout.owner(rows.segment, served)]
                parts = [source.narrow(1, first - served.first_group * width, size) for first, size in rows.ranges]
                read = [self._response(part, start, reach, positions.dtype) for part in parts]
                found.append((n, read[0] if len(read) == 1 else torch.cat(read, 1)))
        return found

    def _response(self, source: Tensor, start: Beginning, reach: Reach, dtype: torch.dtype) -> Tensor:
        return integral_response(source, start, reach, dtype) if self.integral else response(source, start, reach)


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


def beginnings(layout: DiagonalLayout, starts: Mapping[Axis, Tensor]) -> tuple[Beginning, ...]:
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
    rows = zip(lower.remainder(window), (lower + step).remainder(window), fraction, strict=True)
    return tuple(Beginning(tuple(a.tolist()), tuple(b.tolist()), tuple(f.tolist())) for a, b, f in rows)


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


def segment_rows(layout: DiagonalLayout, runs: Runs) -> tuple[SegmentRows, ...]:
    """For each segment the rows that it reads, and how its channels mix them.

    Args:
        layout: The layer.
        runs: How all output channels mix all rows, in the order of the channels.
    """
    width, found = layout.rows_per_group, []
    channels = [run.channel for run in runs]
    for segment in layout.segments():
        first, last = segment.channel, segment.channel + segment.length
        near = runs[bisect_right(channels, first) - 1 : bisect_left(channels, last)]
        own = _within(near, first, segment.length)
        every = ((segment.first_group * width, segment.groups * width),)
        ranges = _ranges({row for run in own for row in _rows_of(run)}) if layout.by_output else every
        found.append(SegmentRows(segment, ranges, _moved(own, ranges)))
    return tuple(found)


def _within(runs: Runs, first: int, length: int) -> Runs:
    """The part of the runs that makes these channels, counted from the first of them."""
    found = []
    for run in runs:
        start, stop = max(run.channel, first), min(run.channel + run.length, first + length)
        if start < stop:
            skip = start - run.channel
            found.append(Run(start - first, run.lower + skip, run.upper + skip, stop - start, run.fraction))
    return tuple(found)


def _rows_of(run: Run) -> set[int]:
    lower = set(range(run.lower, run.lower + run.length))
    return lower | set(range(run.upper, run.upper + run.length)) if run.fraction else lower


def _ranges(rows: set[int]) -> tuple[tuple[int, int], ...]:
    """Consecutive rows as (first, length)."""
    found: list[tuple[int, int]] = []
    for row in sorted(rows):
        if found and row == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((row, 1))
    return tuple(found)


def _moved(runs: Runs, ranges: tuple[tuple[int, int], ...]) -> Runs:
    """The same runs where only these rows are there, side by side."""
    local = {row: n for n, row in enumerate(row for first, length in ranges for row in range(first, first + length))}
    return tuple(replace(run, lower=local[run.lower], upper=local[run.upper] if run.fraction else 0) for run in runs)
