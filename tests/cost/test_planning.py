"""The planner on ten architectures: bound, gap, monotony, determinism, and totals that a recount confirms."""

from __future__ import annotations

import copy
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear

import epitorch
from epitorch.cost._ladder import Ladder
from epitorch.cost._survey import Survey, survey
from epitorch.cost.planning import choose, ladders_of
from epitorch.errors import ConversionError, EpitorchError, InputError
from epitorch.models.resnet import resnet20
from epitorch.models.resolve import build_model
from epitorch.nn import EpitomeLayer
from epitorch.plans import REASONS, LayerPlan, Plan

ARCHITECTURES = {
    "epitorch:digits_cnn": (1, 1, 8, 8),
    "timm:test_resnet": (1, 3, 32, 32),
    "timm:test_vit": (1, 3, 160, 160),
    "timm:test_convnext": (1, 3, 32, 32),
    "timm:test_nfnet": (1, 3, 32, 32),
    "timm:test_efficientnet": (1, 3, 32, 32),
    "timm:test_byobnet": (1, 3, 32, 32),
    "torchvision:mobilenet_v3_small": (1, 3, 32, 32),
    "torchvision:shufflenet_v2_x0_5": (1, 3, 32, 32),
    "torchvision:squeezenet1_1": (1, 3, 64, 64),
}
EVERY = pytest.mark.parametrize("name", ARCHITECTURES)
X = torch.zeros(1, 3, 8, 8)


@cache
def model_of(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_model(name)


@cache
def survey_of(name: str) -> Survey:
    return survey(model_of(name), torch.zeros(ARCHITECTURES[name]))


@cache
def ladders(name: str, kind: Any, form: Any, align: int) -> dict[str, Ladder]:
    return ladders_of(survey_of(name), kind, form, "auto", align)


def dense_total(surveyed: Survey, kind: str) -> int:
    return surveyed.params if kind == "params" else surveyed.madds


@EVERY
@given(
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    kind=st.sampled_from(["params", "madds"]),
    form=st.sampled_from(["auto", "separable", "fine"]),
    align=st.sampled_from([1, 8]),
    policy=st.sampled_from(["uniform", "positions", "front_heavy"]),
)
@settings(deadline=None, max_examples=15, derandomize=True)
def test_any_budget_is_met_and_a_smaller_one_never_gives_more(
    name: str, shares: tuple[float, float], kind: Any, form: Any, align: int, policy: Any
) -> None:
    surveyed, rungs = survey_of(name), ladders(name, kind, form, align)
    dense = dense_total(surveyed, kind)
    least = dense - sum(ladder[-1].cost - ladder[0].cost for ladder in rungs.values())
    totals = []
    for share in sorted(shares):
        budget = least + int(share * (dense - least))
        chosen = choose(surveyed, rungs, kind, budget, policy)
        assert choose(surveyed, rungs, kind, budget, policy) == chosen
        total = dense - sum(rungs[layer][-1].cost - rung.cost for layer, rung in chosen.items())
        steps = [rungs[n][rungs[n].index(r) + 1].cost - r.cost for n, r in chosen.items() if r is not rungs[n][-1]]
        assert total <= budget
        assert all(budget - total < step for step in steps)
        totals.append(total)
    assert totals == sorted(totals)


@EVERY
@pytest.mark.parametrize("kind", ["params", "front", "madds", "fine"])
def test_the_totals_are_those_of_the_converted_model(name: str, kind: str) -> None:
    surveyed, x = survey_of(name), torch.zeros(ARCHITECTURES[name])
    saved = sum(rungs[-1].cost - rungs[0].cost for rungs in ladders(name, "madds", "auto", 1).values())
    options: dict[str, dict[str, Any]] = {
        "params": {"ratio": 2},
        "front": {"ratio": 1.3, "policy": "front_heavy", "depthwise": True},
        "madds": {"madds": surveyed.madds - saved // 2},
        "fine": {"ratio": 1.5, "form": "fine"},
    }
    plan = epitorch.plan(model_of(name), x, **options[kind])
    model = copy.deepcopy(model_of(name))
    before = epitorch.count(model, x)
    assert (before.params, before.madds) == (surveyed.params, surveyed.madds)
    report = epitorch.convert_(model, plan)
    after = epitorch.count(model, x)
    assert (after.params, after.madds) == (plan.params, plan.madds_fresh)
    assert {layer.name for layer in report.converted} == set(plan.layers)
    move_between_positions(model)
    assert epitorch.count(model, x).madds == plan.madds
    assert plan.budget is not None
    assert (plan.params if plan.budget.kind == "params" else plan.madds) <= plan.budget.amount  # type: ignore[operator]
    assert set(plan.layers) | set(plan.left) == set(plan.weights)
    assert set(plan.left.values()) <= set(REASONS)


@torch.no_grad()
def move_between_positions(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, EpitomeLayer):
            for starts in layer.starts().values():
                starts.copy_(starts.floor() + 0.5)


def test_planning_leaves_the_model_and_the_random_state_alone() -> None:
    model = copy.deepcopy(model_of("timm:test_resnet")).train()
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    epitorch.plan(model, torch.randn(2, 3, 32, 32), ratio=2, policy="sensitivity")
    torch.set_rng_state(random)
    epitorch.plan(model, torch.zeros(2, 3, 32, 32), ratio=2, policy="sensitivity")
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert model.training


def test_a_params_budget_takes_grid_starts_and_a_madds_budget_separable_ones() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3))
    by_params = epitorch.plan(model, X, ratio=2, skip=["0"])
    by_madds = epitorch.plan(model, X, madds=100_000, skip=["0"])
    assert by_params.layers["1"].channel_starts == "grid"
    assert by_madds.layers["1"].channel_starts == "separable"
    assert epitorch.plan(model, X, ratio=2, form="separable").layers["1"].channel_starts == "separable"


