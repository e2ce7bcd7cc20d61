"""Starts of a fresh layer, their range and precision, and the scale that a fresh layer begins with."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import reference
from contract import LayerCase
from epitorch.functional import sample_weight
from epitorch.init import evenly_spread, first_starts, interpolation_gain
from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeLinear, IndexLearner, learner_starts
from epitorch.spec import EpitomeSpec

INDEXES = ("learner", "direct", "fixed")


def conv(index: str = "learner", **options: Any) -> EpitomeConv2d:
    """12 -> 12 channels with starts on every axis: three blocks along the filters, four along the inputs."""
    arguments: dict[str, Any] = {"epitome_shape": (5, 3, 4, 3), "padding": 1, **options}
    return EpitomeConv2d(12, 12, 3, index=index, **arguments)


# ---- where they begin ----


@pytest.mark.parametrize("index", ["direct", "fixed"])
def test_starts_begin_at_evenly_spread_whole_positions(index: str) -> None:
    starts = conv(index).starts()  # 5/6, 15/6, 25/6 and 1/2, 3/2, 5/2, 7/2, rounded down
    assert starts["out"].tolist() == [0, 2, 4]
    # four blocks on three positions: fixed ones share one, learned ones lie between
    assert starts["in"].tolist() == ([0, 1, 1, 2] if index == "fixed" else [3 / 8, 9 / 8, 15 / 8, 21 / 8])
    assert starts["spatial"][:, 0].tolist() == [0, 1, 2, 3]
    grouped = EpitomeConv2d(8, 48, 1, epitome_shape=(20, 8, 1, 1), index=index, group_length=4)
    assert grouped.starts()["out"].tolist() == [0, 8, 16]  # 20/6, 10, 100/6, down to multiples of 4


def test_a_learner_s_starts_begin_off_the_ends_of_its_reach() -> None:
    """A quarter of a position, of a group: at the ends themselves the sigmoid is flat and a start would never leave."""
    starts = conv("learner").starts()
    assert starts["out"].tolist() == [0.25, 2, 4]
    assert starts["in"].tolist() == [3 / 8, 9 / 8, 15 / 8, 21 / 8]
    assert starts["spatial"][:, 0].tolist() == [0.25, 1, 2, 3]
    grouped = EpitomeConv2d(8, 16, 1, epitome_shape=(8, 8, 1, 1), group_length=4)  # the reach is [0, 4]
    assert grouped.starts()["out"].tolist() == [1, 3]


@pytest.mark.parametrize("index", ["direct", "learner"])
def test_learned_starts_never_begin_alike(index: str) -> None:
    """Spatial starts of 64 filters on a window of 9, and 12 blocks of filters on 3 positions."""
    layer = EpitomeConv1d(4, 64, 3, epitome_shape=(64, 4, 9), spatial_starts="out", block_out=1, index=index)
    assert len(layer.starts()["spatial"].unique()) == 64
    assert len(EpitomeLinear(4, 36, epitome_shape=(3, 4), index=index).starts()["out"].unique()) == 12


@pytest.mark.parametrize("index", ["direct", "learner"])
@pytest.mark.parametrize(
    "weight, epitome, pairs, block_in",
    [
        ((36, 4), (3, 4), "grid_out", 4),  # 12 blocks of filters, one of inputs, 3 places
        ((36, 8), (3, 8), "grid_out", 4),  # two of inputs, of which the first does not shift
        ((64, 3), (3, 3), "grid", 3),  # 22 blocks on 3 by 3 places
        ((64, 64), (4, 4), "grid", 4),  # ways enough: whole
    ],
)
def test_no_two_blocks_of_filters_begin_alike(weight: Any, epitome: Any, pairs: Any, block_in: int, index: Any) -> None:
    layer = EpitomeLinear(*weight[::-1], epitome_shape=epitome, channel_starts=pairs, block_in=block_in, index=index)
    rows = torch.cat([v.expand(layer.spec.num_out_blocks, -1) for v in layer.starts().values() if v.ndim == 2], 1)
    assert len(rows.unique(dim=0)) == layer.spec.num_out_blocks
    if weight == (64, 64) and index == "direct":
        assert (rows == rows.floor()).all()


def test_one_group_leaves_nothing_to_interpolate() -> None:
    layer = EpitomeConv2d(8, 16, 1, epitome_shape=(4, 8, 1, 1), index="direct", group_length=4)
    assert layer.starts()["out"].tolist() == [0, 0, 0, 0]


@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.sampled_from(["separable", "grid", "grid_out", "grid_in"]),
    st.sampled_from([1, 2, 3]),
)
@settings(deadline=None, max_examples=60)
def test_every_start_of_a_fresh_learner_can_move(out: int, in_: int, pairs: Any, group: int) -> None:
    spec = EpitomeSpec.create((48, 48), (out * group, in_ * group), channel_starts=pairs, group_length=group)
    starts = first_starts(spec, learned=True, by_learner=True)
    if not starts:
        return
    learner = IndexLearner(3, spec, starts, spatial_dims=0, dtype=torch.float64)
    sum(value.sum() for value in learner(torch.randn(2, 3, dtype=torch.float64)).values()).backward()
    movable = torch.cat([torch.full_like(v, spec.start_sizes[a][0] > group).flatten() for a, v in starts.items()])
    assert (learner.head.bias.grad[movable > 0] > 1e-3).all()


@given(st.integers(1, 40), st.integers(1, 400))
@settings(deadline=None)
def test_whole_starts_are_the_exact_quotients_rounded_down(size: int, filters: int) -> None:
    """Exact: in floats 1.5 / 3 * 6 may be a little less than 3."""
    spec = EpitomeSpec.create((filters, 1), (size, 1), block_out=1)
    got = evenly_spread(spec, whole=True)
    if "out" in got:
        assert got["out"].tolist() == [int(Fraction((2 * r + 1) * size, 2 * filters)) for r in range(filters)]
        assert len(set(got["out"].tolist())) > 1
    else:
        assert size == 1 or size >= filters


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_pairs_of_blocks_shift_differently(out: int, in_: int, rows: int, columns: int, group: int) -> None:
    """No two blocks of filters shift the input channels alike while there are other ways, and the other way round."""
    size = (rows * group, columns * group)
    spec = EpitomeSpec.create((out * size[0], in_ * size[1]), size, channel_starts="grid", group_length=group)
    starts = evenly_spread(spec, whole=True)
    ways = {"out": min(in_, rows**out), "in": min(out, columns**in_)}
    for axis, value in starts.items():
        length = spec.start_sizes[axis][0]
        assert ((value % group) == 0).all()
        assert (value < length).all()
        rows_of_shifts = value if axis == "in" else value.t()
        assert len(rows_of_shifts.unique(dim=0)) == ways[axis], axis


@pytest.mark.parametrize(
    "weight, epitome, block, filters",
    [
        ((16, 16), (3, 3), (3, 3), 16),  # more pairs than cells
        ((16, 16), (1, 4), (1, 4), 16),  # filters have no starts
        ((64, 64), (4, 64), (4, 64), 64),  # one block of input channels
        ((96, 16), (8, 16), (8, 16), 96),
        ((12, 2), (4, 2), (1, 2), 8),  # eight cells, one for each filter
    ],
)
def test_no_filter_is_there_twice(weight: tuple[int, int], epitome: tuple[int, int], block: Any, filters: int) -> None:
    spec = EpitomeSpec.create(weight, epitome, block_out=block[0], channel_starts="grid")
    epitome_values = torch.randn(epitome, dtype=torch.float64)
    for within_reach in (False, True):
        starts = evenly_spread(spec, whole=True, within_reach=within_reach)
        assert len(sample_weight(epitome_values, starts, spec).unique(dim=0)) == filters


@pytest.mark.parametrize("pairs", ["grid", "separable"])
def test_whole_starts_reach_the_last_group(pairs: str) -> None:
    """A learner's reach is [0, size - g], both ends included."""
    spec = EpitomeSpec.create((16, 16), (8, 8), channel_starts=pairs, group_length=4)
    for axis, value in evenly_spread(spec, whole=True, within_reach=True).items():
        assert set(value.flatten().tolist()) == {0, 4}, axis


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_shuffled_starts_under_another_default_device(device: str) -> None:
    spec = EpitomeSpec.create((16, 16), (4, 4), channel_starts="grid")
    with torch.device(device):
        starts = evenly_spread(spec, whole=True)
    assert {value.device.type for value in starts.values()} == {device}


