"""Make the plain modules that stand for one layer once the order of its channels is chosen.

A reuse layer is y = A_out · (E * (A_in^T x)). With the parts x_p of the input and y_p of the output, and the rows
N_p of A_in and M_p of A_out that belong to them:

    A_in^T x = N_0^T (x_0 + sum_p (N_p N_0^-1)^T x_p)        y_p = (M_p M_0^-1) (M_0 E) * ...

so one part of each costs nothing: its matrix goes into the convolution's weight. A matrix that is left is a 1x1
convolution, which every runtime runs in its own layout and merges with batch norm, addition and activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from epitorch.deploy._layout_order import Order, mixing_matrix, rotation, tiling

_CONDITION = 50.0  # a part is folded only if undoing it costs less than two decimal digits
_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NEGLIGIBLE = 2.0**-60
HOME = "laid_out"  # submodule that holds what is new
Parts = tuple[fx.Node, ...]


@dataclass(eq=False)
class Emitter:
    """Adds modules and nodes to the graph that is being written.

    Args:
        root: Owner of the modules.
        graph: The graph.
        slices: Rotate by slices, not by 1x1 convolutions.
        like: Gives dtype and device.
        dims: Spatial axes of the layer at hand.
        name: Prefix of its modules' names.
        added: What was added for it, for the report.
    """

    root: nn.Module
    graph: fx.Graph
    slices: bool
    like: Tensor
    dims: int = 0
    name: str = ""
    added: list[str] = field(default_factory=list)

    def begin(self, name: str, like: Tensor, dims: int) -> None:
        """Turn to another layer."""
        self.name, self.like, self.dims, self.added = name.replace(".", "_"), like, dims, []

    def call(self, kind: str, module: nn.Module, source: fx.Node) -> fx.Node:
        """Apply a new module."""
        self.added.append(kind)
        name = f"{self.name}_{kind}_{len(self.added)}"
        home = self.root.get_submodule(HOME)
        home.add_module(name, module.to(self.like).eval().requires_grad_(False))
        return self.graph.call_module(f"{HOME}.{name}", (source,))

    def mix(self, kind: str, matrix: Tensor, shift: Tensor | None, source: fx.Node) -> fx.Node:
        """A matrix over the channels: a 1x1 convolution."""
        out, in_ = matrix.shape
        if self.dims == 0:
            dense: Any = nn.Linear(in_, out, bias=shift is not None)
        else:
            dense = _CONVOLUTIONS[self.dims - 1](in_, out, 1, bias=shift is not None)
        return self.call(kind, _filled(dense, matrix.view(out, in_, *[1] * self.dims), shift), source)

    def affine(self, scale: Tensor, shift: Tensor, source: fx.Node) -> fx.Node:
        """Scale and shift per channel: a batch norm, which runtimes know how to run in any layout."""
        if bool((scale == 1).all()) and bool((shift == 0).all()):
            return source
        norm = _NORMS[self.dims](len(scale), eps=0.0, dtype=torch.float64)
        with torch.no_grad():
            norm.weight.copy_(scale)
            norm.bias.copy_(shift)
        return self.call("norm", norm, source)

    def rotate(self, matrix: Tensor, source: fx.Node) -> fx.Node | None:
        """A rotation by slices; None if the matrix is none, or convolutions are asked for."""
        shift = rotation(matrix) if self.slices else None
        if not shift:
            return None if shift is None else source
        self.added.append("rotate")
        pieces = ((shift, len(matrix) - shift), (0, shift))
        return self.cat([self.graph.call_method("narrow", (source, 1, *piece)) for piece in pieces])

    def add(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """Sum."""
        total = nodes[0]
        for node in nodes[1:]:
            total = self.graph.call_function(torch.add, (total, node))
        return total

    def cat(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """Parts side by side."""
        return nodes[0] if len(nodes) == 1 else self.graph.call_function(torch.cat, (list(nodes), 1))


def _filled(dense: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    dense = dense.double()
    with torch.no_grad():
        dense.weight.copy_(weight)
        if bias is not None:
            dense.bias.copy_(bias)
    return dense


def emit_layer(
    emit: Emitter, layer: Any, parts: Parts, orders: tuple[Order, Order], affine: tuple[Tensor, Tensor]
) -> Parts:
    """Write one convolution or linear layer, plain or with reuse.

    Args:
        emit: Where to.
        layer: The layer.
        parts: Its input, in the order `orders[0]`.
        orders: Of its input's and its output's channels.
        affine: Scale and shift of its output, batch norm and bias included; float64, shape (C_out,).

    Returns:
        Its output, in the order `orders[1]`.
    """
    a_in, a_out = mixing_matrix(layer, "in"), mixing_matrix(layer, "out")
    kernel = layer.weight if a_in is None and a_out is None else layer.kernel
    weight = (layer.epitome if kernel is None else kernel).detach().double().cpu()
    if _dense_is_cheaper(layer, weight, (a_in, a_out), orders):
        emit.added.append("fold")
        a_in, a_out, weight = None, None, layer.weight.detach().double().cpu()
    source, weight = _gather(emit, a_in, parts, orders[0], weight)
    scales, shifts = orders[1].split(affine[0]), orders[1].split(affine[1])
    if a_out is None:
        return tuple(
            convolve(emit, layer, _rows(scale, rows), shift, source)
            for rows, scale, shift in zip(orders[1].split(weight), scales, shifts, strict=True)
        )

    def product_map(weight: Tensor, bias: Tensor | None = None) -> fx.Node:
        return convolve(emit, layer, weight, bias, source)

    if orders[1].parts == 1:
        return (_scatter_whole(emit, orders[1].split(a_out)[0], weight, (scales[0], shifts[0]), product_map),)
    return _scatter(emit, orders[1].split(a_out), weight, scales, shifts, product_map)


def _dense_is_cheaper(
    layer: Any, weight: Tensor, matrices: tuple[Tensor | None, Tensor | None], orders: tuple[Order, Order]
) -> bool:
    """Whether the 1x1 convolutions eat the gain, as they do on a layer that is a 1x1 convolution itself."""
    mixes = [_mixing_madds(matrix, order) for matrix, order in zip(matrices, orders, strict=True)]
    if not any(mixes):
        return False
    cost = weight.numel() + mixes[0] * prod(layer.stride) + mixes[1]
    return cost >= prod(layer.weight_shape)


def _mixing_madds(matrix: Tensor | None, order: Order) -> int:
    """Multiply-adds per position of what remains of a matrix, at most."""
    if matrix is None or tiling(matrix.index_select(0, order.channels)) is not None:
        return 0
    return matrix.numel() if order.parts == 1 else matrix.numel() // order.parts * (order.parts - 1)


def convolve(emit: Emitter, layer: Any, weight: Tensor, bias: Tensor | None, source: fx.Node) -> fx.Node:
    """The layer's own convolution with another weight."""
    out, in_ = weight.shape[:2]
    has_bias = bias is not None and bool((bias != 0).any())
    if isinstance(layer, nn.Linear):
        dense: Any = nn.Linear(in_, out, bias=has_bias)
    else:
        make = _CONVOLUTIONS[len(layer.kernel_size) - 1]
        dense = make(in_, out, layer.kernel_size, layer.stride, layer.padding, layer.dilation, bias=has_bias)
    return emit.call("layer", _filled(dense, weight, bias if has_bias else None), source)


