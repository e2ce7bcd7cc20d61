"""`sample_weight` and the initial starts and scale against the literal loops."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from epitorch.errors import EpitorchError
from epitorch.functional import sample_weight
from epitorch.init import evenly_spread, interpolation_gain
from epitorch.spec import EpitomeSpec

zero, one = np.float32(0), np.float32(1)
CLOSE: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}


def layout_of(spec: EpitomeSpec) -> reference.Layout:
    return reference.Layout(
        spec.weight_shape,
        spec.epitome_shape,
        spec.block_out,
        spec.block_in,
        spec.spatial_starts,
        spec.channel_starts,
        spec.group_length,
        spec.spatial_shift,
    )


def slow_weight(epitome: Tensor, starts: dict[str, Tensor], spec: EpitomeSpec) -> Tensor:
    arrays = {axis: value.detach().double().numpy() for axis, value in starts.items()}
    weight = reference.sample_weight(epitome.detach().double().numpy(), arrays, layout_of(spec))
    return torch.from_numpy(weight)


def random_starts(spec: EpitomeSpec, seed: int, low: float = 0.0, high: float = 1.0) -> dict[str, Tensor]:
    """Uniform between `low` and `high` times the longest axis, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    span = max(spec.epitome_shape)
    return {
        axis: span * (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64))
        for axis, shape in spec.start_shapes.items()
    }


@st.composite
def specs(draw: st.DrawFn) -> EpitomeSpec:
    dims = draw(st.integers(0, 2))
    kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
    weight = [draw(st.integers(1, 7)), draw(st.integers(1, 6)), *kernel]
    group = draw(st.sampled_from([1, 1, 2, 3]))
    channels = [group * draw(st.integers(1, 7 // group)) for _ in range(2)]
    epitome = [*channels, *(draw(st.integers(1, 4)) for _ in range(dims))]
    return EpitomeSpec.create(
        weight,
        epitome,
        block_out=draw(st.integers(1, epitome[0])),
        block_in=draw(st.integers(1, epitome[1])),
        spatial_starts=draw(st.sampled_from(["in", "out", "grid"])),
        channel_starts=draw(st.sampled_from(["separable", "grid", "grid_out", "grid_in"])),
        group_length=group,
        spatial_shift=draw(st.booleans()),
    )


@settings(max_examples=120, deadline=None, derandomize=True)
@given(specs(), st.integers(0, 2**16))
def test_any_spec_equals_reference(spec: EpitomeSpec, seed: int) -> None:
    starts = random_starts(spec, seed)
    generator = torch.Generator().manual_seed(seed)
    epitome = torch.randn(spec.epitome_shape, generator=generator, dtype=torch.float64)
    weight = sample_weight(epitome, starts, spec)
    assert spec.start_shapes == reference.start_shapes(layout_of(spec))
    torch.testing.assert_close(weight, slow_weight(epitome, starts, spec), **CLOSE)
    assert (sample_weight(epitome + 1, starts, spec) - weight - 1).abs().max() < 1e-9  # fractions sum to 1
    assert not torch.allclose(sample_weight(2 * epitome, starts, spec), weight)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(specs(), st.integers(0, 2**16))
def test_initial_scale_is_exact_for_any_spec(spec: EpitomeSpec, seed: int) -> None:
    starts = random_starts(spec, seed)
    arrays = {axis: value.numpy() for axis, value in starts.items()}
    exact = reference.mean_square_factor(layout_of(spec), arrays)
    assert interpolation_gain(starts, spec) ** 2 == pytest.approx(exact, rel=1e-6)


SPEC = EpitomeSpec.create((8, 6, 3), (5, 4, 4), block_out=4, spatial_starts="grid")
FULL_GRADCHECK = {
    "separable": EpitomeSpec.create((5, 4, 1), (3, 2, 1)),
    "spatial-grid": EpitomeSpec.create((4, 3, 2), (2, 2, 3), spatial_starts="grid"),
    "channel-grid": EpitomeSpec.create((4, 3), (3, 2), channel_starts="grid"),
    "channel-grid-out": EpitomeSpec.create((4, 3), (2, 3), channel_starts="grid_out", block_in=2),
    "channel-grid-in": EpitomeSpec.create((4, 3), (3, 2), channel_starts="grid_in", block_out=2),
    "super-index": EpitomeSpec.create((5, 5), (4, 4), group_length=2),
}


def away_from_kinks(spec: EpitomeSpec) -> dict[str, Tensor]:
    starts = {}
    for axis, value in random_starts(spec, seed=3).items():
        g = 1 if axis == "spatial" else spec.group_length
        starts[axis] = g * (torch.floor(value / g) + 0.2 + 0.6 * torch.rand(value.shape, dtype=value.dtype))
    return starts


@pytest.mark.parametrize("name", FULL_GRADCHECK)
def test_gradcheck_of_every_entry(name: str) -> None:
    spec = FULL_GRADCHECK[name]
    starts = away_from_kinks(spec)
    axes, values = list(starts), [value.requires_grad_() for value in starts.values()]
    epitome = torch.randn(spec.epitome_shape, dtype=torch.float64, requires_grad=True)

    def weight(epitome: Tensor, *values: Tensor) -> Tensor:
        return sample_weight(epitome, dict(zip(axes, values, strict=True)), spec)

    assert torch.autograd.gradcheck(weight, (epitome, *values))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("whole", [0, 2, 4])
def test_gradient_on_a_grid_point_is_the_right_derivative(whole: int, group: int) -> None:
    spec = EpitomeSpec.create((7, 1), (6, 1), group_length=group)
    epitome = torch.randn(6, 1, dtype=torch.float64)
    start = torch.tensor([float(whole), 0.5], dtype=torch.float64, requires_grad=True)
    head = sample_weight(epitome, {"out": start}, spec)[0, 0]
    (gradient,) = torch.autograd.grad(head, start)
    right = (epitome[(whole + group) % 6, 0] - epitome[whole, 0]) / group
    left = (epitome[whole, 0] - epitome[(whole - group) % 6, 0]) / group
    torch.testing.assert_close(gradient[0], right)
    assert not torch.isclose(gradient[0], left)


def test_gradient_of_the_epitome_counts_every_use() -> None:
    """Row 0 of the epitome is used whole by block 0, and by a quarter and three quarters in the other two."""
    spec = EpitomeSpec.create((6, 1), (2, 1))
    epitome = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    starts = {"out": torch.tensor([0.0, 0.75, 1.25], dtype=torch.float64)}
    upstream = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0], [100000.0]], dtype=torch.float64)
    sample_weight(epitome, starts, spec).backward(upstream)
    row0 = 1 + 0.25 * 100 + 0.75 * 1000 + 0.25 * 10000 + 0.75 * 100000
    row1 = 10 + 0.75 * 100 + 0.25 * 1000 + 0.75 * 10000 + 0.25 * 100000
    torch.testing.assert_close(epitome.grad, torch.tensor([[row0], [row1]], dtype=torch.float64))


