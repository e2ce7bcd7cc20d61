"""Lay a stage out for the native kernel: vectors of expanded channels, packed matrices.

The expanded channels exist only inside the kernel, so their order is free. They are sorted by the wrapped channel
that they are added to: a vector of sums then lies aligned, and, since both shifts are shifts on a circle, the
product-map channels of its lanes lie side by side as well (the kernel stores each row of the product map twice).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epitorch.deploy._fused_block import Squeeze, Stage, Taps

Lane = tuple[int, int]  # lane of a vector, expanded channel


@dataclass(frozen=True)
class Packed:
    """What the kernel reads besides sizes; all contiguous, float32 or int32."""

    expand: Tensor  # (vectors of O, in_channels, lanes)
    table: Tensor  # (vectors, 4 + 2 * lanes)
    constants: Tensor  # (vectors, 6 + k * k, lanes)
    project: Tensor  # (vectors of K, depth, lanes)
    bias: Tensor  # (vectors of K, lanes)
    squeeze: tuple[Tensor, ...]  # (R, vectors, lanes), (R up to whole vectors,), (vectors, R, lanes), (vectors, lanes)
    z_floats: int = 0
    tail_at: int = 0
    tail_length: int = 0
    tail_parts: int = 0
    tail_vectors: int = 0
    tail_blocks: int = 1
    has_upper: bool = False
    doubled: bool = False


@dataclass(frozen=True)
class Vector:
    """Lanes that are in use, and the first wrapped sum that the vector adds to."""

    lanes: tuple[Lane, ...]
    destination: int


def pack(stage: Stage, lanes: int) -> Packed:
    """Lay one stage out for vectors of `lanes` floats."""
    project, bias = stage.project.flatten(1), stage.bias
    empty = torch.zeros(0, dtype=torch.float32, device="cpu")
    if stage.settings.kind != "block":
        table = torch.zeros(0, dtype=torch.int32, device="cpu")
        matrix, last = pack_matrix(project, lanes), pack_matrix(bias[:, None], lanes)[:, 0]
        return Packed(empty, table, empty, matrix, last, (empty,) * 4)
    assert stage.taps_in is not None
    assert stage.taps_out is not None
    layers = _layers(stage.taps_out)
    size = stage.taps_out.size
    blocks = min(lanes // (size % lanes), len(layers)) if size % lanes else 1
    packs = blocks > 1 and len(layers) > 1
    parts = size + stage.taps_out.group + lanes
    vectors = _vectors(layers, size, lanes, blocks if packs else 1, parts)
    # the kernel clears the sums only where it adds upper taps; without any, each sum must be stored once
    untouched = len({vector.destination for vector in vectors}) < -(-size // lanes)
    length = size % lanes if packs else 0
    tails = -(-len(layers) // blocks) if packs else 0
    rows = [_row(stage.taps_in, stage.taps_out, vector, lanes) for vector in vectors]
    table = torch.tensor(rows, dtype=torch.int32, device="cpu")
    return Packed(
        empty if stage.expand is None else pack_matrix(stage.expand, lanes),
        table,
        _constants(stage, vectors, lanes),
        pack_matrix(project, lanes),
        pack_matrix(bias[:, None], lanes)[:, 0].contiguous(),
        (empty,) * 4 if stage.squeeze is None else _squeeze(stage.squeeze, vectors, lanes),
        z_floats=parts + 2 * tails * lanes + lanes,
        tail_at=size - length,
        tail_length=length,
        tail_parts=parts,
        tail_vectors=tails,
        tail_blocks=blocks,
        has_upper=bool((stage.taps_out.fraction != 0).any()) or untouched,
        doubled=any(int(row[1]) + lanes > stage.taps_in.size for row in table),
    )


def pack_matrix(matrix: Tensor, lanes: int) -> Tensor:
    """(rows, depth) to (vectors of rows, depth, lanes), zeros after the last row."""
    rows, depth = matrix.shape
    padded = matrix.new_zeros(-(-rows // lanes) * lanes, depth, dtype=torch.float32)
    padded[:rows] = matrix
    return padded.view(-1, lanes, depth).transpose(1, 2).contiguous()


def _layers(taps: Taps) -> list[dict[int, int]]:
    """Cut the expanded channels, in order, where a wrapped channel would come twice: position to channel."""
    layers: list[dict[int, int]] = [{}]
    for channel, position in enumerate(taps.lower.tolist()):
        if position in layers[-1]:
            layers.append({})
        layers[-1][position] = channel
    return layers


def _vectors(layers: list[dict[int, int]], size: int, lanes: int, blocks: int, parts: int) -> list[Vector]:
    """Aligned vectors by destination; with `blocks` above 1 the layers' last, partial ones share vectors."""
    whole = size // lanes * lanes if blocks > 1 else size
    found = []
    for start in range(0, whole, lanes):
        for layer in layers:
            used = [(p - start, layer[p]) for p in range(start, min(start + lanes, whole)) if p in layer]
            found += [Vector(tuple(used), start)] if used else []
    if blocks == 1:
        return found
    for at in range(0, len(layers), blocks):
        used = [
            (block * (size - whole) + p - whole, layer[p])
            for block, layer in enumerate(layers[at : at + blocks])
            for p in range(whole, size)
            if p in layer
        ]
        found += [Vector(tuple(used), parts + at // blocks * lanes)] if used else []
    return found


def _row(taps_in: Taps, taps_out: Taps, vector: Vector, lanes: int) -> list[int]:
    """Kind, source, destination, which upper taps there are; then the places of both taps for a gather."""
    lower, upper = [0] * lanes, [0] * lanes
    offsets = set()
    reads = adds = False
    for lane, channel in vector.lanes:
        lower[lane], upper[lane] = int(taps_in.lower[channel]), int(taps_in.upper[channel])
        offsets.add((lower[lane] - lane) % taps_in.size)
        reads |= bool(taps_in.fraction[channel] != 0)
        adds |= bool(taps_out.fraction[channel] != 0)
    reach = min(offsets) + vector.lanes[-1][0] + taps_in.group
    gathered = len(offsets) > 1 or reach >= 2 * taps_in.size  # a row stored twice must hold all of it
    return [int(gathered), min(offsets), vector.destination, int(reads) + 2 * int(adds), *lower, *upper]


def _constants(stage: Stage, vectors: list[Vector], lanes: int) -> Tensor:
    """Shares with the batch norm folded in, depthwise weights, shares of wrapping; zeros in unused lanes."""
    a, b = stage.taps_in, stage.taps_out
    assert a is not None
    assert b is not None
    assert stage.scale is not None
    assert stage.shift is not None
    assert stage.depthwise is not None
    assert stage.depthwise_bias is not None
    share, scale = a.fraction.double(), stage.scale.double()
    rows = [scale * (1 - share), scale * share, stage.shift, *stage.depthwise.flatten(1).T, stage.depthwise_bias]
    rows += [1 - b.fraction, b.fraction]
    by_channel = torch.stack([row.double() for row in rows]).float()  # shape: (6 + k * k, C)
    constants = torch.zeros(len(vectors), len(rows), lanes, dtype=torch.float32, device="cpu")
    for n, vector in enumerate(vectors):
        at, channels = torch.tensor(vector.lanes, dtype=torch.int64, device="cpu").T
        constants[n][:, at] = by_channel[:, channels]
    return constants


def _squeeze(squeeze: Squeeze, vectors: list[Vector], lanes: int) -> tuple[Tensor, ...]:
    """Both matrices with their expanded channels in the order of the vectors; zeros in unused lanes."""

    def spread(by_channel: Tensor) -> Tensor:  # shape: (C, ...) to (vectors, lanes, ...)
        found = torch.zeros(len(vectors), lanes, *by_channel.shape[1:], dtype=torch.float32, device="cpu")
        for n, vector in enumerate(vectors):
            at, channels = torch.tensor(vector.lanes, dtype=torch.int64, device="cpu").T
            found[n, at] = by_channel[channels].float()
        return found

    bias = pack_matrix(squeeze.reduce_bias[:, None], lanes).flatten()
    reduce, restore = spread(squeeze.reduce.T), spread(squeeze.restore)
    return reduce.permute(2, 0, 1), bias, restore.transpose(1, 2), spread(squeeze.restore_bias)
