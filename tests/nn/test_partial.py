"""Starts per pair of blocks on one channel axis: where they begin, and layers that share partial products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import epitorch
from epitorch.cost.analysis import declined_by
from epitorch.deploy.reuse import reuse_layer
from epitorch.deploy.reuse_layers import ReusePartialConv
from epitorch.errors import ConversionError, InputError
from epitorch.functional import sample_weight
from epitorch.init import evenly_spread
from epitorch.models.mobilenetv2 import mobilenetv2
from epitorch.models.resnet import resnet20
from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeConv3d, EpitomeLinear
from epitorch.plans._table import rank_bounds
from epitorch.spec import EpitomeSpec

# ---- where they begin ----


@given(
    st.sampled_from(["out", "in"]), st.integers(2, 9), st.integers(2, 9), st.integers(2, 12), st.sampled_from([1, 2])
)
@settings(deadline=None)
def test_no_block_is_a_turned_copy_of_another(axis: str, own: int, other: int, places: int, group: int) -> None:
    """Seen from one block of the other axis all blocks may be turned alike; seen from all of them no two are."""
    size = places * group
    shapes = ((own * size, other), (size, other), {"block_in": 1})
    if axis == "in":
        shapes = ((other, own * size), (other, size), {"block_out": 1})
    spec = EpitomeSpec.create(*shapes[:2], **shapes[2], channel_starts=f"grid_{axis}", group_length=group)
    starts = evenly_spread(spec, whole=True)[axis]  # type: ignore[index]
    assert starts.shape == (spec.num_out_blocks, spec.num_in_blocks)
    assert ((starts % group == 0) & (starts >= 0) & (starts < size)).all()
    by_block = starts if axis == "out" else starts.t()
    turns = (by_block - by_block[:, :1]) % size
    assert len(turns.unique(dim=0)) == min(spec.num_out_blocks * spec.num_in_blocks // other, places ** (other - 1))


@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("group", [1, 4])
def test_learned_starts_begin_between_positions_within_reach(axis: str, group: int) -> None:
    shapes = ((32, 16), (8, 16)) if axis == "out" else ((16, 32), (16, 8))
    block = {"block_in": 4} if axis == "out" else {"block_out": 4}
    spec = EpitomeSpec.create(*shapes, **block, channel_starts=f"grid_{axis}", group_length=group)
    starts = evenly_spread(spec, within_reach=True)[axis]  # type: ignore[index]
    end = 8 if group == 1 else 8 - group
    assert ((starts > 0.1) & (starts < end - 0.1)).all()  # a sigmoid hardly moves at its ends
    layer = EpitomeLinear(*shapes[0][::-1], epitome_shape=shapes[1], channel_starts=f"grid_{axis}", **block)
    torch.testing.assert_close(layer.train()(torch.zeros(3, shapes[0][1])), layer.eval()(torch.zeros(3, shapes[0][1])))


@pytest.mark.parametrize(
    "weight, epitome, block, rank",
    [
        ((16, 16), (4, 16), 4, 13),
        ((32, 32), (8, 32), 8, 29),
        ((64, 64), (16, 64), 16, 61),
        ((64, 64), (8, 64), 8, 57),
        ((64, 64), (3, 64), 8, 17),
        ((128, 16), (2, 16), 2, 9),
        ((384, 64), (4, 64), 8, 25),
        ((96, 16), (18, 16), 8, 16),
    ],
)
def test_the_rank_is_kept(weight: tuple[int, int], epitome: tuple[int, int], block: int, rank: int) -> None:
    """Separable starts leave `O`; here all is left that shifts can tell apart, and no filter is there twice."""
    values = torch.randn(epitome, dtype=torch.float64)
    for pairs, turned in (("grid_out", False), ("grid_in", True)):
        shapes = (weight[::-1], epitome[::-1]) if turned else (weight, epitome)
        blocks = {"block_out": block} if turned else {"block_in": block}
        spec = EpitomeSpec.create(*shapes, **blocks, channel_starts=pairs)
        made = sample_weight(values.t() if turned else values, evenly_spread(spec, whole=True), spec)
        made = made.t() if turned else made
        bound = rank_bounds(spec)[1]
        assert torch.linalg.matrix_rank(made) == rank == bound
        assert len(made.unique(dim=0)) == weight[0]
    separable = EpitomeSpec.create(weight, epitome)
    assert (
        torch.linalg.matrix_rank(sample_weight(values, evenly_spread(separable, whole=True), separable)) <= epitome[0]
    )


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from(["grid_out", "grid_in"]), st.sampled_from(["separable", "grid"]), st.integers(1, 3),
)  # fmt: skip
@settings(deadline=None)
def test_no_weight_has_a_higher_rank_than_its_bound(
    out: int, in_: int, filters: int, inputs: int, pairs: Any, others: Any, group: int
) -> None:
    for channel_starts in (pairs, others):
        size = (max(group, filters // group * group), max(group, inputs // group * group))
        spec = EpitomeSpec.create(
            (out, in_), size, block_out=min(2, size[0]), block_in=min(2, size[1]),
            channel_starts=channel_starts, group_length=group,
        )  # fmt: skip
        values = torch.randn(size, dtype=torch.float64)
        for whole in (True, False):
            made = sample_weight(values, evenly_spread(spec, whole=whole), spec)
            assert torch.linalg.matrix_rank(made, rtol=1e-9) <= rank_bounds(spec)[1]


def test_kernels_need_more_parts() -> None:
    """The dense 3x3 convolution has 64 directions, although it has 16 input channels."""
    plan = epitorch.plan(nn.Sequential(nn.Conv2d(16, 64, 3)), torch.zeros(1, 16, 9, 9), ratio=4, form="partial")
    assert plan.layers["0"].block_in == 2
    assert "64 > 64" in str(plan)


# ---- layers ----

_OUT = {"channel_starts": "grid_out", "block_in": 2}
_IN = {"channel_starts": "grid_in", "block_out": 6}
LAYERS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "conv1d": (EpitomeConv1d, F.conv1d, (2, 8, 11)),
    "conv2d": (EpitomeConv2d, F.conv2d, (2, 8, 7, 6)),
    "conv3d": (EpitomeConv3d, F.conv3d, (2, 8, 4, 5, 4)),
    "linear": (EpitomeLinear, F.linear, (2, 3, 8)),
}


def made(kind: str, pairs: str, index: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A layer of 8 inputs and 24 outputs, its input, and its output by torch with the generated weight."""
    make, run, shape = LAYERS[kind]
    taps = (3,) * (len(shape) - 2) if kind != "linear" else ()
    sizes = (6, 8) if pairs == "grid_out" else (24, 3)
    options = _OUT if pairs == "grid_out" else _IN
    extra: dict[str, Any] = {"padding": 1} if taps else {}
    arguments = (8, 24, 3) if taps else (8, 24)
    layer = make(*arguments, epitome_shape=(*sizes, *taps), index=index, dtype=torch.float64, **options, **extra).eval()
    if index == "direct":  # as training leaves them, between positions
        with torch.no_grad():
            for starts in layer.starts().values():
                starts.add_(0.3)
    x = torch.randn(shape, dtype=torch.float64)
    return layer, x, run(x, layer.weight, layer.bias, **extra)


