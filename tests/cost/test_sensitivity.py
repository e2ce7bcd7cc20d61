"""What compressing one layer costs, and plans made by it."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import epitorch
from epitorch.cost._sensitivity import Sensitivity, approximate, convex_hull
from epitorch.errors import InputError
from epitorch.functional import sample_weight
from epitorch.init import evenly_spread
from epitorch.spec import EpitomeSpec

X = torch.zeros(1, 8, 4, 4)


def twins() -> nn.Sequential:
    """Two layers of one shape; the first one's filters repeat, so an epitome of half the size loses nothing."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(128, 3))
    with torch.no_grad():
        model[0].weight[4:] = model[0].weight[:4].roll(2, 0)  # type: ignore[index]
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, 8, 4, 4), torch.arange(n) % 3) for n in (4, 2)]


@given(
    weight=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 2)),
    filters=st.integers(1, 6),
    inputs=st.integers(1, 6),
    starts=st.sampled_from(["separable", "grid"]),
)
@settings(deadline=None, max_examples=50)
def test_the_approximation_is_the_least_squares_solution(
    weight: tuple[int, ...], filters: int, inputs: int, starts: Any
) -> None:
    shape = (min(filters, weight[0]), min(inputs, weight[1]), *weight[2:])
    spec = EpitomeSpec.create(weight, shape, channel_starts=starts)
    whole = evenly_spread(spec, whole=True)
    units = torch.eye(spec.num_epitome, dtype=torch.float64).reshape(-1, *shape)
    design = torch.stack([sample_weight(unit, whole, spec).reshape(-1) for unit in units], 1)
    target = torch.randn(weight, dtype=torch.float64)
    solution = torch.linalg.pinv(design) @ target.reshape(-1)
    torch.testing.assert_close(approximate(target, spec).reshape(-1), design @ solution)
    assert spec.num_epitome == spec.num_weight or not torch.allclose(approximate(target, spec), target)


def test_reconstruction_errors_find_the_layer_that_loses_nothing() -> None:
    found = epitorch.sensitivity(twins(), X, shares=(0.5,), axes="out", form="separable")
    assert found.kind == "reconstruction"
    (easy,), (hard,) = found.costs["0"], found.costs["2"]
    assert easy == pytest.approx((0.5, 0.0), abs=1e-6)
    assert hard[0] == 0.5
    assert 0.2 < hard[1] < 1


def test_with_data_the_cost_is_the_increase_of_the_mean_loss() -> None:
    model, data = twins(), batches()
    state = copy.deepcopy(model.state_dict())
    found = epitorch.sensitivity(model, X, data, shares=(0.25, 0.5), axes="out")
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert found.kind == "loss"
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    changed: Any = copy.deepcopy(model)
    spec = EpitomeSpec.create((8, 8, 1, 1), (4, 8, 1, 1), channel_starts="grid")
    changed[2].weight.data = approximate(model[2].weight.detach(), spec)  # type: ignore[arg-type]
    wanted = cross_entropy(changed(inputs), targets) - cross_entropy(model(inputs), targets)
    share, cost = found.costs["2"][-1]
    assert share == 0.5
    assert cost == pytest.approx(float(wanted.detach()), abs=1e-5)
    twice = epitorch.sensitivity(model, X, data, lambda out, y: 2 * cross_entropy(out, y), shares=(0.5,), axes="out")
    assert twice.costs["2"][0][1] == pytest.approx(2 * cost, abs=1e-5)


def test_a_plan_compresses_where_it_costs_least() -> None:
    measured = epitorch.sensitivity(twins(), X, shares=(0.25, 0.5, 0.75), axes="out", form="separable")
    told = Sensitivity("loss", {"0": ((0.5, 0.01),), "2": ((0.5, 0.9),)})
    swapped = Sensitivity("loss", {"0": told.costs["2"], "2": told.costs["0"]})
    for costs, easy, hard in ((measured, "0", "2"), (told, "0", "2"), (swapped, "2", "0")):
        plan = epitorch.plan(
            twins(), X, ratio=1.05, policy="sensitivity", sensitivity=costs, skip=["4"], axes="out", form="separable"
        )
        assert plan.layers[easy].epitome_shape[0] < 8
        assert hard not in plan.layers


