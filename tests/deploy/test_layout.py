"""Laying out for runtimes keeps the function: compared in float64 with the deployed and the trained network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import epitorch.nn as epi
from epitorch import deploy
from epitorch.deploy import NetworkLayout, lay_out
from epitorch.deploy._layout_order import copied, mixing_matrix, rotation, tiling
from epitorch.deploy.reuse import ReuseLayer, reuse_layer
from epitorch.errors import InputError
from epitorch.nn import EpitomeConv2d, EpitomeLayer
from reuse_cases import random_starts

EXACT = {"atol": 1e-10, "rtol": 1e-10}
STARTS = ("whole", "fractional", "mixed")


def epitome(in_: int, out: int, shape: tuple[int, int], starts: str, seed: int, **options: Any) -> EpitomeConv2d:
    layer = EpitomeConv2d(in_, out, 3, padding=1, epitome_shape=(*shape, 3, 3), index="fixed", **options)
    layer.set_starts(random_starts(layer.spec, starts, seed))
    return layer


def randomised(net: nn.Module, seed: int) -> nn.Module:
    """Float64, eval, batch norms that scale every channel differently."""
    torch.manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
    return net.double().eval()


class Residual(nn.Module):
    """Three epitome convolutions: one inside a branch, two that write a residual stream."""

    def __init__(self, width: int, shape: tuple[int, int], starts: str, seed: int, **options: Any) -> None:
        super().__init__()
        first, second, third = (epitome(width, width, shape, starts, seed + n, **options) for n in range(3))
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.first, self.norm1 = first, nn.BatchNorm2d(width)
        self.second, self.norm2 = second, nn.BatchNorm2d(width)
        self.third = third
        self.relu = nn.ReLU(inplace=True)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.relu(self.norm1(self.first(x)))
        y = self.norm2(self.second(y))
        y += x
        y = self.relu(y)
        y = self.relu(y + self.third(y))
        return self.head(torch.flatten(self.pool(y), 1))


def images(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reused(net: nn.Module) -> nn.Module:
    """Reuse in every layer, whether or not it saves operations."""
    net = copy.deepcopy(net)
    for name, layer in list(net.named_modules()):
        if isinstance(layer, EpitomeLayer):
            (out, in_), (filters, inputs) = layer.spec.weight_shape[:2], layer.spec.epitome_shape[:2]
            strategy = "both" if filters < out and inputs < in_ else "product_map" if filters < out else "wrapping"
            net.set_submodule(name, reuse_layer(layer, strategy))
    return net


def assert_same(trained: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    deployed = reused(trained)
    laid_out = lay_out(deployed, x, **options)
    other = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        for value in (x, other):
            expected = trained(value)
            assert expected.std() > 1e-3
            torch.testing.assert_close(deployed(value), expected, **EXACT)
            torch.testing.assert_close(laid_out(value), expected, **EXACT)
    return laid_out


@st.composite
def residuals(draw: st.DrawFn) -> tuple[nn.Module, dict[str, Any]]:
    width = draw(st.sampled_from([6, 8, 12]))
    group = draw(st.sampled_from([1, 1, 2]))
    sizes = st.sampled_from([n for n in (2, 4, width // 2, width) if n % group == 0])
    shape = draw(st.tuples(sizes, sizes).filter(lambda shape: shape != (width, width)))  # something to reuse
    options = {"group_length": group, "bias": draw(st.booleans())}
    if draw(st.booleans()):
        options["block_out"] = draw(st.integers(1, shape[0]))
        options["block_in"] = draw(st.integers(1, shape[1]))
    seed = draw(st.integers(0, 1000))
    net = Residual(width, shape, draw(st.sampled_from(STARTS)), seed, **options)
    how = {"permute": draw(st.booleans()), "split": draw(st.booleans())}
    return randomised(net, seed), how | {"rotate": draw(st.sampled_from(["convolution", "slices"]))}


@settings(max_examples=40, deadline=None)
@given(residuals())
def test_random_residual_networks(case: tuple[nn.Module, dict[str, Any]]) -> None:
    net, how = case
    layout = assert_same(net, images(), **how).layout
    assert isinstance(layout, NetworkLayout)
    assert len(layout.layers) == 3
    assert not layout.kept


@pytest.mark.parametrize("rotate", ["convolution", "slices"])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("shape", [(4, 16), (8, 16), (8, 8), (4, 4), (16, 8)])
def test_all_forms(shape: tuple[int, int], starts: str, rotate: str) -> None:
    assert_same(randomised(Residual(16, shape, starts, 3), 3), images(), rotate=rotate)


@pytest.mark.parametrize("what", ["epitome", "starts", "norm"])
def test_another_network_differs(what: str) -> None:
    trained = randomised(Residual(16, (8, 8), "fractional", 5), 5)
    with torch.no_grad():
        expected = trained(images())
        if what == "epitome":
            trained.first.epitome[1, 2, 1, 1] += 0.1
        elif what == "starts":
            trained.first.starts()["in"][1] += 0.01
        else:
            trained.norm2.running_mean[3] += 0.01
    other = lay_out(reused(trained), images())
    with torch.no_grad():
        assert (other(images()) - expected).abs().max() > 1e-6


def test_result_is_plain_and_apart_from_the_network() -> None:
    deployed = reused(randomised(Residual(16, (8, 8), "whole", 1), 1))
    before = {name: value.clone() for name, value in deployed.state_dict().items()}
    laid_out = lay_out(deployed, images())
    with torch.no_grad():
        expected = laid_out(images())
        for value in (*deployed.parameters(), *deployed.buffers()):
            assert value.dtype != torch.float64 or value.add_(1.0) is value
        torch.testing.assert_close(laid_out(images()), expected, atol=0, rtol=0)
    changed = [n for n, value in deployed.state_dict().items() if value.dtype == torch.float64 and "routing" not in n]
    assert len(changed) > 10
    assert all(not torch.equal(deployed.state_dict()[name], before[name]) for name in changed)
    leaves = [module for module in laid_out.modules() if not list(module.children())]
    assert all(type(module).__module__.startswith("torch.nn.modules") for module in leaves)
    assert not any(isinstance(module, ReuseLayer) for module in laid_out.modules())


@pytest.mark.parametrize("starts", STARTS)
def test_exports_to_operators_that_every_runtime_has(starts: str) -> None:
    laid_out = lay_out(reused(randomised(Residual(16, (8, 8), starts, 1), 1)), images())
    program = torch.export.export(laid_out, (images(),))
    operators = {str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"}
    plain = {"conv2d", "batch_norm", "relu", "add", "cat", "adaptive_avg_pool2d", "flatten", "linear"}
    assert {"conv2d", "add"} <= operators <= plain
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images()), laid_out(images()), **EXACT)


def functions(laid_out: nn.Module) -> set[str]:
    graph: Any = laid_out.graph
    return {str(getattr(node.target, "__name__", node.target)) for node in graph.nodes if node.op.startswith("call_")}


def test_a_snapped_branch_is_plain_tiling() -> None:
    """The branch's rotation goes into the weights around it; only one copy of the stream's needs mixing."""
    net = Residual(16, (8, 16), "whole", 2)
    for layer, starts in ((net.first, (0.0, 3.0)), (net.second, (1.0, 6.0)), (net.third, (2.0, 4.0))):
        layer.set_starts({"out": torch.tensor(starts)})
    deployed = reused(randomised(net, 2))
    mixes = [layer.mixes for layer in lay_out(deployed, images()).layout.layers]
    assert mixes[0] == 0
    assert sorted(mixes[1:]) == [0, 1]
    in_order = [layer.mixes for layer in lay_out(deployed, images(), permute=False).layout.layers]
    assert in_order == [1, 1, 1]
    sliced = lay_out(deployed, images(), rotate="slices").layout.layers
    assert [(layer.mixes, layer.rotations) for layer in sliced] == [(0, mix) for mix in mixes]


def test_equal_starts_need_no_mixing() -> None:
    net = Residual(16, (4, 4), "whole", 2)
    for layer in (net.first, net.second, net.third):
        layer.set_starts(net.first.starts())
        layer.set_starts({"out": torch.tensor([1.0, 3, 0, 2]), "in": torch.tensor([1.0, 3, 0, 2])})
    layout = assert_same(randomised(net, 2), images()).layout
    assert [layer.mixes for layer in layout.layers] == [0, 0, 0]
    assert [layer.parts_in for layer in layout.layers] == [4, 4, 4]


def test_wrapped_channels_are_never_cut() -> None:
    deployed = reused(randomised(Residual(16, (8, 8), "fractional", 4), 4))
    assert "narrow" not in functions(lay_out(deployed, images()))
    whole = reused(randomised(Residual(16, (8, 8), "whole", 4), 4))
    assert "narrow" in functions(lay_out(whole, images(), split=False))


def test_ill_conditioned_starts_and_dead_channels() -> None:
    """Half-way starts cannot be undone, nor can a batch norm's zero scale: both take the way without."""
    net: Any = randomised(Residual(16, (8, 8), "fractional", 6), 6)
    with torch.no_grad():
        for layer in (net.first, net.second):
            layer.set_starts({axis: torch.full_like(value, 2.5) for axis, value in layer.starts().items()})
        net.norm1.weight[::3] = 0
        net.norm2.weight[::3] = 0
    assert_same(net, images())


