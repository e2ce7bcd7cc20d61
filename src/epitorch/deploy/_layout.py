"""Lay a deployed network out for runtimes: the same function, in operators that they run without copying."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from epitorch.cost._trace import as_arguments, quiet, tensors
from epitorch.deploy._layout_emit import HOME, Emitter, Parts, emit_layer
from epitorch.deploy._layout_graph import Space, Traced, affine_of, shape_of, trace_layout
from epitorch.deploy._layout_order import Order, choose_order
from epitorch.deploy._parity import check_parity
from epitorch.deploy.reuse_layers import ReuseLayer
from epitorch.errors import InputError, check_is_model, explain

Rotate = Literal["convolution", "slices"]
_OUT_OF_PLACE: dict[Any, Any] = {operator.iadd: operator.add, operator.imul: operator.mul, "relu_": "relu"}


@dataclass(frozen=True)
class LaidOutLayer:
    """One layer with reuse.

    Args:
        name: Qualified name in the deployed network.
        parts_in: Tensors that hold its input.
        parts_out: Tensors that hold its output.
        mixes: 1x1 convolutions that it needs beside its own.
        rotations: Rotations by slices that it needs.
        norms: Scalings per channel that it needs.
        folded: The 1x1 convolutions would have cost what reuse saves: it runs with the dense weight.
    """

    name: str
    parts_in: int
    parts_out: int
    mixes: int
    rotations: int
    norms: int
    folded: bool


@dataclass(frozen=True)
class NetworkLayout:
    """What `lay_out` did.

    Args:
        layers: The layers that were rewritten.
        kept: Layers with reuse that stay as they were, by name: something around them is not known.
        difference: Largest difference to the deployed network on the example, over the largest output.
        refused: Why the whole network stays as it is; None if it was rewritten.
    """

    layers: tuple[LaidOutLayer, ...]
    kept: tuple[str, ...]
    difference: float
    refused: str | None = None


def lay_out(
    net: nn.Module,
    example_input: Tensor | tuple[Any, ...],
    *,
    permute: bool = True,
    split: bool = True,
    rotate: Rotate = "convolution",
) -> nn.Module:
    """Rewrite a deployed network so that runtimes keep their layout: no gathers, slices or loose batch norms.

    The function stays the same. Batch norms go into the layers before them. Rotations by whole positions go into the
    weights around them, as another order of the channels, wherever all that share the channels allow it. What
    is left of a mixing matrix is a 1x1 convolution. Channels that a layer wraps are kept as one tensor for each of
    the pieces that it sums, so that nothing is cut or joined. The weights are for this network only: they are
    larger than the epitomes by the 1x1 convolutions.

    Args:
        net: What `epitorch.deploy` returned; it stays as it is.
        example_input: A tensor, or a tuple of the network's arguments.
        permute: Store channels in another order where that saves rotations.
        split: Keep wrapped channels in several tensors.
        rotate: What a rotation that is left becomes: a 1x1 "convolution" or two "slices". Which one is faster depends
            on the runtime and the layer. Fractions are convolutions in any case.

    Returns:
        A graph of plain torch modules, in eval mode; a copy of the network where `torch.fx` cannot trace it, or where
        the graph's output on the example is not the network's. Its attribute `layout` is the report
        (`NetworkLayout`), `deployment` that of `deploy`.

    Raises:
        InputError: If `net` is no model or in train mode, the example holds no tensor, or `rotate` is not known.

    Example:
        >>> import torch, epitorch
        >>> from epitorch.nn import EpitomeConv2d
        >>> net = torch.nn.Sequential(EpitomeConv2d(8, 16, 3, epitome_shape=(8, 8, 3, 3)), torch.nn.BatchNorm2d(16))
        >>> x = torch.randn(1, 8, 6, 6)
        >>> lay_out(epitorch.deploy(net.eval(), x), x).layout.layers[0].mixes
        1
    """
    if rotate not in get_args(Rotate):
        raise InputError(explain("rotate is not known", expected=" | ".join(get_args(Rotate)), got=repr(rotate)))
    _check(net, example_input)
    names = [name for name, module in net.named_modules() if isinstance(module, ReuseLayer)]
    with quiet(net), torch.no_grad():
        expected = net(*as_arguments(example_input))
        traced = _traced(net, as_arguments(example_input))
        made = traced if isinstance(traced, str) else _rewritten(traced, permute, split, rotate)
        difference = made if isinstance(made, str) else _difference(expected, made[0], example_input)
    if isinstance(made, str) or isinstance(difference, str):
        return _with_report(copy.deepcopy(net), net, NetworkLayout((), tuple(names), 0.0, str(difference)))
    laid_out, rows = made
    kept = set(names) - {row.name for row in rows}
    report = NetworkLayout(tuple(rows), tuple(name for name in names if name in kept), difference)
    return _with_report(laid_out, net, report)


def _check(net: Any, example_input: Any) -> None:
    check_is_model(net)
    training = [name for name, module in net.named_modules() if module.training]
    if training:
        got = f"train mode in {', '.join(repr(name or 'the network itself') for name in training[:3])}"
        raise InputError(
            explain("only a network for inference is laid out", expected="eval mode", got=got, fix="call net.eval()")
        )
    if next(tensors(example_input), None) is None:
        got = type(example_input).__name__
        raise InputError(explain("example_input holds no tensor", expected="a tensor, or a tuple with one", got=got))


def _rewritten(
    traced: Traced, permute: bool, split: bool, rotate: Rotate
) -> tuple[nn.Module, list[LaidOutLayer]] | str:
    """The new graph, or why there is none: a network that cannot be rewritten still runs as it is."""
    try:
        writer = _Writer(traced, _orders(traced, permute, split), slices=rotate == "slices")
        return writer.write(), writer.rows
    except Exception as error:
        return f"it cannot be rewritten: {type(error).__name__}: {error}"


def _difference(expected: Any, laid_out: nn.Module, example_input: Any) -> float | str:
    """To the deployed network's output, or why the two are not the same."""
    try:
        return check_parity(expected, laid_out(*as_arguments(example_input)))
    except Exception as error:
        return f"the rewritten network is not the same: {type(error).__name__}: {error}"


