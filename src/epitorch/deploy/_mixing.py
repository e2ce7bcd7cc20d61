"""Mix channels along one axis by runs of neighbours: the sparse matrices A_out and A_in of method section 5.

A block of channels with one start is a lerp of two slices of the epitome's axis, cut where they pass the end
of the circle. Slices are about twice as fast on a CPU as gathering every channel, and need no index tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epitorch.deploy._mixing_graph import expand_in_graph, wrap_in_graph
from epitorch.functional import split_starts


@dataclass(frozen=True)
class Run:
    """Consecutive channels that mix consecutive epitome channels with the same shares.

    Args:
        channel: First channel on the long axis.
        lower: First epitome channel, share `1 - fraction`.
        upper: First epitome channel of the upper neighbours, share `fraction`.
        length: How many.
        fraction: 0 for a whole start: the upper neighbours are then not read.
    """

    channel: int
    lower: int
    upper: int
    length: int
    fraction: float

    def continued_by(self, lower: int, upper: int, fraction: float) -> bool:
        """Whether the next channel belongs to this run."""
        follows = lower == self.lower + self.length and (fraction == 0 or upper == self.upper + self.length)
        return follows and fraction == self.fraction


Runs = tuple[Run, ...]


def channel_runs(
    starts: Tensor | None,
    length: int,
    size: int,
    block: int,
    *,
    group_length: int = 1,
    repeats: int = 1,
    shared_by: int = 1,
) -> Runs:
    """Cut an axis into runs.

    Args:
        starts: One start per block, in positions, or None: position `n mod size`.
        length: Channels of the weight's axis.
        size: Channels of the epitome's axis.
        block: Patch length.
        group_length: Super-index length g.
        repeats: Groups that each have the whole axis (a convolution's inputs).
        shared_by: Groups that divide the axis among them (a convolution's filters) and read `size` channels
            each.

    Returns:
        Runs over `repeats * length` channels that read `repeats * shared_by * size` channels.
    """
    neighbours = _neighbours(starts, length, size, block, group_length)
    runs: list[Run] = []
    for channel in range(repeats * length):
        lower, upper, fraction = neighbours[channel % length]
        group = channel // (length // shared_by)
        lower, upper = lower + group * size, upper + group * size
        if runs and runs[-1].continued_by(lower, upper, fraction):
            last = runs.pop()
            runs.append(Run(last.channel, last.lower, last.upper, last.length + 1, fraction))
        else:
            runs.append(Run(channel, lower, upper, 1, fraction))
    return tuple(runs)


def _neighbours(
    starts: Tensor | None, length: int, size: int, block: int, group_length: int
) -> list[tuple[int, int, float]]:
    if starts is None:
        return [(n % size, n % size, 0.0) for n in range(length)]
    shift = split_starts(starts.detach(), size, group_length)
    bases, fractions = shift.base.tolist(), shift.fraction.tolist()
    found = []
    for n in range(length):
        position = bases[n // block] + n % block
        found.append((position % size, (position + group_length) % size, fractions[n // block]))
    return found


def expand_channels(features: Tensor, runs: Runs, dim: int) -> Tensor:
    """Make every channel from the product map: `A_out · P`. A whole start copies.

    Args:
        features: Product map, epitome channels along `dim`.
        runs: From `channel_runs`.
        dim: Channel axis.

    Returns:
        The same with the layer's output channels along `dim`.
    """
    if torch.compiler.is_exporting():
        return expand_in_graph(features, runs, dim)
    parts = []
    for run in runs:
        part = features.narrow(dim, run.lower, run.length)
        if run.fraction:
            part = torch.lerp(part, features.narrow(dim, run.upper, run.length), run.fraction)
        parts.append(part)
    return torch.cat(parts, dim)


def wrap_channels(features: Tensor, runs: Runs, size: int, dim: int) -> Tensor:
    """Sum the channels that meet the same epitome element: `A_in^T · F` (the paper's channel wrapping).

    Args:
        features: Input, the layer's channels along `dim`.
        runs: From `channel_runs`.
        size: Epitome channels of all groups, at most as many as the input has.
        dim: Channel axis.

    Returns:
        The same with `size` channels along `dim`.

    Example:
        >>> runs = channel_runs(torch.tensor([0.0, 1.0]), 4, 2, 2)
        >>> wrap_channels(torch.tensor([1.0, 10.0, 100.0, 1000.0]), runs, 2, 0)
        tensor([1001.,  110.])
    """
    if torch.compiler.is_exporting():
        return wrap_in_graph(features, runs, size, dim)
    wrapped = torch.zeros_like(features.narrow(dim, 0, size))
    for run in runs:
        part = features.narrow(dim, run.channel, run.length)
        wrapped.narrow(dim, run.lower, run.length).add_(part, alpha=1 - run.fraction)
        if run.fraction:
            wrapped.narrow(dim, run.upper, run.length).add_(part, alpha=run.fraction)
    return wrapped