@pytest.mark.parametrize(
    "weight, epitome, rank",
    [
        ((16, 16), (4, 4), 13),  # separable starts leave rank 4
        ((64, 64), (4, 4), 64),  # sixteen blocks an axis on four places
        ((32, 32), (2, 2), 32),
        ((34, 23), (3, 1), 23),  # the other axis has one place
        ((16, 96), (1, 6), 16),
    ],
)
def test_crowded_pairs_of_blocks_keep_the_rank(weight: tuple[int, int], epitome: tuple[int, int], rank: int) -> None:
    spec = EpitomeSpec.create(weight, epitome, channel_starts="grid")
    values = torch.randn(epitome, dtype=torch.float64)
    assert torch.linalg.matrix_rank(sample_weight(values, evenly_spread(spec, whole=True), spec)) >= rank


@pytest.mark.parametrize("weight, epitome, block", [((32, 2), (16, 2), 4), ((48, 2), (24, 2), 6)])
def test_short_blocks_read_the_whole_epitome(weight: tuple[int, int], epitome: tuple[int, int], block: int) -> None:
    spec = EpitomeSpec.create(weight, epitome, block_out=block, channel_starts="grid")
    numbers = torch.arange(spec.num_epitome, dtype=torch.float64).view(epitome)
    assert len(sample_weight(numbers, evenly_spread(spec, whole=True), spec).unique()) == spec.num_epitome


