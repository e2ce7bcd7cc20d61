"""The best starts for a given epitome."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epitorch.spec import Axis
from epitorch.warmstart._problem import Starts, Target, Window, patches, windows

_CHUNK = 20_000_000  # elements of one intermediate tensor
_JOINT_LIMIT = 10_000_000  # elements of all cost volumes of the joint search


@dataclass(frozen=True)
class Rules:
    """Which starts may be chosen.

    Args:
        fractional: Between two positions as well.
        within_reach: Not beyond `size - g`, where a learner with a group length g > 1 cannot go.
    """

    fractional: bool = True
    within_reach: bool = False


def improve_starts(target: Target, epitome: Tensor, starts: Starts, rules: Rules) -> dict[Axis, Tensor]:
    """Choose every start anew for this epitome, one axis after the other with the others fixed; the loss never rises.

    On one axis the choice is exact, over all positions and all fractions between them: for a given lower neighbour the
    loss is a parabola in the fraction. Where every pair of blocks has starts of its own on both channel axes, whole
    starts are searched on both together first. With whole starts only, those given must be whole.
    """
    new = dict(starts)
    if not rules.fractional and target.spec.channel_starts == "grid" and set(new) == {"out", "in"}:
        new = _joint(target, epitome, new)
    for axis in starts:
        if axis == "spatial":
            for column in range(len(target.spec.spatial_axes)):
                new[axis] = _spatial(target, epitome, new, column, rules)
        else:
            new[axis] = _channel(target, epitome, new, axis, rules)
    return new


# ---- one axis ----


def _channel(target: Target, epitome: Tensor, starts: Starts, axis: Axis, rules: Rules) -> Tensor:
    """Best starts on a channel axis, shape as `starts[axis]`."""
    spec, dim = target.spec, 0 if axis == "out" else 1
    places = windows(starts, spec, epitome)
    step, size = spec.group_length, spec.epitome_shape[dim]
    places[dim] = Window.whole_axis(size, step, epitome)
    along, across = (target.rows, target.columns) if dim == 0 else (target.columns, target.rows)
    own = [place.shift.base.shape[dim] > 1 for place in places]
    shared = spec.owners(axis) != "grid"  # by the blocks of the other axis
    blocks = target.blocks.movedim(dim, 0).movedim(2 + dim, 2).flatten(3)  # shape: (B, P, block, rest)
    weights = across.unsqueeze(-1).expand(*across.shape, blocks.shape[3] // across.shape[1]).flatten(1)
    if any(own):
        parts = [(slice(b, b + 1), [place.row(b, dim) for place in places]) for b in range(blocks.shape[0])]
    else:
        pairs = 1 if shared else blocks.shape[1]
        several = max(1, _CHUNK // (pairs * blocks.shape[2] * size))
        parts = [(slice(b, b + several), places) for b in range(0, blocks.shape[0], several)]
    curves = _sums_of_curves if shared else _curves
    chosen, source = [], None
    for part, here in parts:
        if source is None or any(own):
            read = patches(epitome, here).movedim(dim, 0).movedim(2 + dim, 2)[0].flatten(2)
            source = read.expand(blocks.shape[1], -1, -1)  # shape: (P, size, rest)
        chosen.append(_lowest(curves(blocks[part], source, along[part], weights, step), step, rules))
    best = torch.cat(chosen)  # shape: (B, P | 1)
    if shared:
        return best[:, 0]
    return best if dim == 0 else best.t().contiguous()


def _spatial(target: Target, epitome: Tensor, starts: Starts, column: int, rules: Rules) -> Tensor:
    """All spatial starts, with the best ones on one spatial axis."""
    spec = target.spec
    dim = 2 + spec.spatial_axes[column]
    places = windows(starts, spec, epitome)
    places[dim] = Window.whole_axis(spec.epitome_shape[dim], 1, epitome)
    pairs = (spec.num_out_blocks, spec.num_in_blocks)
    read = patches(epitome, places)
    source = read.expand(*pairs, *read.shape[2:]).movedim(2 + dim, 2).flatten(3).flatten(0, 1)
    blocks = target.blocks.movedim(2 + dim, 2).flatten(3).flatten(0, 1).unsqueeze(0)
    element = target.rows[:, None, :, None] * target.columns[None, :, None, :]
    rest = blocks.shape[3] // element[0, 0].numel()
    weights = element.flatten(2).unsqueeze(-1).expand(*pairs, -1, rest).flatten(2).flatten(0, 1)
    curves = _curves(blocks, source, blocks.new_ones(1, blocks.shape[2]), weights, 1)
    curves = curves.reshape(3, *pairs, curves.shape[-1])
    owner = {"in": 1, "out": 2}.get(spec.spatial_starts)
    if owner is not None:
        curves = curves.sum(owner)
    chosen = starts["spatial"].clone()
    chosen[..., column] = _lowest(curves, 1, rules)
    return chosen


def _curves(blocks: Tensor, source: Tensor, along: Tensor, across: Tensor, step: int) -> Tensor:
    """Terms of the loss of every block at every position.

    Args:
        blocks: Weighted blocks of the weight, shape (B, P, block, rest), the searched axis third.
        source: What they meet, the whole searched axis, shape (P, size, rest).
        along: Importance along the searched axis, shape (B, block).
        across: Importance of the rest, shape (P, rest).
        step: Distance of neighbouring starts.

    Returns:
        Product with the weight, square, and product with the patch one step on; shape (3, B, P, size).
    """
    size, block = source.shape[1], blocks.shape[2]
    offset = torch.arange(block, device=source.device)
    index = (torch.arange(size, device=source.device).unsqueeze(1) + offset).remainder(size)  # shape: (size, block)
    several = max(1, _CHUNK // (blocks.shape[0] * block * size))
    found = []
    for part, read, rest in zip(blocks.split(several, 1), source.split(several), across.split(several), strict=True):
        gram = torch.einsum("bpnr,plr->bpnl", part, read)
        product = gram[:, :, offset, index].sum(-1)
        weighted = read * rest.unsqueeze(1)
        squares = [(weighted * other).sum(-1) for other in (read, read.roll(-step, 1))]
        square, mixed = (torch.einsum("pln,bn->bpl", values[:, index], along) for values in squares)
        found.append(torch.stack([product, square, mixed]))
    return torch.cat(found, 2)


def _sums_of_curves(blocks: Tensor, source: Tensor, along: Tensor, across: Tensor, step: int) -> Tensor:
    """The same summed over P, which becomes part of the rest: a curve for each pair would not fit into memory."""
    together = blocks.transpose(1, 2).flatten(2).unsqueeze(1)
    return _curves(together, source.transpose(0, 1).flatten(1).unsqueeze(0), along, across.reshape(1, -1), step)


def _lowest(curves: Tensor, step: int, rules: Rules) -> Tensor:
    """Starts of least loss, shape of one curve without its last axis."""
    product, square, mixed = curves
    size = product.shape[-1]
    loss = square - 2 * product
    fraction = torch.zeros_like(loss)
    if rules.fractional:
        bend = square - 2 * mixed + square.roll(-step, -1)
        slope = 2 * (mixed - square + product - product.roll(-step, -1))
        flat = bend <= 1e-12 * square.amax()  # both neighbours are the same
        fraction = torch.where(flat, fraction, (-slope / (2 * bend)).clamp(0, 1))
        if rules.within_reach and step > 1:
            fraction[..., size - step :] = 0
        loss = loss + slope * fraction + bend * fraction**2
    best = loss[..., ::step].argmin(-1, keepdim=True) * step
    return (best + step * fraction.gather(-1, best)).squeeze(-1)


# ---- both channel axes of a grid ----


def _joint(target: Target, epitome: Tensor, starts: dict[Axis, Tensor]) -> dict[Axis, Tensor]:
    """Whole starts of each pair of blocks, over all pairs of positions, by circular cross-correlation."""
    spec = target.spec
    rows, columns = spec.epitome_shape[:2]
    taps = epitome[0, 0].numel()
    if spec.num_out_blocks * spec.num_in_blocks * rows * columns * taps > _JOINT_LIMIT:
        return starts
    places = [Window.whole_axis(size, 1, epitome) for size in (rows, columns)]
    places += windows(starts, spec, epitome)[2:]
    read = patches(epitome, places).reshape(rows, columns, -1).movedim(2, 0)  # shape: (taps, O, I)
    waves, energy = torch.fft.rfft2(read), torch.fft.rfft2(read.square().sum(0))
    step = spec.group_length
    chosen = []
    for row, mask in zip(target.blocks, target.rows, strict=True):
        blocks = row.reshape(*row.shape[:3], -1).movedim(3, 1)  # shape: (R_in, taps, block_out, block_in)
        meets = (torch.fft.rfft2(blocks, (rows, columns)).conj() * waves).sum(1)
        window = mask.view(1, -1, 1) * target.columns.unsqueeze(1)
        squares = torch.fft.rfft2(window, (rows, columns)).conj() * energy
        loss = torch.fft.irfft2(squares - 2 * meets, (rows, columns))[:, ::step, ::step]
        chosen.append(loss.flatten(1).argmin(1))
    best = torch.stack(chosen)
    across = -(-columns // step)
    return {
        "out": (torch.div(best, across, rounding_mode="floor") * step).to(epitome),
        "in": (best.remainder(across) * step).to(epitome),
    }
