"""Train a recipe whose epitomes begin otherwise than epitorch lets them: the trials of docs/experiments.md on starts.

    python benchmarks/start_trials.py jitter,sign cifar10-resnet20/both-4x-fixed --data DIR --seed 0 --out DIR

The first word names the changes, the rest is what `epitorch train` takes:

    none    nothing
    jitter  separable starts: one anywhere in each of R equal parts of the axis, whole
    latin   starts of pairs of blocks: 3 r s modulo the size
    parts   starts of pairs of blocks: 3 r s on the compressed axis, the block's own part of the epitome on the other
    rows    starts of pairs of blocks: all pairs of an output block share its start on the filters
    between starts begin between positions, at (r + 1/2) * size / R, as learned ones once did; no other place with it
    sign    normalisation behind epitomes with repeated filters: scale -1 in every second output block
    shift   such normalisation: shifts spread over the output blocks, within 0.5
    knots   such normalisation: shift -0.5 from the third output block on
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import epitorch.nn._base as layers
import epitorch.training.starting as starting
from epitorch.cli import main
from epitorch.init import evenly_spread, first_starts
from epitorch.nn import EpitomeLayer
from epitorch.spec import Axis, EpitomeSpec

Starts = dict[Axis, Tensor]


def jitter(spec: EpitomeSpec, starts: Starts) -> None:
    """One start anywhere in each of R equal parts, no two alike."""
    if spec.channel_starts == "grid":
        return
    for axis, even in starts.items():
        size, blocks = spec.start_sizes[axis][0], even.numel()
        if axis == "spatial" or blocks > size or spec.group_length > 1:
            continue
        drawn = even.clone().fill_(0)
        while len(set(drawn.tolist())) < blocks:
            drawn = ((torch.arange(blocks) + torch.rand(blocks)) * size / blocks).floor().clamp(max=size - 1)
        starts[axis] = drawn.to(even)


def latin(spec: EpitomeSpec, starts: Starts) -> None:
    """Shifts of which no two output blocks have the same differences."""
    if spec.channel_starts != "grid":
        return
    for axis, even in starts.items():
        rows, columns = (torch.arange(n) for n in even.shape)
        starts[axis] = ((rows.unsqueeze(1) * columns * 3) % spec.start_sizes[axis][0]).to(even)


def rows(spec: EpitomeSpec, starts: Starts) -> None:
    """The filters' starts of output blocks, for all pairs."""
    if spec.channel_starts != "grid" or "out" not in starts:
        return
    even, size = starts["out"], spec.start_sizes["out"][0]
    row = torch.arange(even.shape[0]).unsqueeze(1).expand(even.shape)
    starts["out"] = ((2 * row + 1) * size // (2 * even.shape[0])).to(even)


def parts(spec: EpitomeSpec, starts: Starts) -> None:
    """Products of an input block with its part of the epitome are formed once and added up in other combinations.

    Where the input channels are compressed: they are added up in other combinations for each output block.
    """
    if spec.channel_starts != "grid":
        return
    rows, columns = (torch.arange(n) for n in (spec.num_out_blocks, spec.num_in_blocks))
    part = columns % (spec.epitome_shape[1] // spec.block_in)  # wrapped inputs: what is added up meets the same part
    turns = 3 * rows.unsqueeze(1) * (part if spec.epitome_shape[0] < spec.weight_shape[0] else columns)
    if spec.epitome_shape[0] < spec.weight_shape[0]:
        starts["out"] = (turns % spec.epitome_shape[0]).to(starts["out"])
        starts["in"] = (part * spec.block_in).expand_as(turns).to(starts["in"])
    else:
        starts["in"] = (turns % spec.epitome_shape[1]).to(starts["in"])
        if "out" in starts:
            starts["out"] = (rows.unsqueeze(1) * spec.block_out).expand_as(turns).to(starts["out"])


def sign(norm: nn.BatchNorm2d, block: Tensor) -> None:
    """Repeated filters see opposite halves of the line."""
    norm.weight.mul_(1 - 2.0 * (block % 2))


def shift(norm: nn.BatchNorm2d, block: Tensor) -> None:
    """Repeated filters bend at different places."""
    count = int(block.max()) + 1
    norm.bias.add_((block - (count - 1) / 2) / count)


def knots(norm: nn.BatchNorm2d, block: Tensor) -> None:
    """Of every two pairs of repeated filters one bends elsewhere."""
    last = int(block.max())
    norm.bias.add_((block // 2) / max(1, last // 2) * -0.5 if last > 1 else 0.0)


PLACES: Mapping[str, Callable[[EpitomeSpec, Starts], None]] = {
    "jitter": jitter,
    "latin": latin,
    "parts": parts,
    "rows": rows,
}
NORMS: Mapping[str, Callable[[nn.BatchNorm2d, Tensor], None]] = {"sign": sign, "shift": shift, "knots": knots}


def change(names: list[str]) -> None:
    """Make epitorch begin so from now on."""

    def spread(spec: EpitomeSpec, *, learned: bool, by_learner: bool, **options: Any) -> Starts:
        if "between" in names:
            return evenly_spread(spec, within_reach=by_learner, **options)
        starts = first_starts(spec, learned=learned, by_learner=by_learner, **options)
        for name in names:
            if name in PLACES:
                PLACES[name](spec, starts)
        return starts

    def converted(*args: Any) -> Any:
        plan = convert(*args)
        before: nn.Module | None = None
        for module in args[0].modules():
            if isinstance(module, EpitomeLayer):
                before = module
            elif isinstance(module, nn.BatchNorm2d):
                _change_norm(module, before)
                before = None
        return plan

    @torch.no_grad()
    def _change_norm(norm: nn.BatchNorm2d, layer: Any) -> None:
        if layer is None or not layer.spec.has_out_starts or layer.spec.weight_shape[0] != norm.num_features:
            return
        block = torch.arange(norm.num_features) // layer.block_out
        for name in names:
            if name in NORMS:
                NORMS[name](norm, block)

    convert = starting._convert
    layers.first_starts = spread  # type: ignore[assignment]
    starting._convert = converted


if __name__ == "__main__":
    asked = sys.argv[1].split(",") if len(sys.argv) > 1 else []
    known = ["none", "between", *PLACES, *NORMS]
    if not asked or set(asked) - set(known):
        sys.exit(f"expected changes out of {', '.join(known)}, then what `epitorch train` takes")
    change(asked)
    sys.exit(main(["train", *sys.argv[2:]]))