def test_worked_wrapping_example_of_the_paper() -> None:
    """Three epitome channels, starts 0.6 and 0.3: which features meet which epitome channel, to the digit."""
    spec = EpitomeSpec.create((1, 6, 1), (1, 3, 1))
    starts = {"in": torch.tensor([0.6, 0.3], dtype=torch.float64)}
    expected = torch.tensor(
        [[0.4, 0.0, 0.6, 0.7, 0.0, 0.3], [0.6, 0.4, 0.0, 0.3, 0.7, 0.0], [0.0, 0.6, 0.4, 0.0, 0.3, 0.7]],
        dtype=torch.float64,
    )
    wrapped = reference.wrapped_channels(layout_of(spec), {"in": starts["in"].numpy()})
    loops = [[row.get(channel, 0.0) for channel in range(6)] for row in wrapped]
    torch.testing.assert_close(torch.tensor(loops, dtype=torch.float64), expected, **CLOSE)
    for channel, one_hot in enumerate(torch.eye(3, dtype=torch.float64)):
        met = sample_weight(one_hot.view(1, 3, 1), starts, spec)[0, :, 0]
        torch.testing.assert_close(met, expected[channel], **CLOSE)
    figure = sample_weight(torch.eye(3, dtype=torch.float64)[0].view(1, 3, 1), {"in": 1 - starts["in"]}, spec)
    assert not torch.allclose(figure[0, :, 0], expected[0])  # the printed fractions belong to 0.4 and 0.7


def test_super_index_mixes_two_shifts() -> None:
    """With g = 8 the start 12 is half the shift by 8 and half the shift by 16."""
    spec = EpitomeSpec.create((48, 1), (24, 1), group_length=8)
    epitome = torch.randn(24, 1, dtype=torch.float64)
    weight = sample_weight(epitome, {"out": torch.tensor([12.0, 0.0], dtype=torch.float64)}, spec)
    half = (torch.roll(epitome, -8, 0) + torch.roll(epitome, -16, 0)) / 2
    torch.testing.assert_close(weight[:24], half, **CLOSE)
    assert not torch.allclose(weight[:24], torch.roll(epitome, -12, 0))


@pytest.mark.parametrize("turns", [-2, -1, 1, 3])
def test_starts_count_modulo_the_axis(turns: int) -> None:
    starts = random_starts(SPEC, seed=1)
    epitome = torch.randn(SPEC.epitome_shape, dtype=torch.float64)
    sizes = {"out": 5, "in": 4, "spatial": 4}
    moved = {axis: value + turns * sizes[axis] for axis, value in starts.items()}
    expected = sample_weight(epitome, starts, SPEC)
    torch.testing.assert_close(sample_weight(epitome, moved, SPEC), expected, rtol=1e-10, atol=1e-10)
    short = {axis: value + turns * (sizes[axis] - 1) for axis, value in starts.items()}
    assert not torch.allclose(sample_weight(epitome, short, SPEC), expected)