def test_a_fresh_learner_returns_the_map_whatever_the_input() -> None:
    layer = conv().eval()
    for x in (torch.randn(2, 12, 5, 5), 100 * torch.randn(3, 12, 4, 4)):
        for axis, value in layer.learner(x).items():
            torch.testing.assert_close(value, layer.starts()[axis])
    with torch.no_grad():
        layer.learner.head.weight.normal_()
    moved = layer.learner(torch.randn(2, 12, 5, 5))
    assert not torch.allclose(moved["out"], layer.starts()["out"])


def test_set_starts_sets_the_learner_too() -> None:
    layer = conv()
    wanted = {axis: 0.1 + 0.7 * value.clone() for axis, value in layer.starts().items()}
    layer.set_starts(wanted)
    for axis, value in layer.learner(torch.randn(2, 12, 5, 5)).items():
        torch.testing.assert_close(layer.starts()[axis], wanted[axis])
        torch.testing.assert_close(value, wanted[axis])
        assert not torch.allclose(value, conv().starts()[axis])


@pytest.mark.parametrize("group, size", [(1, 6), (2, 6), (3, 6)])
@pytest.mark.parametrize("logit", [-1e9, 0.0, 1e9])
def test_scaling_of_the_sigmoid(group: int, size: int, logit: float) -> None:
    layer = EpitomeLinear(12, 12, epitome_shape=(size, 12), group_length=group)
    with torch.no_grad():
        layer.learner.head.bias.fill_(logit)
    sigmoid = np.array([0.0 if logit < 0 else 1.0 if logit else 0.5] * 2)
    expected = torch.from_numpy(reference.scale(sigmoid, size, group)).float()
    torch.testing.assert_close(layer.learner(torch.randn(3, 12))["out"].detach(), expected)


@pytest.mark.parametrize("turns", [-1, 0, 2])
def test_set_starts_takes_the_learner_close_to_the_ends_and_around(turns: int) -> None:
    """Half a position from the ends of a long axis, and counted modulo the axis."""
    layer = EpitomeLinear(4, 4096, epitome_shape=(2048, 4))
    wanted = torch.tensor([0.5, 2047.5])
    layer.set_starts({"out": wanted + turns * 2048})
    said = layer.learner(torch.randn(3, 4))["out"].detach()
    torch.testing.assert_close(said, wanted, rtol=0, atol=0.02)


