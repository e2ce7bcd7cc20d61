"""Reuse modules against the trained layer, over all options; what they execute, hold and never make."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import reference
from epitorch.conversion import convert_
from epitorch.cost.analysis import interpolated_of
from epitorch.cost.formulas import STRATEGIES, Geometry, executed, why_not
from epitorch.deploy.reuse import ReuseLayer, ReuseStrategy, reuse_layer
from epitorch.errors import InputError, ShapeError, StartsError
from epitorch.nn import EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLayer, EpitomeLinear
from epitorch.plans import LayerPlan, Plan
from operator_count import Operators, Sizes
from reuse_cases import KINDS, Case, cases, geometry


def made(layer: EpitomeLayer, strategy: Any) -> ReuseLayer:
    return reuse_layer(copy.deepcopy(layer), strategy)


def difference(expected: Tensor, got: Tensor) -> float:
    expected, got = expected.detach(), got.detach()
    assert expected.shape == got.shape
    if expected.numel() == 0:
        return 0.0
    return float((expected - got).abs().max() / expected.abs().max().clamp_min(1e-30))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.data())
def test_equals_the_trained_layer_and_executes_what_the_formulas_say(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    layer, x = case.layer(), case.input()
    with torch.no_grad():
        expected = layer(x)
    where = geometry(layer, case.shape, tuple(expected.shape))
    for strategy in applicable(layer, where):
        net = made(layer, strategy)
        with torch.no_grad(), Operators() as operators:
            got = net(x)
        assert difference(expected, got) < 1e-12, strategy
        cost = executed(layer.spec, where, strategy, interpolated_of(layer))
        assert operators.multiply_adds == case.shape[0] * cost.multiply_adds, strategy
        assert operators.interpolation == case.shape[0] * cost.interpolation, strategy


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data())
def test_equals_the_trained_layer_in_float32(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    layer, x = case.layer(torch.float32), case.input(torch.float32)
    with torch.no_grad():
        expected = layer(x)
        for strategy in applicable(layer, geometry(layer, case.shape, tuple(expected.shape))):
            assert difference(expected, made(layer, strategy)(x)) < 1e-5, strategy


def applicable(layer: EpitomeLayer, where: Geometry) -> list[Any]:
    """Strategies that apply; the others are declined by name."""
    found = [strategy for strategy in STRATEGIES[:-1] if why_not(layer.spec, where, strategy) is None]
    for strategy in set(STRATEGIES[:-1]) - set(found):
        with pytest.raises(
            InputError, match=f"{strategy}.* does not apply(.|\n)*{why_not(layer.spec, where, strategy)}"
        ):
            made(layer, strategy)
    return found


GRID = [
    Case("Conv2d", (6, 16, 3), {"padding": 1, "epitome_shape": (5, 6, 3, 3)}, (2, 6, 5, 5), "fractional", 1),
    Case("Conv2d", (13, 4, 3), {"stride": 2, "epitome_shape": (4, 5, 3, 3)}, (2, 13, 6, 5), "mixed", 2),
    Case("Conv2d", (8, 12, (3, 2)), {"epitome_shape": (5, 3, 4, 1)}, (1, 8, 6, 6), "fractional", 3),
    Case(
        "Conv1d",
        (8, 18, 3),
        {"groups": 2, "epitome_shape": (4, 4, 3), "block_out": 3},
        (2, 8, 7),
        "fractional",
        4,
    ),
    Case(
        "Conv1d",
        (16, 6, 3),
        {"groups": 2, "epitome_shape": (6, 4, 4), "spatial_starts": "out", "block_out": 2},
        (2, 16, 7),
        "fractional",
        5,
    ),
    Case("Linear", (17, 20), {"epitome_shape": (8, 6), "group_length": 2}, (3, 17), "fractional", 6),
    Case(
        "Conv1d",
        (4, 12, 4),
        {"epitome_shape": (1, 4, 15), "spatial_starts": "out", "stride": 2},
        (2, 4, 9),
        "fractional",
        10,
    ),
    Case(
        "Conv2d",
        (4, 8, 3),
        {"epitome_shape": (3, 2, 5, 4), "spatial_starts": "grid", "block_in": 1, "groups": 2, "padding": 1},
        (1, 4, 5, 4),
        "mixed",
        11,
    ),
    Case("Conv2d", (3, 12, 3), {"padding": 1, "epitome_shape": (4, 3, 4, 5)}, (1, 3, 5, 5), "fractional", 9),
]


def test_grid_has_one_spatial_start_shared_by_all_blocks() -> None:
    assert GRID[-1].layer().spec.start_shapes["spatial"] == (1, 2)


def slow_output(layer: Any, case: Case) -> Tensor:
    """Convolution in loops with the weight of the literal reference; no code of the library."""
    spec = layer.spec
    layout = reference.Layout(
        spec.weight_shape,
        spec.epitome_shape,
        spec.block_out,
        spec.block_in,
        spec.spatial_starts,
        spec.channel_starts,
        spec.group_length,
    )
    starts = {axis: value.detach().numpy() for axis, value in layer.starts().items()}
    weight = reference.sample_weight(layer.epitome.detach().numpy(), starts, layout)
    bias = layer.bias.detach()
    x = case.input()
    if case.kind == "Linear":
        return x @ torch.from_numpy(weight).t() + bias
    pad = case.options.get("padding", 0)
    padded = F.pad(x, (pad, pad) * (x.dim() - 2)).numpy()
    stride, groups = case.options.get("stride", 1), case.options.get("groups", 1)
    samples = [reference.convolve(sample, weight, stride=stride, groups=groups) for sample in padded]
    return torch.from_numpy(np.stack(samples)) + bias.view(-1, *[1] * (x.dim() - 2))


@pytest.mark.parametrize("case", GRID, ids=lambda case: f"{case.kind}-{case.seed}")
def test_equals_literal_loops(case: Case) -> None:
    layer = case.layer()
    expected = slow_output(layer, case)
    where = geometry(layer, case.shape, tuple(expected.shape))
    strategies = applicable(layer, where)
    assert strategies
    for strategy in strategies:
        net = made(layer, strategy)
        assert difference(expected, net(case.input())) < 1e-12
        with torch.no_grad():  # negative control
            net.epitome[0, 0] += 0.01
            net.refresh()
        assert difference(expected, net(case.input())) > 1e-6


LAYERS = {
    "product_map": EpitomeConv2d(32, 64, 3, padding=1, epitome_shape=(16, 32, 3, 3)),
    "wrapping": EpitomeConv2d(64, 32, 3, padding=1, epitome_shape=(32, 16, 3, 3)),
    "both": EpitomeConv2d(64, 64, 3, padding=1, epitome_shape=(16, 16, 3, 3)),
    "diagonals": EpitomeConv2d(32, 64, 3, padding=1, epitome_shape=(8, 32, 4, 4), spatial_starts="out"),
    "integral": EpitomeConv2d(32, 64, 3, padding=1, epitome_shape=(8, 32, 4, 4), spatial_starts="out"),
    "wrapped_diagonals": EpitomeConv2d(32, 64, 3, padding=1, epitome_shape=(8, 16, 4, 5), spatial_starts="out"),
    "wrapped_integral": EpitomeConv2d(32, 64, 3, padding=1, epitome_shape=(8, 16, 4, 5), spatial_starts="out"),
}


@pytest.mark.parametrize("strategy", LAYERS)
def test_the_dense_weight_is_never_made(strategy: ReuseStrategy) -> None:
    layer = LAYERS[strategy].eval()
    dense, x = layer.spec.num_weight, torch.randn(1, layer.in_channels, 2, 2)
    ours = copy.deepcopy(layer)
    with torch.no_grad(), Sizes() as sizes:
        reuse_layer(ours, strategy)(x)
    assert 0 < max(sizes.seen) < dense
    with torch.no_grad(), Sizes() as sizes:  # negative control: folding does make it
        layer.to_dense()(x)
    assert dense in sizes.seen


@pytest.mark.parametrize("strategy", LAYERS)
def test_float32(strategy: ReuseStrategy) -> None:
    layer = LAYERS[strategy].eval()
    x = torch.randn(2, layer.in_channels, 6, 6)
    with torch.no_grad():
        assert difference(layer(x), made(layer, strategy)(x)) < 1e-5


@pytest.mark.parametrize("strategy", LAYERS)
def test_state_holds_the_epitome_the_map_and_the_bias_only(strategy: ReuseStrategy) -> None:
    net = made(LAYERS[strategy], strategy)
    maps = {f"routing_map.{axis}_starts" for axis in net.spec.start_shapes}
    assert set(net.state_dict()) == {"epitome", "bias", "routing_map.frozen"} | maps
    assert net.state_dict()["epitome"].shape == LAYERS[strategy].epitome.shape


def test_loading_a_state_renews_what_was_made_of_it() -> None:
    first, second = (Case(c.kind, c.args, c.options, c.shape, c.starts, s) for c, s in ((GRID[2], 7), (GRID[2], 8)))
    a, b = made(first.layer(), "product_map"), made(second.layer(), "product_map")
    x = first.input()
    assert difference(a(x), b(x)) > 1e-3
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))


def test_starts_that_are_not_finite() -> None:
    layer = EpitomeLinear(4, 16, epitome_shape=(4, 4), index="fixed")
    with torch.no_grad():
        layer.starts()["out"][0] = float("nan")
    with pytest.raises(StartsError, match="EpitomeLinear"):
        reuse_layer(layer, "product_map")
    net = made(LAYERS_OF_ONE["old"], "product_map")
    state = net.state_dict() | {"routing_map.out_starts": torch.full((4,), float("inf"))}
    before = net.starts()["out"].clone()
    with pytest.raises(RuntimeError, match=r"routing_map.out_starts: expected"):
        net.load_state_dict(state)
    assert torch.equal(net.starts()["out"], before)


def test_a_trained_layers_state_without_learner_loads() -> None:
    layer = EpitomeConv2d(8, 32, 1, epitome_shape=(8, 8, 1, 1)).eval()
    net = made(LAYERS_OF_ONE["old"], "product_map")
    state = {key: value for key, value in layer.state_dict().items() if not key.startswith("learner.")}
    net.load_state_dict(state, strict=True)
    x = torch.randn(2, 8, 3, 3)
    torch.testing.assert_close(net(x), layer(x))


LAYERS_OF_ONE = {"old": EpitomeConv2d(8, 32, 1, epitome_shape=(8, 8, 1, 1), index="fixed")}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies(copier: Any) -> None:
    net = made(GRID[1].layer(), "wrapping")
    twin, x = copier(net), GRID[1].input()
    assert torch.equal(net(x), twin(x))
    with torch.no_grad():
        twin.epitome.add_(1.0)
        twin.load_state_dict(twin.state_dict())
    assert not torch.allclose(net(x), twin(x))
    torch.save(net, io.BytesIO())


@pytest.mark.parametrize(
    "case, strategy",
    [(GRID[0], "product_map"), (GRID[1], "wrapping"), (GRID[5], "both"), (GRID[6], "diagonals"), (GRID[6], "integral")],
)
def test_exports(case: Case, strategy: ReuseStrategy) -> None:
    net, x = made(case.layer(), strategy), case.input()
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x), net(x))
    kernel_size = net.spec.num_weight
    assert all(value.numel() < kernel_size for value in program.state_dict.values())


@pytest.mark.parametrize("strategy", ["diagonals", "integral"])
def test_output_size_on_diagonals(strategy: ReuseStrategy) -> None:
    options: dict[str, Any] = {"dilation": 2, "spatial_starts": "out", "epitome_shape": (6, 4, 4, 5)}
    layer = EpitomeConvTranspose2d(6, 12, 3, padding=1, **options).double().eval()
    net, x = made(layer, strategy), torch.randn(2, 6, 4, 5, dtype=torch.float64)
    for size in ([6, 7], [7, 7], (2, 12, 7, 8)):
        assert difference(layer(x, output_size=size), net(x, output_size=size)) < 1e-12
    with pytest.raises(ShapeError, match="output_size"):
        net(x, output_size=[30, 30])


@pytest.mark.parametrize("shape", [(2, 33, 5, 5), (2, 32, 5), (32, 1, 5), (2, 32, 5, 0)])
def test_an_input_that_does_not_fit_the_diagonals(shape: tuple[int, ...]) -> None:
    layer = EpitomeConv2d(32, 16, 3, epitome_shape=(8, 32, 4, 4), spatial_starts="in", block_in=8)
    with pytest.raises(ShapeError, match=r"32 channels, and space for a kernel of \(3, 3\)"):
        reuse_layer(layer, "diagonals")(torch.zeros(shape))


def test_a_strategy_that_is_not_known() -> None:
    layer: Any = LAYERS["diagonals"]
    for strategy in ("integrals", "folded"):
        with pytest.raises(InputError, match=f"strategy is not known(.|\\n)*{strategy}"):
            reuse_layer(layer, strategy)  # type: ignore[arg-type]


def test_a_layer_with_a_forward_of_its_own() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Scaled(8, 16, 3))
    convert_(model, Plan({"0": LayerPlan((4, 8, 3, 3))}))
    with pytest.raises(InputError, match=r"only the folded layer(.|\n)*a forward of its own"):
        reuse_layer(model[0], "product_map")  # type: ignore[arg-type]


def test_output_size_of_a_transposed_convolution() -> None:
    layer = EpitomeConvTranspose2d(6, 12, 3, stride=2, padding=1, epitome_shape=(6, 4, 3, 3)).double().eval()
    net, x = made(layer, "product_map"), torch.randn(2, 6, 4, 5, dtype=torch.float64)
    for size in ([7, 9], [8, 10], (2, 12, 8, 9)):
        assert difference(layer(x, output_size=size), net(x, output_size=size)) < 1e-12
    assert net(x, output_size=[8, 10]).shape[-2:] == (8, 10)
    with pytest.raises((RuntimeError, ValueError)):
        net(x, output_size=[30, 30])


@pytest.mark.parametrize("strategy", LAYERS)
def test_unbatched_and_channels_last(strategy: ReuseStrategy) -> None:
    layer = LAYERS[strategy].eval()
    net, x = made(layer, strategy), torch.randn(2, layer.in_channels, 5, 4)
    with torch.no_grad():
        torch.testing.assert_close(net(x)[0], net(x[0]), rtol=1e-4, atol=1e-5)
        last = net(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(last, net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", LAYERS)
def test_autocast_and_bfloat16(strategy: ReuseStrategy) -> None:
    net = made(LAYERS[strategy], strategy)
    x = torch.randn(2, LAYERS[strategy].in_channels, 4, 4)
    with torch.no_grad():
        exact = net(x)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = net(x)
        narrow = copy.deepcopy(net).to(torch.bfloat16)(x.bfloat16())
    assert mixed.dtype == narrow.dtype == torch.bfloat16
    assert difference(exact, mixed.float()) < 0.05
    assert difference(exact, narrow.float()) < 0.05
    starts = copy.deepcopy(net).to(torch.bfloat16).starts()
    assert {value.dtype for value in starts.values()} == {torch.float32}


@pytest.mark.parametrize("case, strategy", [(GRID[5], "both"), (GRID[6], "diagonals"), (GRID[7], "integral")])
def test_gradients_reach_the_input(case: Case, strategy: ReuseStrategy) -> None:
    layer, x = case.layer(), case.input().requires_grad_()
    net = made(layer, strategy)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    (got,) = torch.autograd.grad(net(x).square().sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(1, 6), st.integers(0, 100))
def test_a_shared_epitome_stays_shared(size: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(EpitomeLinear(8, 8, epitome_shape=(size, 8), index="fixed") for _ in range(2)))
    model[1].epitome = model[0].epitome
    nets = [reuse_layer(layer, "product_map") for layer in model]
    assert nets[0].epitome is nets[1].epitome