def test_by_itself_the_policy_measures_reconstruction() -> None:
    model = twins()
    alone = epitorch.plan(model, X, ratio=2, policy="sensitivity")
    assert alone == epitorch.plan(model, X, ratio=2, policy="sensitivity", sensitivity=epitorch.sensitivity(model, X))
    assert alone != epitorch.plan(model, X, ratio=2)


def test_sensitivities_are_kept_as_json(tmp_path: Path) -> None:
    found = epitorch.sensitivity(twins(), X)
    assert Sensitivity.load(found.save(tmp_path / "s.json")) == found


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"kind": "loss"}', '{"kind": "x", "costs": {}}', '{"kind": "loss", "costs": {"a": [[2, 1]]}}', "null"],
)
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(InputError):
        Sensitivity.load(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"shares": (0.5, 1.5)}, "0 < share < 1"), ({"shares": ()}, "no shares"), ({"data": []}, "at least one batch")],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        epitorch.sensitivity(twins(), X, **options)


def test_measurements_of_another_model_are_refused() -> None:
    with pytest.raises(InputError, match="no sensitivity is known for '0'"):
        epitorch.plan(twins(), X, ratio=2, policy="sensitivity", sensitivity=Sensitivity("loss", {"2": ((0.5, 1.0),)}))


POINTS = st.dictionaries(st.floats(0.01, 0.99), st.floats(-1, 5), min_size=1, max_size=6)


@given(POINTS, st.sampled_from(["loss", "reconstruction"]))
@settings(deadline=None)
def test_the_cost_is_convex_and_falls_to_nothing(points: dict[float, float], kind: Any) -> None:
    if kind == "reconstruction":
        points = {share: abs(error) / 5 for share, error in points.items()}
    cost = Sensitivity(kind, {"a": tuple(sorted(points.items()))}).cost("a")
    values = [cost(0.002 * k) for k in range(1, 501)]
    assert values[-1] == pytest.approx(0, abs=1e-9)
    scale = 1e-7 * (1 + abs(values[0]))
    falls = [a - b for a, b in pairwise(values)]
    assert all(fall >= -scale for fall in falls)
    assert all(a >= b - scale for a, b in pairwise(falls))


def test_the_hull_lies_below_every_point() -> None:
    assert convex_hull([(0.25, 1.0), (0.5, 0.9), (0.75, 0.1)]) == [(0.25, 1.0), (0.75, 0.1), (1.0, 0.0)]
    assert convex_hull([(0.5, -1.0)]) == [(0.5, 0.0), (1.0, 0.0)]


@pytest.mark.parametrize("index, starts", [("direct", "searched"), ("fixed", "searched_whole")])
def test_searched_starts_cost_what_the_warm_start_leaves(index: Any, starts: Any) -> None:
    """Where starts are fixed they are whole, which fits worse."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1))
    weight = model[0].weight.detach().clone()
    costs = {
        one: epitorch.sensitivity(model, X, shares=(0.7,), form="fine", starts=one).costs["0"]
        for one in ("searched", "searched_whole")
    }
    share, cost = costs[starts][-1]
    plan = epitorch.plan(model, X, params=round(share * 64) + 16 + 8, form="fine", index=index)
    epitorch.convert_(model, plan, init="least_squares")
    made: Any = model[0].weight
    left = torch.linalg.vector_norm(made.detach() - weight) / torch.linalg.vector_norm(weight)
    assert cost == pytest.approx(float(left), rel=1e-4)
    assert costs["searched"][-1][1] < costs["searched_whole"][-1][1]