def test_the_batch_decides_the_starts_in_training_only() -> None:
    layer = conv()
    with torch.no_grad():
        layer.learner.head.weight.normal_()
    x, other = torch.randn(2, 12, 5, 5), 3 * torch.randn(2, 12, 5, 5)
    both = torch.cat([x, other])
    assert not torch.allclose(layer(both)[:2], layer(torch.cat([x, x]))[:2])
    layer.eval()
    torch.testing.assert_close(layer(both)[:2], layer(torch.cat([x, x]))[:2])


def test_starts_are_live() -> None:
    layer = conv("fixed").eval()
    x = torch.randn(2, 12, 5, 5)
    before = layer(x)
    with torch.no_grad():
        layer.starts()["out"].add_(0.5)
    assert not torch.allclose(layer(x), before)


def test_learner_starts_uses_the_batch_and_keeps_the_map() -> None:
    layer = conv().eval()
    with torch.no_grad():
        layer.learner.head.weight.normal_()
    x = torch.randn(2, 12, 5, 5)
    kept, from_map = {axis: value.clone() for axis, value in layer.starts().items()}, layer(x)
    with learner_starts(nn.Sequential(layer)), learner_starts(layer):
        from_learner = layer(x)
    twin = conv("fixed").eval()
    twin.load_state_dict({key: value for key, value in layer.state_dict().items() if "learner" not in key})
    twin.set_starts({axis: value.detach() for axis, value in layer.learner(x).items()})
    torch.testing.assert_close(from_learner, twin(x))
    assert not torch.allclose(from_learner, from_map)
    torch.testing.assert_close(layer(x), from_map, rtol=0, atol=0)
    for axis, value in layer.starts().items():
        torch.testing.assert_close(value, kept[axis], rtol=0, atol=0)


# ---- precision ----


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_layers_keep_wide_starts(index: str, dtype: torch.dtype) -> None:
    """Near 1500 bfloat16 has a spacing of 8 and float16 of 1; a start must not be rounded to them."""
    for narrow in (
        lambda layer: layer.to(dtype),
        lambda layer: layer.to(dtype=dtype).to(torch.device("cpu")),
    ):
        layer = EpitomeLinear(4, 4096, epitome_shape=(2048, 4), index=index)
        layer.set_starts({"out": torch.tensor([1501.25, 3.0])})
        layer = narrow(nn.Sequential(layer))[0]
        assert layer.epitome.dtype == layer.bias.dtype == dtype
        assert layer.starts()["out"].dtype == torch.float32
        assert layer.starts()["out"].tolist() == [1501.25, 3.0]
        assert torch.tensor(1501.25).to(dtype).item() != 1501.25
        if layer.learner is not None:
            assert {parameter.dtype for parameter in layer.learner.parameters()} == {torch.float32}


@pytest.mark.parametrize("index", INDEXES)
def test_starts_follow_to_wider_dtypes(index: str) -> None:
    assert {value.dtype for value in conv(index).double().starts().values()} == {torch.float64}
    made = conv(index, dtype=torch.float64)
    assert {value.dtype for value in made.starts().values()} == {torch.float64}
    assert {value.dtype for value in made.float().starts().values()} == {torch.float32}
    narrow = conv(index, dtype=torch.bfloat16)
    assert {value.dtype for value in narrow.starts().values()} == {torch.float32}
    assert narrow.half().epitome.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("index", INDEXES)
def test_output_has_the_dtype_of_the_layer(index: str, dtype: torch.dtype) -> None:
    layer, x = conv(index).to(dtype), torch.randn(2, 12, 5, 5, dtype=dtype)
    y = layer(x)
    assert y.dtype == layer.weight.dtype == dtype
    y.sum().backward()
    assert layer.epitome.grad.dtype == dtype


# ---- scale ----