def _rows(scale: Tensor, weight: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (weight.dim() - 1)) * weight


def _left(matrix: Tensor, weight: Tensor) -> Tensor:
    """matrix · weight along the filters."""
    return torch.tensordot(matrix, weight, dims=([1], [0]))


def _right(weight: Tensor, matrix: Tensor) -> Tensor:
    """weight · matrix along the input channels."""
    return torch.tensordot(weight, matrix, dims=([1], [0])).movedim(-1, 1)


# ---- input: A_in^T ----


def _gather(emit: Emitter, a_in: Tensor | None, parts: Parts, order: Order, weight: Tensor) -> tuple[fx.Node, Tensor]:
    """What the layer convolves, and with which weight."""
    if a_in is None:
        return emit.cat(parts), weight.index_select(1, order.channels)
    rows = order.split(a_in)
    if len(parts) == 1:
        return _gather_whole(emit, parts[0], rows[0], weight)
    first = _best(rows)
    if first is None:
        return emit.add([emit.mix("wrap", r.t(), None, x) for r, x in zip(rows, parts, strict=True)]), weight
    terms = [parts[first]]
    mixed = []
    for p, (r, x) in enumerate(zip(rows, parts, strict=True)):
        left = _relative(r, rows[first])
        if p != first and _is_identity(left):
            terms.append(x)
        elif p != first:
            mixed.append(emit.rotate(left.t(), x) or emit.mix("wrap", left.t(), None, x))
    return emit.add(terms + mixed), _right(weight, rows[first].t())