def _with_report(made: nn.Module, net: nn.Module, report: NetworkLayout) -> nn.Module:
    setattr(made, "layout", report)  # noqa: B010 - nn.Module declares tensors and modules only
    if hasattr(net, "deployment"):
        setattr(made, "deployment", net.deployment)  # noqa: B010
    return made


def _traced(net: nn.Module, arguments: tuple[Any, ...]) -> Traced | str:
    """The traced network, or why there is none. Tracing runs the network's own code: it may raise anything."""
    try:
        return trace_layout(net, arguments)
    except Exception as error:
        return f"torch.fx cannot trace it: {type(error).__name__}: {error}"


def _orders(traced: Traced, permute: bool, split: bool) -> dict[Space, Order]:
    return {space: choose_order(space, traced, permute=permute, split=split) for space in set(traced.spaces.values())}


class _Writer:
    """Writes the new graph, node by node."""

    def __init__(self, traced: Traced, orders: dict[Space, Order], *, slices: bool) -> None:
        self._traced, self._orders = traced, orders
        self._graph, self._root = fx.Graph(), nn.Module()
        self._root.add_module(HOME, nn.Module())
        self._copied: set[str] = set()
        self._parts: dict[fx.Node, Parts] = {}
        self._emit = Emitter(self._root, self._graph, slices, torch.empty(0))
        self._norms = {source: norm for norm, source in traced.folded.items()}
        self.rows: list[LaidOutLayer] = []

    def write(self) -> fx.GraphModule:
        for node in self._traced.module.graph.nodes:
            self._parts[node] = self._written(node)
        self._graph.lint()
        return fx.GraphModule(self._root, self._graph).eval()

    def _written(self, node: fx.Node) -> Parts:
        kind = self._traced.kinds[node]
        if node in self._traced.folded:
            return self._parts[self._traced.folded[node]]
        if kind == "layer":
            return self._layer(node)
        if kind == "norm":
            return self._norm(node)
        if kind == "channelwise":
            return tuple(self._copy(node, part) for part in range(self._order(node).parts))
        return (self._copy(node, 0),)

    def _order(self, node: fx.Node) -> Order:
        return self._orders[self._traced.spaces[node]]

    def _copy(self, node: fx.Node, part: int) -> fx.Node:
        """The same operator on one part. Parts may be one tensor, so that nothing may happen in place."""
        made = self._graph.node_copy(node, lambda source: self._parts[source][part])
        if node.op in ("call_module", "get_attr"):
            made.target = self._copy_module(node)
        if self._traced.kinds[node] == "channelwise":
            made.target = _OUT_OF_PLACE.get(node.target, node.target)
            made.kwargs = {**made.kwargs, "inplace": False} if "inplace" in made.kwargs else made.kwargs
        return made

    def _copy_module(self, node: fx.Node) -> str:
        """Copy what a node calls; a module that is called in place and out of place becomes two."""
        target = str(node.target)
        value = _attribute(self._traced.module, target)
        stays = self._traced.kinds[node] != "channelwise" and getattr(value, "inplace", False) is True
        name = f"{target}_in_place" if stays else target
        if name not in self._copied:
            self._copied.add(name)
            value = copy.deepcopy(value)
            if self._traced.kinds[node] == "channelwise" and hasattr(value, "inplace"):
                value.inplace = False
            _add(self._root, name, value)
        return name

    def _norm(self, node: fx.Node) -> Parts:
        norm, order = self._traced.layer(node), self._order(node)
        self._begin(node, norm.running_mean)
        scale, shift = affine_of(norm)
        sources = self._parts[node.all_input_nodes[0]]
        made = zip(order.split(scale.cpu()), order.split(shift.cpu()), sources, strict=True)
        return tuple(self._emit.affine(*values) for values in made)

    def _begin(self, node: fx.Node, like: Tensor) -> None:
        self._emit.begin(str(node.target), like, len(shape_of(node) or ()) - 2)

    def _layer(self, node: fx.Node) -> Parts:
        layer, source = self._traced.layer(node), node.all_input_nodes[0]
        self._begin(node, layer.epitome if isinstance(layer, ReuseLayer) else layer.weight)
        orders = self._order(source), self._order(node)
        made = emit_layer(self._emit, layer, self._parts[source], orders, self._affine(node, layer))
        if isinstance(layer, ReuseLayer):
            added = Counter(self._emit.added)
            counts = added["wrap"] + added["expand"], added["rotate"], added["norm"], "fold" in added
            self.rows.append(LaidOutLayer(str(node.target), orders[0].parts, orders[1].parts, *counts))
        return made

    def _affine(self, node: fx.Node, layer: Any) -> tuple[Tensor, Tensor]:
        """Scale and shift of a layer's output: its bias, then the batch norm that goes into it."""
        size = self._traced.spaces[node].size
        scale, shift = torch.ones(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        if layer.bias is not None:
            shift = layer.bias.detach().double().cpu()
        norm = self._norms.get(node)
        if norm is None:
            return scale, shift
        factor, offset = (value.cpu() for value in affine_of(self._traced.layer(norm)))
        return factor, factor * shift + offset


def _add(root: nn.Module, target: str, value: Any) -> None:
    *path, name = target.split(".")
    for step in path:
        if not hasattr(root, step):
            root.add_module(step, nn.Module())
        root = getattr(root, step)
    if not hasattr(root, name):
        setattr(root, name, value)


def _attribute(root: Any, target: str) -> Any:
    for step in target.split("."):
        root = getattr(root, step)
    return root
