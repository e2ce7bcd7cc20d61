"""Lay a deployed network out for runtimes: the same function, in operators that they run without copying."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from epitorch.cost._trace import as_arguments, quiet
from epitorch.deploy._layout_emit import Emitter, Parts, emit_layer
from epitorch.deploy._layout_graph import Space, Traced, affine_of, shape_of, trace_layout
from epitorch.deploy._layout_order import Order, choose_order
from epitorch.deploy._parity import check_parity
from epitorch.deploy.reuse import ReuseLayer
from epitorch.errors import InputError, explain


@dataclass(frozen=True)
class LaidOutLayer:
    """One layer with reuse.

    Args:
        name: Qualified name in the deployed network.
        parts_in: Tensors that hold its input.
        parts_out: Tensors that hold its output.
        mixes: 1x1 convolutions that it needs beside its own.
        norms: Scalings per channel that it needs.
    """

    name: str
    parts_in: int
    parts_out: int
    mixes: int
    norms: int


@dataclass(frozen=True)
class NetworkLayout:
    """What `lay_out` did.

    Args:
        layers: The layers that were rewritten.
        kept: Layers with reuse that stay as they were, by name: something around them is not known.
        difference: Largest difference to the deployed network on the example, over the largest output.
    """

    layers: tuple[LaidOutLayer, ...]
    kept: tuple[str, ...]
    difference: float


def lay_out(
    net: nn.Module, example_input: Tensor | tuple[Any, ...], *, permute: bool = True, split: bool = True
) -> fx.GraphModule:
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

    Returns:
        A graph of plain torch modules, in eval mode. Its attribute `layout` is the report (`NetworkLayout`).

    Raises:
        InputError: If `torch.fx` cannot trace the network.
        ParityError: If the outputs on the example differ.
    """
    arguments = as_arguments(example_input)
    with quiet(net), torch.no_grad():
        traced = _traced(net, arguments)
        writer = _Writer(traced, _orders(traced, permute, split))
        laid_out = writer.write()
        difference = check_parity(net(*arguments), laid_out(*arguments))
    layers = tuple(writer.rows)
    names = [name for name, module in net.named_modules() if isinstance(module, ReuseLayer)]
    kept = tuple(name for name in names if name not in {row.name for row in layers})
    setattr(laid_out, "layout", NetworkLayout(layers, kept, difference))  # noqa: B010 - not a tensor nor a module
    return laid_out


def _traced(net: nn.Module, arguments: tuple[Any, ...]) -> Traced:
    try:
        return trace_layout(net, arguments)
    except Exception as error:
        raise InputError(
            explain(
                "the network cannot be laid out",
                expected="a network that torch.fx.symbolic_trace can trace",
                got=f"{type(error).__name__}: {error}",
                fix="use the deployed network as it is",
            )
        ) from error


def _orders(traced: Traced, permute: bool, split: bool) -> dict[Space, Order]:
    return {space: choose_order(space, traced, permute=permute, split=split) for space in set(traced.spaces.values())}


class _Writer:
    """Writes the new graph, node by node."""

    def __init__(self, traced: Traced, orders: dict[Space, Order]) -> None:
        self._traced, self._orders = traced, orders
        self._graph, self._root = fx.Graph(), nn.Module()
        self._parts: dict[fx.Node, Parts] = {}
        self._emit = Emitter(self._root, self._graph, torch.empty(0))
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
        if node.op == "call_module" and not hasattr(self._root, str(node.target)):
            _add(self._root, str(node.target), self._traced.layer(node))
        if node.op == "get_attr":
            _add(self._root, str(node.target), _attribute(self._traced.module, str(node.target)))
        return self._graph.node_copy(node, lambda source: self._parts[source][part])

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
            mixes = added["wrap"] + added["expand"]
            self.rows.append(LaidOutLayer(str(node.target), orders[0].parts, orders[1].parts, mixes, added["norm"]))
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