def _gather_whole(emit: Emitter, source: fx.Node, rows: Tensor, weight: Tensor) -> tuple[fx.Node, Tensor]:
    repeated, size = tiling(rows), rows.shape[1]
    if repeated is None:
        return emit.mix("wrap", rows.t(), None, source), weight
    slices = [emit.graph.call_method("narrow", (source, 1, begin, size)) for begin in range(0, len(rows), size)]
    return emit.add(slices), weight.index_select(1, repeated)


# ---- output: A_out ----


def _scatter_whole(
    emit: Emitter,
    rows: Tensor,
    weight: Tensor,
    affine: tuple[Tensor, Tensor],
    product_map: Callable[..., fx.Node],
) -> fx.Node:
    first = tiling(rows[: rows.shape[1]])
    relative = [] if first is None else [_relative(r, rows[: len(first)]) for r in rows.split(len(first))]
    rotated = emit.slices and len(relative) > 0 and all(rotation(matrix) is not None for matrix in relative)
    if first is None or not (rotated or tiling(rows) is not None):
        return emit.mix("expand", _rows(affine[0], rows), affine[1], product_map(weight))
    source = product_map(weight.index_select(0, first))
    return emit.affine(*affine, emit.cat([emit.rotate(matrix, source) or source for matrix in relative]))


def _scatter(
    emit: Emitter,
    rows: tuple[Tensor, ...],
    weight: Tensor,
    scales: tuple[Tensor, ...],
    shifts: tuple[Tensor, ...],
    product_map: Callable[..., fx.Node],
) -> Parts:
    first = _best(rows)
    if first is None:
        source = product_map(weight)
        cut = zip(rows, scales, shifts, strict=True)
        return tuple(emit.mix("expand", _rows(scale, r), shift, source) for r, scale, shift in cut)
    own = _Folded.of(scales[first], shifts[first])
    source = product_map(_rows(own.scale, _left(rows[first], weight)), own.shift)
    made = []
    for p, (r, scale, shift) in enumerate(zip(rows, scales, shifts, strict=True)):
        matrix = _relative(r, rows[first])
        if p == first and own.is_folded:
            made.append(source)
        elif (rotated := source if _is_identity(matrix) else emit.rotate(matrix, source)) is not None:
            ratio = scale / (matrix @ own.scale)
            made.append(emit.affine(ratio, shift - ratio * (matrix @ own.shift), rotated))
        else:
            matrix = _rows(scale, matrix) / own.scale
            made.append(emit.mix("expand", matrix, shift - matrix @ own.shift, source))
    return tuple(made)


@dataclass(frozen=True, eq=False)
class _Folded:
    """Scale and shift that go into the convolution; 1 and 0 where the scale could not be undone for other parts."""

    scale: Tensor
    shift: Tensor
    is_folded: bool

    @classmethod
    def of(cls, scale: Tensor, shift: Tensor) -> _Folded:
        size = scale.abs()
        if bool(size.max() <= _CONDITION * size.min()) and bool(size.min() > 0):
            return cls(scale, shift, True)
        return cls(torch.ones_like(scale), torch.zeros_like(shift), False)


def _best(rows: tuple[Tensor, ...]) -> int | None:
    """The part whose matrix is undone most exactly; None if there is none."""
    if any(matrix.shape[0] != matrix.shape[1] for matrix in rows):
        return None
    conditions = [1.0 if tiling(matrix) is not None else float(torch.linalg.cond(matrix)) for matrix in rows]
    best = min(range(len(rows)), key=conditions.__getitem__)
    return best if conditions[best] <= _CONDITION else None


def _relative(matrix: Tensor, reference: Tensor) -> Tensor:
    """matrix · reference^-1, exact where both are permutations.

    The inverse of a fractional shift decays geometrically. What lies below float64's precision is cut off: as float32
    it would become denormal numbers, with which processors are many times slower.
    """
    if tiling(reference) is not None:
        return matrix @ reference.t()
    ratio = torch.linalg.solve(reference.t(), matrix.t()).t()
    return ratio.where(ratio.abs() > _NEGLIGIBLE * ratio.abs().max(), 0.0)


def _is_identity(matrix: Tensor) -> bool:
    return (
        torch.equal(matrix, torch.eye(len(matrix), dtype=matrix.dtype)) if matrix.shape[0] == matrix.shape[1] else False
    )