def test_no_denormal_weights_in_float32() -> None:
    net = randomised(Residual(256, (128, 128), "fractional", 7), 7).float()
    with torch.no_grad():
        for layer in (net.first, net.second, net.third):
            layer.set_starts({axis: torch.tensor([3.25, 9.375]) for axis in layer.starts()})
    laid_out = lay_out(reused(net), images().float())
    smallest = min(float(p[p != 0].abs().min()) for p in laid_out.parameters() if bool((p != 0).any()))
    assert smallest > 1e-30


# ---- what is around the layers ----


def small(out: int = 8) -> EpitomeConv2d:
    return epitome(8, out, (4, 4), "mixed", 8)


class Around(nn.Module):
    """A layer, a function, a layer."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 1), small(), small()
        self.norm = nn.BatchNorm2d(8)
        self.gain = nn.Parameter(torch.rand(1, 8, 1, 1) + 0.5)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(self.stem(x))))


def shuffled(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1::2], x[:, ::2]], 1)


def changed_in_place(x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    x += y
    return x * y


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "activation": torch.sigmoid,
    "in-place activation": lambda x: nn.functional.silu(x, inplace=True),
    "pool": lambda x: nn.functional.max_pool2d(x, 2),
    "gate": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "shuffle": shuffled,
    "softmax": lambda x: x.softmax(1),
    "twice": lambda x: x + x,
    "size": lambda x: x.view(x.size(0), 8, x.size(2), x.size(3)),
    "changed in place": changed_in_place,
    "used before it is changed": lambda x: torch.sigmoid(x) + x.relu_(),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between(name: str) -> None:
    torch.manual_seed(0)
    assert_same(Around(BETWEEN[name]).double().eval(), images())


class Odd(nn.Module):
    """Layers in places that this code leaves alone, or that differ from a ResNet's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stem, self.layer, self.last = nn.Conv2d(3, 8, 1), small(), small()
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.gain = nn.Parameter(torch.rand(1, 8, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        if self.kind == "norm first":
            return self.last(self.norm(torch.relu(self.layer(x)) + x))
        if self.kind == "called twice":
            return self.last(self.layer(torch.relu(self.layer(x))))
        if self.kind == "two outputs":
            y = self.layer(x)
            return y, self.last(torch.relu(y))
        if self.kind == "parameter":
            return self.last(self.layer(x) * self.gain)
        return self.last(self.depthwise(self.layer(x)))


@pytest.mark.parametrize("kind", ["norm first", "called twice", "two outputs", "parameter", "depthwise"])
def test_odd_networks(kind: str) -> None:
    net = randomised(Odd(kind), 9)
    deployed = reused(net)
    laid_out = lay_out(deployed, images())
    with torch.no_grad():
        torch.testing.assert_close(laid_out(images(3)), net(images(3)), **EXACT)
    kept = ("layer",) if kind == "called twice" else ()
    assert laid_out.layout.kept == kept
    assert [row.name for row in laid_out.layout.layers] == [n for n in ("layer", "last") if n not in kept]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = small()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_a_network_that_does_not_trace_stays_as_it_is() -> None:
    deployed = deploy(Branching().eval(), torch.ones(1, 8, 5, 5))
    laid_out = lay_out(deployed, torch.ones(1, 8, 5, 5))
    assert laid_out is not deployed
    assert isinstance(laid_out, Branching)
    assert laid_out.layout.kept == ("layer",)
    assert "torch.fx cannot trace it" in str(laid_out.layout.refused)


@pytest.mark.parametrize("dims", [1, 3])
def test_other_dimensions(dims: int) -> None:
    make, shape = getattr(epi, f"EpitomeConv{dims}d"), (4, 4, *[3] * dims)
    torch.manual_seed(1)
    net = nn.Sequential(
        make(8, 8, 3, padding=1, epitome_shape=shape, index="fixed"),
        getattr(nn, f"BatchNorm{dims}d")(8),
        nn.ReLU(),
        make(8, 8, 3, stride=2, padding=1, dilation=2, epitome_shape=shape, index="fixed"),
    )
    laid_out = assert_same(net.double().eval(), torch.randn(2, 8, *[6] * dims, dtype=torch.float64))
    assert len(laid_out.layout.layers) == 2


def test_an_unknown_rotation_is_refused() -> None:
    with pytest.raises(InputError, match="convolution \\| slices"):
        lay_out(nn.Conv2d(3, 4, 1), images().float(), rotate="gather")  # type: ignore[arg-type]


def test_a_layer_whose_mixing_costs_as_much_as_the_dense_weight_is_folded() -> None:
    def network(starts: str) -> nn.Module:
        layer = EpitomeConv2d(8, 32, 1, epitome_shape=(8, 8, 1, 1), index="fixed")
        layer.set_starts(random_starts(layer.spec, starts, 1))
        return randomised(nn.Sequential(nn.Conv2d(3, 8, 1), layer, nn.BatchNorm2d(32), nn.Conv2d(32, 4, 1)), 1)

    (fractional,) = assert_same(network("fractional"), images()).layout.layers
    assert fractional.folded
    assert fractional.mixes == 0
    (whole,) = assert_same(network("whole"), images()).layout.layers
    assert not whole.folded


# ---- the matrices ----


def test_mixing_matrices_make_the_weight() -> None:
    layer = epitome(9, 10, (4, 6), "mixed", 1, block_out=3, block_in=5).double()
    reuse = reuse_layer(layer, "both")
    a_out, a_in = mixing_matrix(reuse, "out"), mixing_matrix(reuse, "in")
    assert a_out is not None
    assert a_in is not None
    weight = torch.einsum("no,oihw,mi->nmhw", a_out, layer.epitome, a_in)
    torch.testing.assert_close(weight, layer.weight, **EXACT)
    assert mixing_matrix(reuse_layer(layer, "product_map"), "in") is None


def test_copies_and_tilings_are_told_apart() -> None:
    rolled = torch.eye(3).roll(1, 0)
    twice = torch.cat([rolled, rolled])
    assert tiling(twice).tolist() == [2, 0, 1]  # type: ignore[union-attr]
    assert tiling(torch.cat([rolled, torch.eye(3)])) is None
    assert copied(torch.cat([rolled, torch.eye(3)])).tolist() == [2, 0, 1, 0, 1, 2]  # type: ignore[union-attr]
    assert copied(torch.lerp(rolled, torch.eye(3), 0.5)) is None
    assert tiling(torch.tensor([[1.0, 0], [1, 0]])) is None
    assert rotation(torch.eye(5).roll(2, 1)) == 2
    assert rotation(torch.eye(5)[[1, 0, 2, 3, 4]]) is None
    assert rotation(twice) is None