@pytest.mark.parametrize("index", ["fixed", "direct"])
@pytest.mark.parametrize("pairs", ["grid_out", "grid_in"])
@pytest.mark.parametrize("kind", LAYERS)
def test_partial_products_equal_the_dense_layer(kind: str, pairs: str, index: str) -> None:
    layer, x, expected = made(kind, pairs, index)
    strategy: Any = "product_map" if pairs == "grid_out" else "wrapping"
    reuse = reuse_layer(layer, strategy)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(reuse(x), expected)
    cost, ran = epitorch.count(layer, x), epitorch.count(epitorch.deploy(layer, x, strategy="reuse"), x)
    assert (cost.madds, cost.madds_interpolation) == (ran.madds, ran.madds_interpolation)
    if (kind, pairs, index) == ("linear", "grid_out", "direct"):  # the lerps cost more than they save
        assert (cost.layers[0].strategy, cost.madds) == ("folded", cost.madds_dense)
    else:
        assert cost.layers[0].strategy == strategy
        assert cost.madds < cost.madds_dense
    with torch.no_grad():  # negative control: one start of one pair
        layer.starts()["out" if pairs == "grid_out" else "in"][1, 1] += 1
    assert not torch.allclose(reuse_layer(layer, strategy)(x), expected)


def test_what_partial_products_cost() -> None:
    """O filters over all inputs at every position; then each further input block is one addition for every filter."""
    layer = EpitomeConv2d(8, 24, 3, padding=1, epitome_shape=(6, 8, 3, 3), index="fixed", bias=False, **_OUT)  # type: ignore[arg-type]
    cost = epitorch.count(layer, torch.zeros(1, 8, 5, 5))
    assert (cost.madds - cost.madds_interpolation, cost.madds_interpolation) == (6 * 8 * 9 * 25, 3 * 24 * 25)
    layer = EpitomeConv2d(8, 24, 3, padding=1, epitome_shape=(24, 3, 3, 3), index="fixed", bias=False, **_IN)  # type: ignore[arg-type]
    cost = epitorch.count(layer, torch.zeros(1, 8, 5, 5))
    assert (cost.madds - cost.madds_interpolation, cost.madds_interpolation) == (24 * 3 * 9 * 25, 4 * 8 * 25)


