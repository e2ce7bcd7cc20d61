"""Trace a deployed network and find which of its activations share one order of channels.

Channels of an activation may be stored in any order, and in several tensors, as long as everything that touches
them agrees. A *space* is a set of activations bound to the same order: operators that work channel by channel bind
their inputs to their output, a plain convolution binds nothing, since its weight can be reordered.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from epitorch.cost._trace import as_arguments, tensors
from epitorch.deploy.reuse_layers import ReuseConv, ReuseLayer

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CHANNELWISE_MODULES = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Mish),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_CHANNELWISE_FUNCTIONS: tuple[Any, ...] = (
    *(F.relu, torch.relu, F.relu6, F.silu, F.gelu, F.hardswish, torch.sigmoid, F.dropout),
    *("relu", "relu_", "sigmoid", "contiguous"),
)
_POOLS_2D: tuple[Any, ...] = (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d)
_ARITHMETIC: tuple[Any, ...] = (operator.add, operator.iadd, operator.mul, operator.imul, torch.add, torch.mul)
_TO_VECTORS: tuple[Any, ...] = (torch.flatten, "flatten", torch.mean, "mean")
_MEANS: tuple[Any, ...] = (torch.mean, "mean")
_IN_PLACE: tuple[Any, ...] = (operator.iadd, operator.imul, "relu_")


@dataclass(frozen=True, eq=False)
class Space:
    """Activations with one order of channels.

    Args:
        size: Channels.
        fixed: Something reads or writes them that this code does not know: the order must stay.
        producers: Nodes of convolutions and linear layers that write them.
        consumers: Nodes of convolutions and linear layers that read them.
    """

    size: int
    fixed: bool
    producers: tuple[fx.Node, ...]
    consumers: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class Traced:
    """A network as a graph.

    Args:
        module: The graph and its modules.
        spaces: Space of every node that is one tensor with a channel axis.
        kinds: What each node is: "layer", "norm", "channelwise" or "other".
        folded: Batch norms that go into the layer before them, by node.
    """

    module: fx.GraphModule
    spaces: dict[fx.Node, Space]
    kinds: dict[fx.Node, str]
    folded: dict[fx.Node, fx.Node]

    def layer(self, node: fx.Node) -> Any:
        """The module that a node calls."""
        return self.module.get_submodule(str(node.target))


def _in_place_operator(operate: Any) -> Any:
    def call(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operate, (self, other), {})

    return call


class _Proxy(fx.Proxy):
    """Keeps `x += y` as it is; torch's own makes `x = x + y` of it, which others that hold x do not see."""


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "iand", "ior", "ixor", "ipow"):
    setattr(_Proxy, f"__{_name}__", _in_place_operator(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, ReuseLayer) or super().is_leaf_module(m, module_qualified_name)


class _Run(ShapeProp):
    """Runs the graph and notes whose memory each node's output is in, and which nodes write into their input."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.memory: dict[fx.Node, set[int]] = {}
        self.writes: set[fx.Node] = set()
        self._alive: list[Any] = []  # memory that is given back would be taken for another node's

    def run_node(self, n: fx.Node) -> Any:
        sources = [tensor for source in n.all_input_nodes for tensor in tensors(self.env[source])]
        versions = [tensor._version for tensor in sources]
        result = super().run_node(n)
        if versions != [tensor._version for tensor in sources]:
            self.writes.add(n)
        self._alive.append(result)
        self.memory[n] = {tensor.untyped_storage().data_ptr() for tensor in tensors(result)}
        return result

    def kept_in_place(self) -> set[fx.Node]:
        """Nodes that must write into their input, since something else sees it: another reader, or the caller."""
        return {node for node in self.writes if not self._is_private(node)}

    def _is_private(self, node: fx.Node) -> bool:
        """Whether nothing reads later what shares the memory before the node, and none of it is the caller's."""
        if not _in_place(node, self.module):
            return False
        memory = set().union(*(self.memory[source] for source in node.all_input_nodes[:1]))
        before = [n for n in self.memory if n < node and self.memory[n] & memory]
        late = any(node < user for n in before for user in n.users)
        return not late and all(n.op not in ("placeholder", "get_attr") for n in before)


def trace_layout(net: nn.Module, arguments: tuple[Any, ...]) -> Traced:
    """Trace a network in eval mode and find its spaces.

    Args:
        net: A deployed network; it stays as it is.
        arguments: Its example arguments.

    Raises:
        Exception: Whatever `torch.fx` raises on a network that does not trace.
    """
    tracer = _Tracer()
    module = fx.GraphModule(net, tracer.trace(net)).eval()
    with torch.no_grad():
        run = _Run(module)
        run.propagate(*as_arguments(arguments))
    calls = Counter(node.target for node in module.graph.nodes if node.op == "call_module")
    stays = run.kept_in_place()
    kinds = {node: "other" if node in stays else _kind(node, module, calls) for node in module.graph.nodes}
    folded = {n: n.all_input_nodes[0] for n, kind in kinds.items() if kind == "norm" and _folds(n, kinds)}
    return Traced(module, _spaces(module.graph.nodes, kinds), kinds, folded)


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Shape of the tensor that a node makes on the example; None if it makes something else."""
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return None if shape is None else tuple(shape)


def _kind(node: fx.Node, module: fx.GraphModule, calls: Counter[Any]) -> str:
    shapes = [shape_of(n) for n in (node, *node.all_input_nodes)]
    if node.op not in ("call_module", "call_function", "call_method"):
        return "other"
    if len(shapes) < 2 or any(shape is None or len(shape) < 2 for shape in shapes):
        return "other"
    if node.op == "call_module":
        return _kind_of_module(node, module.get_submodule(str(node.target)), calls[node.target])
    return "channelwise" if _function_is_channelwise(node, [s for s in shapes if s is not None]) else "other"


def _function_is_channelwise(node: fx.Node, shapes: list[tuple[int, ...]]) -> bool:
    if node.target in _TO_VECTORS:
        return len(shapes) == 2 and _keeps_channels(node)
    if node.target in _POOLS_2D:
        return len(shapes[1]) == 4
    if node.target in _CHANNELWISE_FUNCTIONS:
        return len(shapes) == 2
    return node.target in _ARITHMETIC and len({(len(shape), shape[1]) for shape in shapes}) == 1


def _in_place(node: fx.Node, module: Any) -> bool:
    """Whether this is an operator that can be written out of place as well."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    return node.target in _IN_PLACE or bool(node.kwargs.get("inplace"))


def _kind_of_module(node: fx.Node, layer: nn.Module, calls: int) -> str:
    source = node.all_input_nodes[0]
    if len(node.args) != 1 or node.kwargs or _has_hooks(layer):
        return "other"
    if isinstance(layer, nn.Flatten):
        return "channelwise" if layer.start_dim == 1 and _keeps_channels(node) else "other"
    if type(layer) in _CHANNELWISE_MODULES:
        digits = [int(c) for c in type(layer).__name__ if c in "123"]  # a 2-D pool takes three axes for one sample
        dims = len(shape_of(source) or ())
        return "channelwise" if dims in [d + 2 for d in digits or [dims - 2]] else "other"
    if calls > 1:
        return "other"
    if type(layer) in _NORMS and layer.running_mean is not None:
        return "norm"
    return "layer" if _is_known_layer(node, layer) else "other"


def _is_known_layer(node: fx.Node, layer: Any) -> bool:
    dims = len(shape_of(node.all_input_nodes[0]) or ())
    if type(layer) is nn.Linear:
        return dims == 2
    if not (type(layer) is ReuseConv or type(layer) in _CONVOLUTIONS):
        return False
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and dims == 2 + len(layer.kernel_size)
    return plain and (type(layer) in _CONVOLUTIONS or _mixes_channels(layer))


def _mixes_channels(layer: ReuseConv) -> bool:
    """Whether the layer is a convolution between A_in^T and A_out over its channels."""
    known = layer.strategy in ("product_map", "wrapping", "both") and layer.spec.channel_starts == "separable"
    return known and (layer.strategy == "product_map" or layer.spec.weight_shape[1] == layer.in_channels)


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _keeps_channels(node: fx.Node) -> bool:
    """Samples and channels stay as they are, one position is left: a flattening of 1x1 or a mean over positions."""
    before, after = shape_of(node.all_input_nodes[0]), shape_of(node)
    if before is None or after is None or after[:2] != before[:2] or len(after) not in (2, len(before)):
        return False
    if node.target in _MEANS:
        return _axes(node, len(before)) == list(range(2, len(before)))
    starts = node.op == "call_module" or _argument(node, 1, "start_dim") == 1  # a module's was looked at
    return starts and all(n == 1 for n in (*after[2:], *before[2:]))


def _axes(node: fx.Node, dims: int) -> list[int] | None:
    """Axes that a mean is over, not sizes: channels may be as many as columns."""
    given = _argument(node, 1, "dim")
    axes = given if isinstance(given, tuple | list) else [given]
    return sorted(axis % dims for axis in axes) if all(type(axis) is int for axis in axes) else None


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _folds(norm: fx.Node, kinds: dict[fx.Node, str]) -> bool:
    source = norm.all_input_nodes[0]
    return kinds[source] == "layer" and len(source.users) == 1


class _Sets:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node

    def join(self, a: fx.Node, b: fx.Node) -> None:
        self._parent[self.find(a)] = self.find(b)


def _spaces(nodes: Iterable[fx.Node], kinds: dict[fx.Node, str]) -> dict[fx.Node, Space]:
    sets, fixed = _Sets(), set()
    nodes = list(nodes)
    for node in nodes:
        if kinds[node] in ("channelwise", "norm"):
            for source in node.all_input_nodes:
                sets.join(source, node)
    for node in nodes:
        if kinds[node] == "other":
            fixed |= {sets.find(n) for n in (node, *node.all_input_nodes)}
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        shape = shape_of(node)
        if shape is not None and len(shape) > 1:
            groups.setdefault(sets.find(node), []).append(node)
    return {
        node: space
        for root, group in groups.items()
        for space in [_space(group, root in fixed, kinds)]
        for node in group
    }


def _space(group: list[fx.Node], fixed: bool, kinds: dict[fx.Node, str]) -> Space:
    shape = shape_of(group[0])
    assert shape is not None
    producers = tuple(node for node in group if kinds[node] == "layer")
    consumers = tuple(user for node in group for user in node.users if kinds[user] == "layer")
    return Space(shape[1], fixed, producers, consumers)


def affine_of(norm: Any) -> tuple[Tensor, Tensor]:
    """Scale and shift per channel of a batch norm in eval mode, in float64."""
    mean, variance = norm.running_mean.detach().double(), norm.running_var.detach().double()
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()
