"""Conversion from pretrained weights: `convert_(..., init="least_squares")`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch import LayerPlan, Plan
from epitorch.errors import ConversionError, DataError

PLAN = {
    "0": LayerPlan((4, 6, 3, 3), index="fixed"),
    "2": LayerPlan((6, 4, 3, 3)),
    "4": LayerPlan((6, 5, 3, 3), channel_starts="grid", index="direct"),
    "7": LayerPlan((5, 8)),
}


def network() -> Any:
    torch.manual_seed(0)
    layers = [nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 8, 3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def error(layer: Any, weight: Tensor) -> float:
    return float((layer.weight - weight).detach().norm() / weight.detach().norm())


def test_every_layer_comes_near_its_weight_and_the_report_says_how_near() -> None:
    dense, drawn = network(), network()
    model = copy.deepcopy(dense)
    report = epitorch.convert_(model, Plan(PLAN), init="least_squares")
    epitorch.convert_(drawn, Plan(PLAN))
    for row in report.converted:
        layer, weight = model.get_submodule(row.name), dense.get_submodule(row.name).weight
        assert row.error == pytest.approx(error(layer, weight), abs=1e-5)
        assert row.error is not None
        assert row.error_spread is not None
        assert row.error <= row.error_spread + 1e-9
        assert row.error < 0.95 < error(drawn.get_submodule(row.name), weight)
        assert f"error {row.error:.3f}" in str(report)
        torch.testing.assert_close(layer.bias, dense.get_submodule(row.name).bias)
    x = torch.randn(4, 6, 9, 9)
    far = (drawn.eval()(x) - dense.eval()(x)).norm()
    assert (model.eval()(x) - dense(x)).norm() < far


def test_a_learner_says_the_starts_that_were_found() -> None:
    model = network()
    epitorch.convert_(model, Plan({"2": PLAN["2"]}), init="least_squares")
    layer = model[2]
    torch.testing.assert_close(dict(layer.learner(torch.randn(3, 8, 5, 5))), layer.starts(), atol=2e-3, rtol=0)


def test_a_weight_that_an_epitome_generates_is_kept() -> None:
    source = epitorch.nn.EpitomeConv2d(8, 16, 3, epitome_shape=(8, 8, 3, 3), index="fixed")
    model: Any = nn.Sequential(source.to_dense())
    report = epitorch.convert_(model, Plan({"0": LayerPlan((8, 8, 3, 3), index="fixed")}), init="least_squares")
    assert report.layers[0].error == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(model[0].weight, source.weight, atol=1e-5, rtol=1e-4)


def test_moments_make_loud_channels_count_more() -> None:
    dense = network()
    moments = {"2": torch.tensor([100.0] + [0.01] * 7)}
    plain, weighted = copy.deepcopy(dense), copy.deepcopy(dense)
    plan = Plan({"2": LayerPlan((6, 2, 3, 3), index="fixed"), "0": PLAN["0"]})
    epitorch.convert_(plain, plan, init="least_squares")
    epitorch.convert_(weighted, plan, init="least_squares", moments=moments)

    def loud(model: Any) -> float:
        return float((model[2].weight - dense[2].weight)[:, 0].detach().norm())

    assert loud(weighted) < 0.5 * loud(plain)
    torch.testing.assert_close(weighted[0].weight, plain[0].weight)  # not among the moments


def test_subclasses_and_folded_weights_start_from_what_they_compute() -> None:
    model: Any = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 10)))
    weight = model[0].weight.detach().clone()
    report = epitorch.convert_(model, Plan({"0": LayerPlan((10, 8), index="fixed")}), init="least_squares")
    assert report.layers[0].error == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(model[0].weight, weight)
    assert epitorch.nn.AdaptedLayer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": "least_square"}, ["did you mean 'least_squares'"]),
        ({"moments": {"2": torch.ones(8)}}, ["moments have no effect"]),
        ({"init": "least_squares", "moments": {"2": torch.ones(7)}}, ["2", "(8,)", "(7,)"]),
    ],
)
def test_wrong_options_change_nothing(options: dict[str, Any], words: list[str]) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConversionError) as caught:
        epitorch.convert_(model, Plan(PLAN), **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    torch.testing.assert_close(model.state_dict(), before)


def test_a_weight_that_is_not_finite_is_refused_by_name() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ConversionError, match="2: ") as caught:
        epitorch.convert_(model, Plan(PLAN), init="least_squares")
    assert "finite" in str(caught.value)
    assert isinstance(model[0], nn.Conv2d)


def test_moments_of_another_model_are_refused() -> None:
    with pytest.raises(ConversionError, match="the moments name a layer") as caught:
        epitorch.convert_(network(), Plan(PLAN), init="least_squares", moments={"module.2": torch.ones(8)})
    assert "wraps it" in str(caught.value)


@pytest.mark.parametrize("batch", [torch.full((2, 6, 9, 9), float("nan")), torch.zeros(0, 6, 9, 9)])
def test_useless_batches_are_refused_and_change_nothing(batch: Tensor) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DataError):
        epitorch.reestimate_batch_norm_(model, [batch])
    with pytest.raises(DataError):
        epitorch.activation_moments(model, [batch])
    torch.testing.assert_close(model.state_dict(), before)
    assert epitorch.activation_moments(model, [torch.randn(2, 6, 9, 9)])


@pytest.mark.parametrize("form", ["separable", "fine"])
@pytest.mark.parametrize("share", [0.33, 0.6, 0.8])
def test_a_warm_start_keeps_fixed_starts_within_the_budget_of_multiply_adds(share: float, form: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 31, 3, padding=1), nn.ReLU(), nn.Conv2d(31, 36, 3, padding=1)).eval()
    x = torch.randn(1, 3, 8, 8)
    budget = int(epitorch.count(model, x).madds * share)
    plan = epitorch.plan(model, x, madds=budget, index="fixed", form=form)
    epitorch.convert_(model, plan, init="least_squares")
    assert epitorch.count(model, x).madds <= plan.madds <= budget