VARIANCE = (
    LayerCase("nothing", "Conv2d", (12, 24, 3), (8, 12, 6, 6), {"epitome_shape": (24, 12, 3, 3)}),
    LayerCase("out-three-blocks", "Conv2d", (12, 48, 3), (8, 12, 6, 6), {"epitome_shape": (17, 12, 3, 3)}),
    LayerCase("out-in", "Conv2d", (24, 24, 3), (8, 24, 6, 6), {"epitome_shape": (9, 9, 3, 3)}),
    LayerCase("spatial-in", "Conv2d", (24, 24, 3), (8, 24, 6, 6), {"epitome_shape": (24, 6, 5, 5)}),
    LayerCase("spatial-in-halves", "Conv2d", (24, 24, 3), (8, 24, 6, 6), {"epitome_shape": (24, 8, 5, 5)}),
    LayerCase(
        "spatial-out",
        "Conv2d",
        (24, 24, 3),
        (8, 24, 6, 6),
        {"epitome_shape": (6, 24, 5, 5), "spatial_starts": "out"},
    ),
    LayerCase(
        "channel-grid",
        "Conv2d",
        (24, 24, 3),
        (8, 24, 6, 6),
        {"epitome_shape": (11, 11, 3, 3), "channel_starts": "grid"},
    ),
    LayerCase(
        "super-index",
        "Conv2d",
        (24, 24, 3),
        (8, 24, 6, 6),
        {"epitome_shape": (16, 24, 3, 3), "group_length": 4},
    ),
    LayerCase(
        "last-block-cut",
        "Conv2d",
        (24, 24, 3),
        (8, 24, 6, 6),
        {"epitome_shape": (16, 20, 3, 3), "block_in": 11},
    ),
    LayerCase(
        "depthwise",
        "Conv2d",
        (48, 48, 3),
        (8, 48, 6, 6),
        {"epitome_shape": (48, 1, 4, 4), "spatial_starts": "out", "block_out": 1},
        {"groups": 48},
    ),
    LayerCase("flat", "Conv2d", (12, 24, 3), (8, 12, 6, 6), {"epitome_shape": (15, 70), "flatten_kernel": True}),
    LayerCase("3d", "Conv3d", (12, 12, 3), (4, 12, 4, 4, 4), {"epitome_shape": (12, 4, 5, 5, 5)}),
    LayerCase("transposed", "ConvTranspose2d", (12, 24, 3), (8, 12, 5, 5), {"epitome_shape": (7, 15, 3, 3)}),
    LayerCase("linear", "Linear", (48, 48), (64, 48), {"epitome_shape": (29, 31)}),
)


def mean_variance(make: Any, case: LayerCase, seeds: int) -> float:
    """Mean over seeds of the output's variance about zero."""
    total = 0.0
    for seed in range(seeds):
        torch.manual_seed(seed)
        layer = make()
        total += float(layer(torch.randn(case.input_shape)).square().mean())
    return total / seeds


@pytest.mark.parametrize("index", ["learner", "fixed"])
@pytest.mark.parametrize("case", VARIANCE, ids=[case.name for case in VARIANCE])
def test_a_fresh_output_has_the_dense_variance(case: LayerCase, index: str) -> None:
    """Within 5%; the standard error of the ratio stays below 1.2%."""

    def fresh() -> Any:
        return case.build(index, torch.float32, spread=False)

    def uncorrected() -> Any:
        layer = fresh()
        with torch.no_grad():
            layer.epitome.mul_(interpolation_gain(layer.starts(), layer.spec))
        return layer

    with torch.no_grad():
        dense = mean_variance(lambda: case.dense(torch.float32), case, seeds=40)
        assert mean_variance(fresh, case, seeds=40) == pytest.approx(dense, rel=0.05)
        if interpolation_gain(fresh().starts(), fresh().spec) < 0.95:
            assert mean_variance(uncorrected, case, seeds=10) < 0.93 * dense


def test_reset_draws_epitome_and_bias_anew_within_their_bounds() -> None:
    layer = conv("direct")
    before, starts = layer.epitome.detach().clone(), {axis: v.clone() for axis, v in layer.starts().items()}
    layer.reset_parameters()
    assert not torch.allclose(layer.epitome, before)
    bound = 1 / math.sqrt(12 * 9)
    assert layer.bias.abs().max() <= bound
    assert layer.epitome.abs().max() <= bound / interpolation_gain(starts, layer.spec) * (1 + 1e-6)
    assert layer.epitome.abs().max() > bound