def test_fine_starts_are_one_for_each_channel_of_the_compressed_axis() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ConvTranspose2d(32, 16, 3), nn.Conv2d(16, 16, 3))
    plan = epitorch.plan(model, X, ratio=2, form="fine", skip=["0"], axes={"1": "in", "2": "both"})
    epitorch.convert_(model, plan)
    layers: Any = model
    assert layers[1].block_in == 1
    assert layers[1].starts()["in"].shape == (32,)
    assert "out" not in layers[1].starts()
    assert {axis: starts.shape for axis, starts in layers[2].starts().items()} == {"out": (16,), "in": (16,)}


def test_a_mapping_of_axes_says_where_it_means_no_layer() -> None:
    with pytest.raises(InputError, match="no layer has the name that axes gives"):
        epitorch.plan(pair(), X, ratio=2, axes={"body.*": "out"})


def test_whole_numbers_of_other_libraries_are_budgets() -> None:
    assert epitorch.plan(pair(), X, params=np.int64(2000)) == epitorch.plan(pair(), X, params=2000)  # type: ignore[arg-type]
    assert epitorch.plan(pair(), X, ratio=np.float32(2)) == epitorch.plan(pair(), X, ratio=2)  # type: ignore[arg-type]


def test_the_work_of_making_a_weight_goes_with_its_parametrisation() -> None:
    made = nn.utils.parametrizations
    model = nn.Sequential(made.spectral_norm(nn.Conv2d(3, 16, 3)), made.orthogonal(nn.Conv2d(16, 32, 1))).eval()
    before = epitorch.count(model, X).madds
    plan = epitorch.plan(model, X, madds=before // 2)
    plain = (16 * 27 + 32 * 16) * 36
    assert before > plain
    epitorch.convert_(model, plan)
    assert epitorch.count(model, X).madds == plan.madds_fresh
    move_between_positions(model)
    assert epitorch.count(model, X).madds == plan.madds
    assert plan.madds is not None
    assert plan.madds <= before // 2


def test_a_layer_whose_attributes_clash_is_left_by_name() -> None:
    class Own(nn.Conv2d):
        index = 3

    plan = epitorch.plan(nn.Sequential(Own(3, 32, 3), nn.Conv2d(32, 32, 3)), X, ratio=1.5)
    assert plan.left == {"0": "name_clash"}
    assert set(plan.layers) == {"1"}


def test_a_model_that_is_converted_already_is_told_so() -> None:
    model = pair()
    epitorch.convert_(model, epitorch.plan(model, X, ratio=1.5))
    with pytest.raises(ConversionError, match="converted already"):
        epitorch.plan(model, X, ratio=1.5)


def test_uniform_keeps_the_same_share_everywhere_and_front_heavy_more_at_the_end() -> None:
    model, x = model_of("torchvision:squeezenet1_1"), torch.zeros(1, 3, 64, 64)
    shares = {}
    for policy in ("uniform", "front_heavy"):
        plan = epitorch.plan(model, x, ratio=3, policy=policy)  # type: ignore[arg-type]
        shares[policy] = [prod(p.epitome_shape) / prod(plan.weights[n].shape) for n, p in plan.layers.items()]
    assert max(shares["uniform"]) - min(shares["uniform"]) < 0.05
    front = shares["front_heavy"]
    assert front[0] < 0.5 * front[len(front) // 2] < 0.5 * front[-1]


def test_positions_keeps_shares_in_proportion_to_the_root_of_a_weight_s_positions() -> None:
    """ResNet-20 at a stem of stride 2: maps of 16x16, 8x8 and 4x4."""
    model, x = resnet20(10, stem_stride=2), torch.zeros(1, 3, 32, 32)
    dense = sum(p.numel() for p in model.parameters())
    plan = epitorch.plan(model, x, params=dense // 4, policy="positions", skip=["conv1", "fc"])
    share = {n: prod(p.epitome_shape) / prod(plan.weights[n].shape) for n, p in plan.layers.items()}
    assert plan.params <= dense // 4
    for before, after in (("layer1.1.conv1", "layer2.1.conv1"), ("layer2.1.conv1", "layer3.1.conv1")):
        assert share[before] == pytest.approx(2 * share[after], rel=0.15)
    half = epitorch.plan(model, x, params=dense // 2, policy="positions", skip=["conv1", "fc"])
    assert {name.split(".")[0] for name in half.layers} == {"layer2", "layer3"}  # shares above one: whole


def test_layers_are_chosen_by_pattern_type_and_predicate() -> None:
    model, x = torchvision.models.resnet18(num_classes=10), torch.zeros(1, 3, 32, 32)

    def layers(ratio: float, **choice: Any) -> set[str]:
        return set(epitorch.plan(model, x, ratio=ratio, **choice).layers)

    everything = layers(2)
    assert "fc" in everything
    assert layers(2, skip=[nn.Linear]) == everything - {"fc"}
    assert layers(1.01, only=[lambda name, layer: layer.weight.shape[-1] == 1 and "down" in name]) == {
        name for name in everything if "downsample" in name
    }
    assert layers(1.6, only=["layer4.*", nn.Linear], skip=["*.1.conv2"]) == {
        name for name in everything if name == "fc" or (name.startswith("layer4.") and not name.endswith("1.conv2"))
    }
    plan = epitorch.plan(model, x, ratio=1.6, only=["layer4.*"])
    assert {plan.left[name] for name in everything - set(plan.layers)} == {"skipped"}


def test_alignment_axes_and_skip_are_followed() -> None:
    model, x = model_of("timm:test_resnet"), torch.zeros(1, 3, 32, 32)
    axes = {"layer1.*": "out", "layer2.*": "in"}
    plan = epitorch.plan(model, x, ratio=1.1, align=8, skip=["fc", "layer4.*"], axes=axes)  # type: ignore[arg-type]
    assert {name for name, reason in plan.left.items() if reason == "skipped"} == {
        name for name in plan.weights if name == "fc" or name.startswith("layer4.")
    }
    for name, layer in plan.layers.items():
        weight = plan.weights[name].shape
        assert all(e == w or e % 8 == 0 for e, w in zip(layer.epitome_shape, weight, strict=True))
        assert layer.epitome_shape[2:] == weight[2:]
        if name.startswith("layer1."):
            assert layer.epitome_shape[1] == weight[1]
        if name.startswith("layer2."):
            assert layer.epitome_shape[0] == weight[0]
    assert any(name.startswith("layer1.") for name in plan.layers)
    assert any(name.startswith("layer2.") for name in plan.layers)


# ---- which layers take part ----


class Corners(nn.Module):
    """Attention, a weight read past forward, one never used, shared ones, derived ones, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.read = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)
        self.tied, self.tied_too = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.tied_too.weight = self.tied.weight
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 24))
        self.up = nn.ConvTranspose1d(24, 12, 2, groups=2)
        self.depth = nn.Conv1d(12, 12, 3, groups=12)

    def forward(self, x: Tensor) -> Tensor:  # shape: (N, T, 16)
        x = self.attention(x, x, x)[0]
        x = linear(x, self.read.weight, self.read.bias)
        x = self.normed(self.tied_too(self.tied(x)))
        return self.depth(self.up(x.transpose(1, 2)))


@pytest.mark.parametrize("index", ["learner", "fixed"])
def test_every_layer_is_converted_or_left_with_its_reason(index: Any) -> None:
    model, x = Corners(), torch.randn(2, 5, 16)
    plan = epitorch.plan(model, x, ratio=1.3, index=index)
    assert plan.left == {"tied": "shared_weight", "tied_too": "shared_weight", "depth": "depthwise"}
    # the forward of these is never called: a learner would see no features
    unseen = {"attention.out_proj", "read", "unused"}
    assert {name for name, layer in plan.layers.items() if layer.index == "direct"} == (
        unseen if index == "learner" else set()
    )
    assert set(plan.layers) == {*unseen, "normed", "up"}
    epitorch.convert_(model, plan)
    cost = epitorch.count(model, x)
    assert (cost.params, cost.madds) == (plan.params, plan.madds_fresh)
    model.train()(x).square().sum().backward()
    trained = [model.attention.out_proj.epitome, model.read.epitome, model.up.epitome]  # type: ignore[union-attr]
    assert all(torch.count_nonzero(parameter.grad) for parameter in trained)  # type: ignore[arg-type]


def test_a_layer_that_does_no_work_has_no_part_in_a_budget_on_multiply_adds() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.auxiliary = nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return self.head(x) + (self.auxiliary(x).mean() if self.training else 0)

    model, x = Auxiliary(), torch.randn(2, 16)
    assert epitorch.plan(model, x, madds=1200).left == {"auxiliary": "not_called"}
    plan = epitorch.plan(model, x, ratio=2)
    assert plan.layers["auxiliary"].index == "direct"
    epitorch.convert_(model, plan)
    assert epitorch.count(model, x).params == plan.params


def test_depthwise_layers_take_part_when_asked() -> None:
    plan = epitorch.plan(Corners(), torch.randn(2, 5, 16), ratio=1.3, depthwise=True)
    assert plan.layers["depth"].epitome_shape[1:] == (1, 3)
    assert "depthwise" not in plan.left.values()


def test_layers_converted_before_stay_and_count() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.zeros(1, 64)
    epitorch.convert_(model, Plan({"0": LayerPlan((16, 64))}))
    plan = epitorch.plan(model, x, ratio=2)
    assert plan.left == {"0": "already_epitome"}
    epitorch.convert_(model, plan)
    assert epitorch.count(model, x).params == plan.params


def test_too_small_and_budget_are_told_apart() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 1, 1), nn.Conv2d(1, 1, 1))
    plan = epitorch.plan(model, X, ratio=1)
    assert plan.left == {"0": "budget", "1": "budget", "2": "too_small"}
    assert plan.params == sum(p.numel() for p in model.parameters())


class OwnForward(nn.Linear):
    """A subclass: what it does with its weight is its own affair."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight * 2, self.bias)


def test_a_subclass_saves_parameters_but_no_madds() -> None:
    model, x = nn.Sequential(OwnForward(64, 64), nn.Linear(64, 64)), torch.zeros(1, 64)
    assert set(epitorch.plan(model, x, ratio=2).layers) == {"0", "1"}
    plan = epitorch.plan(model, x, madds=6000)
    assert plan.left == {"0": "too_small"}
    epitorch.convert_(model, plan)
    assert epitorch.count(model, x).madds == plan.madds_fresh


# ---- what is refused ----


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3))


def traced() -> nn.Module:
    return torch.jit.trace(pair(), X)  # type: ignore[no-any-return]


def quantised() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8))
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (nn.ReLU, {"ratio": 2}, ["no parameters"]),
        (quantised, {"ratio": 2}, ["no parameters", "quantised"]),
        (traced, {"ratio": 2}, ["scripted or traced", "then script it"]),
        (lambda: nn.Sequential(nn.LazyConv2d(4, 3)), {"ratio": 2}, ["0.weight", "lazy", "run the model once"]),
        (lambda: nn.Conv2d(3, 16, 3), {"ratio": 2}, ["nothing to convert", "448 parameters"]),
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 1)), {"ratio": 2}, ["does not run on the example", "4 channels"]),
        (pair, {}, ["one budget", "none"]),
        (pair, {"ratio": 2, "params": 3000}, ["one budget", "params=3000, ratio=2"]),
        (pair, {"ratio": 0.5}, ["at least 1"]),
        (pair, {"ratio": float("nan")}, ["ratio is not valid"]),
        (pair, {"params": 0}, ["whole number above 0"]),
        (pair, {"params": 10.5}, ["whole number above 0"]),
        (pair, {"madds": True}, ["whole number above 0"]),
        (pair, {"params": 10}, ["too small", "at least 66 parameters"]),
        (pair, {"params": 10**6}, ["larger than the model", "at most 5,088 parameters"]),
        (pair, {"madds": 10}, ["too small", "multiply-adds"]),
        (pair, {"madds": 10, "form": "grid"}, ["save no multiply-adds", "form='partial', 'separable'"]),
        (pair, {"ratio": 2, "policy": "unifrom"}, ["did you mean 'uniform'"]),
        (pair, {"ratio": 2, "form": "both"}, ["auto | separable | grid | fine | partial"]),
        (pair, {"ratio": 2, "policy": "sensitivity", "sensitivity": 3}, ["sensitivity is not valid", "3"]),
        (pair, {"ratio": 2, "axes": {"0": "inn"}}, ["auto | out | in | both", "did you mean 'in'"]),
        (pair, {"ratio": 2, "index": "learned"}, ["learner | direct | fixed"]),
        (pair, {"ratio": 2, "align": 0}, ["align"]),
        (pair, {"ratio": 2, "skip": "fc"}, ["skip is not a list of layers"]),
        (pair, {"ratio": 2, "skip": nn.Linear}, ["skip is not a list of layers"]),
        (pair, {"ratio": 2, "only": [3]}, ["selects no layer", "3"]),
        (pair, {"ratio": 2, "skip": ["00"]}, ["no layer has the name", "did you mean '0'"]),
        (pair, {"ratio": 2, "skip": ["*"]}, ["nothing to convert"]),
    ],
)
def test_bad_input_is_refused_with_what_to_do(make: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        epitorch.plan(make(), X, **options)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("total", ["least", "most"])
def test_the_feasible_totals_that_a_message_names_are_feasible(total: str) -> None:
    amount = {"least": 66, "most": 5088}[total]
    assert epitorch.plan(pair(), X, params=amount).params == amount
    with pytest.raises(ConversionError, match=f"{amount:,} parameters"):
        epitorch.plan(pair(), X, params=amount + (1 if total == "most" else -1))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_scripted_part_is_left_and_named() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Conv2d(3, 8, 3), X), nn.Conv2d(8, 32, 3))
    plan = epitorch.plan(model, X, ratio=1.5)
    assert set(plan.layers) == {"1"}
    assert plan.left == {"0": "scripted"}


def test_no_error_escapes_the_family() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("of its own")

    with pytest.raises(EpitorchError, match="of its own"):
        epitorch.plan(Broken(), X, ratio=2)