@pytest.mark.parametrize("value", [np.nextafter(zero, -one), np.nextafter(5 * one, zero), 5 * one, zero])
def test_starts_at_the_seam(value: np.float32) -> None:
    """A start a rounding away from the end of the axis reads the same as 0."""
    spec = EpitomeSpec.create((7, 1), (5, 1))
    epitome = torch.randn(5, 1)
    starts = {"out": torch.tensor([float(value), 2.5])}
    torch.testing.assert_close(sample_weight(epitome, starts, spec)[:5], epitome, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("blocks", ["separable", "grid"])
def test_weight_has_the_dtype_of_the_epitome(dtype: torch.dtype, blocks: str) -> None:
    spec = EpitomeSpec.create((8, 6, 3), (5, 4, 3), channel_starts=blocks)
    starts = {axis: value.float() for axis, value in random_starts(spec, seed=2).items()}
    epitome = torch.randn(spec.epitome_shape).to(dtype)
    weight = sample_weight(epitome, starts, spec)
    assert weight.dtype == dtype
    by_dtype = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
    close = {"rtol": by_dtype[dtype], "atol": by_dtype[dtype]}
    torch.testing.assert_close(weight.double(), slow_weight(epitome, starts, spec), **close)


def test_position_near_1000_survives_a_bfloat16_epitome() -> None:
    """bfloat16 cannot tell 1001 from 1002; the starts are float32, so the shift stays right."""
    spec = EpitomeSpec.create((2048, 1), (1024, 1))
    epitome = torch.arange(1024.0).remainder(128).view(-1, 1).bfloat16()
    weight = sample_weight(epitome, {"out": torch.tensor([1001.0, 1002.0])}, spec)
    assert torch.equal(weight[:1024], torch.roll(epitome, -1001, 0))
    assert torch.equal(weight[1024:], torch.roll(epitome, -1002, 0))
    assert not torch.equal(weight[1024:], weight[:1024])


# ---- initial starts ----


@pytest.mark.parametrize("channels, size, count", [(12, 4, 3), (10, 4, 3), (9, 5, 2)])
def test_initial_starts_are_evenly_spread(channels: int, size: int, count: int) -> None:
    spec = EpitomeSpec.create((channels, channels, 3), (size, size, 4))
    starts = evenly_spread(spec)
    for axis in ("out", "in"):
        expected = torch.tensor(reference.initial_starts(size, count))
        torch.testing.assert_close(starts[axis], expected)
    torch.testing.assert_close(starts["spatial"][:, 0], torch.tensor(reference.initial_starts(4, count)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(specs())
def test_initial_starts_cover_each_axis_and_are_never_all_equal(spec: EpitomeSpec) -> None:
    starts = evenly_spread(spec)
    shapes = {axis: tuple(value.shape) for axis, value in starts.items()}
    assert shapes == reference.start_shapes(layout_of(spec))
    for axis, value in starts.items():
        columns = value.flatten(0, -2).T if axis == "spatial" else value.reshape(1, -1)
        for column, size in zip(columns, spec.start_sizes[axis], strict=True):
            if spec.channel_starts != f"grid_{axis}" or min(value.shape) == 1:  # else turned: tests/nn/test_partial.py
                expected = torch.tensor(reference.initial_starts(size, column.numel()))
                torch.testing.assert_close(column.sort().values, expected)
            assert column.numel() == 1 or column.unique().numel() > 1


def test_pairs_of_blocks_do_not_tie_the_two_shifts() -> None:
    spec = EpitomeSpec.create((12, 9), (4, 3), channel_starts="grid")
    starts = evenly_spread(spec)
    assert starts["in"].unique(dim=0).shape[0] == spec.num_out_blocks  # each output block shifts its own way
    shifts = torch.stack([starts["out"] / 4, starts["in"] / 3], -1).flatten(0, 1)
    assert not torch.allclose(shifts[:, 0], shifts[:, 1])


# ---- bad input ----


def test_errors_name_expected_and_got() -> None:
    epitome, starts = torch.zeros(SPEC.epitome_shape), random_starts(SPEC, seed=0)
    without = {axis: value for axis, value in starts.items() if axis != "in"}
    for wrong_epitome, wrong_starts, words in (
        (torch.zeros(5, 4), starts, ["(5, 4, 4)", "(5, 4)"]),
        (epitome, without, ["in", "expected", "got"]),
        (epitome, {**starts, "out": torch.zeros(3)}, ["(2,)", "(3,)"]),
    ):
        with pytest.raises(EpitorchError) as caught:
            sample_weight(wrong_epitome, wrong_starts, SPEC)
        assert all(word in str(caught.value) for word in words)


def test_reference_fractions_sum_to_one() -> None:
    """The reference itself: every element mixes fractions that sum to 1."""
    layout = layout_of(SPEC)
    starts = {axis: value.numpy() for axis, value in random_starts(SPEC, seed=4).items()}
    for position in product(*map(range, layout.weight_shape)):
        fractions = [fraction for _, fraction in reference.element_taps(layout, starts, position)]
        assert sum(fractions) == pytest.approx(1.0)
        assert 1 <= len(fractions) <= 2**3
    assert prod(layout.weight_shape) == 8 * 6 * 3