@pytest.mark.parametrize(
    "layer, reason",
    [
        (EpitomeConv2d(8, 24, 3, epitome_shape=(6, 8, 3, 3), channel_starts="grid_out", block_in=3), "unequal length"),
        (EpitomeConv2d(8, 24, 1, groups=2, epitome_shape=(6, 4, 1, 1), channel_starts="grid_out", block_in=2), "pairs"),
        (
            EpitomeConv2d(8, 24, 3, epitome_shape=(6, 36), flatten_kernel=True, channel_starts="grid_out", block_in=9),
            "flat",
        ),
    ],
    ids=["blocks", "groups", "flattened"],
)
def test_layers_that_cannot_share_say_why_and_are_folded(layer: EpitomeConv2d, reason: str) -> None:
    assert reason in str(declined_by(layer, "product_map"))
    x = torch.randn(2, 8, 5, 5)
    net = epitorch.deploy(nn.Sequential(layer).eval(), x, strategy="reuse")
    assert isinstance(net[0], nn.Conv2d)
    torch.testing.assert_close(net(x), layer(x))
    with pytest.raises(InputError, match="does not apply"):
        reuse_layer(layer, "product_map")


@pytest.mark.parametrize("index", ["learner", "direct"])
def test_starts_of_pairs_learn(index: Any) -> None:
    layer = EpitomeConv2d(8, 24, 3, epitome_shape=(6, 8, 3, 3), index=index, **_OUT)  # type: ignore[arg-type]
    layer(torch.randn(4, 8, 5, 5)).square().mean().backward()
    grads = [p.grad for p in layer.parameters() if p is not layer.epitome and p is not layer.bias]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grads)


# ---- networks ----


@pytest.mark.parametrize("budget", [{"params": 68_050}, {"madds": 2_562_368}])
@pytest.mark.parametrize(("axes", "starts"), [("auto", "grid_in"), ("out", "grid_out")])
def test_a_plan_of_partial_products(axes: Any, starts: str, budget: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = resnet20(stem_stride=2), torch.randn(2, 3, 32, 32)
    plan = epitorch.plan(model, x, form="partial", axes=axes, index="fixed", skip=["conv1", "fc"], **budget)
    separable = epitorch.plan(model, x, form="separable", axes="out", index="fixed", skip=["conv1", "fc"], **budget)
    assert {layer.channel_starts for layer in plan.layers.values()} == {starts}
    assert "64 > 64" in str(plan)
    assert "64 > 64" not in str(separable)
    epitorch.convert_(model, plan)
    cost = epitorch.count(model, x)
    assert (cost.params, cost.madds) == (plan.params, plan.madds)
    assert all(getattr(cost, key) <= most for key, most in budget.items())
    net = epitorch.deploy(model.eval(), x, strategy="reuse")
    assert sum(isinstance(module, ReusePartialConv) for module in net.modules()) == len(plan.layers)
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-4)
    epitorch.save_pretrained(model, tmp_path / "saved")
    loaded = epitorch.from_pretrained(tmp_path / "saved", factory=lambda: resnet20(stem_stride=2))
    torch.testing.assert_close(loaded.eval()(x), model(x), rtol=0, atol=0)


def test_inverted_residuals_share_on_their_longer_axis() -> None:
    model, x = mobilenetv2(10, cifar=True, stem_stride=2), torch.randn(1, 3, 32, 32)
    plan = epitorch.plan(model, x, params=404_672, form="partial", index="fixed", skip=["features.1.*", "classifier.1"])
    assert plan.layers["features.5.conv.0.0"].channel_starts == "grid_out"
    assert plan.layers["features.5.conv.2"].channel_starts == "grid_in"
    assert plan.params <= 404_672
    assert plan.madds is not None
    assert plan.madds < 6_000_000


def test_partial_products_shorten_one_axis() -> None:
    model, x = resnet20(), torch.zeros(1, 3, 32, 32)
    with pytest.raises(InputError, match="one channel axis"):
        epitorch.plan(model, x, params=68_050, form="partial", axes="both")


def test_grouped_layers_have_separable_starts() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, groups=2), nn.ConvTranspose2d(32, 16, 3))
    plan = epitorch.plan(model, torch.zeros(1, 16, 8, 8), ratio=2, form="partial")
    assert {layer.channel_starts for layer in plan.layers.values()} == {"separable"}


def test_least_squares_uses_starts_of_pairs() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(8, 24, 1)), torch.randn(1, 8, 4, 4)
    errors = {}
    for form in ("partial", "separable"):
        plan = epitorch.plan(model, x, params=160, form=form, axes="out", index="fixed")  # type: ignore[arg-type]
        net = nn.Sequential(nn.Conv2d(8, 24, 1))
        net.load_state_dict(model.state_dict())
        epitorch.convert_(net, plan, init="least_squares")
        weight, wanted = net[0].weight.detach(), model[0].weight.detach()
        errors[form] = float((weight - wanted).norm() / wanted.norm())  # type: ignore[operator]
    assert errors["partial"] < errors["separable"]


def test_a_budget_that_no_partial_products_meet_says_so() -> None:
    with pytest.raises(ConversionError, match="at least"):
        epitorch.plan(resnet20(), torch.zeros(1, 3, 32, 32), madds=1000, form="partial")
