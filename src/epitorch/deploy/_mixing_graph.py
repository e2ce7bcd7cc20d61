"""Channel mixing as graphs to export: nothing in place, few nodes, and no table where a rotation will do.

`_mixing` writes into slices of its result, which is the fastest in torch; an exporter turns every such write into a
scatter over the whole tensor. Here an axis is split once at all the places where a run begins or ends, and the pieces
are concatenated in another order. Axes that fall into very many runs (a start for each channel) are gathered, with
one whole number for each run of equal length.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from math import gcd
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from epitorch.deploy._mixing import Runs

MOST_PIECES = 128  # inputs of one concatenation
MOST_RUNS = 192  # runs that are put in place and added one by one

Spans = list[tuple[int, int]]  # first channel and length


def expand_in_graph(features: Tensor, runs: Runs, dim: int) -> Tensor:
    """The same as `expand_channels`."""
    low = [(run.lower, run.length) for run in runs]
    high = [(run.upper if run.fraction else run.lower, run.length) for run in runs]
    if not any(run.fraction for run in runs):
        return _reordered(features, [low], dim)[0]
    lower, upper = _reordered(features, [low, high], dim)
    return lower + (upper - lower) * _fractions(features, runs, dim)


def wrap_in_graph(features: Tensor, runs: Runs, size: int, dim: int) -> Tensor:
    """The same as `wrap_channels`."""
    parts = [[(run.lower, run.channel, run.length) for run in runs]]
    sources = [features]
    if any(run.fraction for run in runs):
        share = features * _fractions(features, runs, dim)
        sources = [features - share, share]
        parts.append([(run.upper, run.channel, run.length) for run in runs if run.fraction])
    if len(runs) > MOST_RUNS:
        return _total([_gathered_sum(source, part, size, dim) for source, part in zip(sources, parts, strict=True)])
    return _total([term for pair in zip(sources, parts, strict=True) for term in _placed(*pair, size, dim)])


def _total(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


# ---- pieces in another order ----


def _reordered(features: Tensor, orders: list[Spans], dim: int) -> list[Tensor]:
    """For each list of spans, these spans one after another."""
    pieces = _Pieces(features, [span for spans in orders for span in spans], dim)
    if max(sum(pieces.count(*span) for span in spans) for spans in orders) > MOST_PIECES:
        return [_picked(features, spans, dim) for spans in orders]
    return [_concatenated([part for span in spans for part in pieces.of(*span)], dim) for spans in orders]


class _Pieces:
    """An axis cut wherever a span begins or ends, once for all spans."""

    def __init__(self, features: Tensor, spans: Spans, dim: int) -> None:
        self.features, self.dim = features, dim
        ends = {start for start, _ in spans} | {start + length for start, length in spans}
        self.cuts = sorted(ends | {0, features.shape[dim]})
        self.parts: tuple[Tensor, ...] = ()

    def count(self, start: int, length: int) -> int:
        return self.cuts.index(start + length) - self.cuts.index(start)

    def of(self, start: int, length: int) -> tuple[Tensor, ...]:
        if not self.parts:
            sizes = [end - begin for begin, end in pairwise(self.cuts)]
            self.parts = torch.split(self.features, sizes, self.dim) if len(sizes) > 1 else (self.features,)
        return self.parts[self.cuts.index(start) : self.cuts.index(start + length)]


def _concatenated(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _placed(features: Tensor, parts: list[tuple[int, int, int]], size: int, dim: int) -> list[Tensor]:
    """Terms of `size` channels whose sum has every `(target, source, length)` in its place.

    A block as long as the epitome, rotated, is one term without gaps.
    """
    pieces = _Pieces(features, [(source, length) for _, source, length in parts], dim)
    terms = []
    for layer in _layers(parts):
        found, end = [], 0
        for target, source, length in sorted(layer):
            found += [_zeros(features, target - end, dim)] if target > end else []
            found += pieces.of(source, length)
            end = target + length
        found += [_zeros(features, size - end, dim)] if end < size else []
        terms.append(_concatenated(found, dim))
    return terms


def _layers(parts: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Put parts together whose targets do not overlap."""
    layers: list[list[tuple[int, int, int]]] = []
    for part in parts:
        free = (layer for layer in layers if all(_apart(part, other) for other in layer))
        layer = next(free, None)
        if layer is None:
            layers.append([part])
        else:
            layer.append(part)
    return layers


def _apart(part: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return part[0] + part[2] <= other[0] or other[0] + other[2] <= part[0]


def _zeros(features: Tensor, length: int, dim: int) -> Tensor:
    return torch.zeros_like(features.narrow(dim, 0, length))


# ---- gathers ----


def _picked(features: Tensor, spans: Spans, dim: int) -> Tensor:
    """Spans one after another by one gather; the table has one number for each `unit` of channels."""
    unit = _unit([length for _, length in spans])
    firsts = torch.tensor([start + a for start, length in spans for a in range(0, length, unit)], dtype=torch.int32)
    index = firsts.to(features.device)
    if unit > 1:
        offsets = torch.arange(unit, dtype=torch.int32, device=features.device)
        index = (index.unsqueeze(1) + offsets).flatten()
    return features.index_select(dim, index[: sum(length for _, length in spans)])


def _gathered_sum(features: Tensor, parts: list[tuple[int, int, int]], size: int, dim: int) -> Tensor:
    """Round k takes the k-th contribution to every epitome channel, or the zeros behind the last channel."""
    nothing = features.shape[dim]
    found: list[list[int]] = [[] for _ in range(size)]
    for target, source, length in parts:
        for a in range(length):
            found[target + a].append(source + a)
    padded = torch.cat([features, _zeros(features, 1, dim)], dim)
    rounds = [[taps[k] if k < len(taps) else nothing for taps in found] for k in range(max(map(len, found)))]
    return _total([_picked(padded, [(channel, 1) for channel in chosen], dim) for chosen in rounds])


def _fractions(features: Tensor, runs: Runs, dim: int) -> Tensor:
    """Share of the upper neighbour for each channel, broadcast over the other axes."""
    blocks = [(value, sum(run.length for run in group)) for value, group in groupby(runs, lambda run: run.fraction)]
    unit = _unit([length for _, length in blocks])
    values = [value for value, length in blocks for _ in range(0, length, unit)]
    column = torch.tensor(values, dtype=features.dtype, device=features.device)
    column = column.unsqueeze(1).expand(-1, unit).flatten()[: sum(length for _, length in blocks)]
    return column.view(-1, *[1] * (features.dim() - 1 - dim % features.dim()))


def _unit(lengths: list[int]) -> int:
    """Length that divides all lengths but the last, which may stick out."""
    return gcd(*lengths[:-1]) if len(lengths) > 1 else lengths[0]
