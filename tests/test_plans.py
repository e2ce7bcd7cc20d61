"""Plans as data: files that a person may edit, what is refused, the table, and plans for another model."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import epitorch
from epitorch.errors import ConversionError
from epitorch.nn import EpitomeConv2d
from epitorch.plans import REASONS, Budget, LayerPlan, Plan, WeightFacts, _data
from epitorch.plans._table import rank_bounds
from epitorch.spec import EpitomeSpec

SIZES = st.lists(st.integers(1, 9), min_size=2, max_size=5).map(tuple)
MAYBE = st.none() | st.integers(1, 9)
LAYERS = st.builds(
    LayerPlan,
    SIZES,
    block_out=MAYBE,
    block_in=MAYBE,
    spatial_starts=st.sampled_from(["in", "out", "grid"]),
    channel_starts=st.sampled_from(["separable", "grid"]),
    index=st.sampled_from(["learner", "direct", "fixed"]),
    group_length=MAYBE,
    flatten_kernel=st.booleans(),
    momentum=st.floats(0, 0.99),
    spatial_shift=st.booleans(),
)
NAMES = st.text("abé019._: -#'\"{}", min_size=1, max_size=8) | st.sampled_from(["0", "1e3", "true", "null", "layer1.0"])


def network() -> nn.Sequential:
    layers = {"first": nn.Conv2d(3, 16, 3), "up": nn.ConvTranspose2d(16, 8, 2), "last": nn.Conv2d(8, 4, 1)}
    return nn.Sequential(*layers.values())


def planned(model: nn.Module) -> Plan:
    return epitorch.plan(model, torch.zeros(1, 3, 6, 6), ratio=1.5)


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_plan_is_read_as_it_was_written(suffix: str, tmp_path: Path) -> None:
    plan = planned(network())
    path = plan.save(tmp_path / f"plan{suffix}")
    loaded = Plan.load(path)
    assert loaded == plan
    assert (loaded.params, loaded.madds, loaded.madds_fresh) == (plan.params, plan.madds, plan.madds_fresh)
    assert str(loaded) == str(plan)
    assert dataclasses.replace(loaded, layers={}) != plan


@given(layers=st.dictionaries(NAMES, LAYERS, max_size=4), suffix=st.sampled_from([".yaml", ".json"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_any_plan_survives_its_file(layers: dict[str, LayerPlan], suffix: str, tmp_path: Path) -> None:
    plan = Plan(layers, {"left": "skipped"} if "left" not in layers else {})
    assert Plan.load(plan.save(tmp_path / f"any{suffix}")) == plan


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    for call in (Plan({}).save, Plan.load):
        with pytest.raises(ConversionError, match="JSON or YAML"):
            call(tmp_path / "plan.txt")


MINIMAL = "layers:\n  conv: {epitome_shape: [4, 3, 3, 3]}\n"


def test_a_plan_written_by_hand_needs_layers_only(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(MINIMAL)
    plan = Plan.load(path)
    assert plan == Plan({"conv": LayerPlan((4, 3, 3, 3))})
    assert (plan.params, plan.madds) == (None, None)
    assert "written by hand" in str(plan)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "layers: {conv: {epitome_shap: [4, 3]}}",
            ["layers.conv.epitome_shap", "did you mean 'epitome_shape'", "line 1"],
        ),
        ("layers:\n  conv: {epitome_shape: [4.0, 3]}", ["layers.conv.epitome_shape", "whole numbers", "4.0", "line 2"]),
        ("layers: {conv: {epitome_shape: [4, true]}}", ["whole numbers", "True"]),
        ("layers: {conv: {epitome_shape: [0, 3]}}", ["whole numbers above 0"]),
        ("layers: {conv: {epitome_shape: 4}}", ["a list of whole numbers"]),
        ("layers: {conv: {index: fixed}}", ["layers.conv.epitome_shape", "missing"]),
        ("layers: {conv: {epitome_shape: [4, 3], flatten_kernel: 'yes'}}", ["true | false", "'yes'"]),
        ("layers: {conv: {epitome_shape: [4, 3], index: learned}}", ["learner | direct | fixed", "'learned'"]),
        ("layers: {conv: {epitome_shape: [4, 3], momentum: 1.5}}", ["layers.conv.momentum", "1.5"]),
        ("layers: {conv: [4, 3]}", ["layers.conv", "not a mapping"]),
        ("layers: 4", ["'layers'", "a mapping"]),
        ("left: {conv: skipped}", ["'layers'", "a mapping"]),
        ("layers: {}\nleft: {conv: bored}", ["left.conv", "skipped", "'bored'", "line 2"]),
        ("layers: {conv: {epitome_shape: [4, 3]}}\nleft: {conv: skipped}", ["'conv' is planned and left"]),
        ("layers: {}\nlayer: {}", ["unknown key 'layer'", "did you mean 'layers'"]),
        ("layers: {}\nformat: 2", ["'format'", "at most 1"]),
        ("layers: {}\nlayers: {}", ["given twice"]),
        ("layers: {", ["not valid YAML"]),
        ("[1]", ["not a mapping"]),
        (
            "layers:\n  conv: {epitome_shape: [4, 3, 3]}\nweights: {conv: {shape: [8, 3, 3, 3]}}",
            ["line 2", "layers.conv", "4 sizes", "3 sizes"],
        ),
        ("layers: {conv: {epitome_shape: [4, 3], block_out: 5}}\nweights: {conv: {shape: [8, 3]}}", ["block_out"]),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConversionError) as caught:
        Plan.load(path)
    assert "plan.yaml" in str(caught.value)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ('{"layers": {}, "layers": {}}', "'layers' is given twice"),
        ('{"layers": {"conv": {"epitome_shape": [4, 3], "spatial_shift": "no"}}}', "true | false"),
    ],
)
def test_a_damaged_json_plan_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConversionError) as caught:
        Plan.load(path)
    assert words in str(caught.value)


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="cannot be read"):
        Plan.load(tmp_path / "none.yaml")


def test_editing_by_hand_changes_the_parameters_and_forgets_the_madds(tmp_path: Path) -> None:
    model = network()
    plan = planned(model)
    data = json.loads(plan.save(tmp_path / "plan.json").read_text())
    data["layers"]["0"]["epitome_shape"] = [2, 3, 3, 3]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    edited = Plan.load(tmp_path / "plan.json")
    assert (edited.madds, edited.madds_of("0")) == (None, None)
    assert edited.madds_of("1") == plan.madds_of("1")
    epitorch.convert_(model, edited)
    assert edited.params == epitorch.count(model, torch.zeros(1, 3, 6, 6)).params != plan.params
    assert "> ?" in str(edited)


def test_an_edited_plan_that_breaks_its_budget_says_so() -> None:
    plan = planned(network())
    whole = {**plan.layers, "0": LayerPlan((16, 3, 3, 3)), "1": LayerPlan((16, 8, 2, 2))}
    assert "exceeded by" in str(dataclasses.replace(plan, layers=whole))
    assert "exceeded by" not in str(plan)


# ---- another model ----


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(8, 4, 1)), ["0: ", "(8, 3, 3, 3)"]),
        (nn.Sequential(nn.Conv2d(3, 16, 3)), ["1: ", "(16, 8, 2, 2)", "no layer"]),
        (nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), ["1: ", "no weight"]),
        (nn.Sequential(*network(), nn.Conv2d(4, 4, 1)), ["3: ", "no such layer", "(4, 4, 1, 1)"]),
    ],
)
def test_a_plan_for_another_model_names_the_first_layer_that_differs(other: nn.Module, words: list[str]) -> None:
    plan = planned(network())
    plan.check(network())
    with pytest.raises(ConversionError, match="a plan for another model") as caught:
        plan.check(other)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_check_sees_the_weight_of_converted_layers_and_no_learner() -> None:
    model = network()
    plan = planned(model)
    epitorch.convert_(model, plan)
    assert isinstance(model[0], EpitomeConv2d)
    assert model[0].learner is not None
    plan.check(model)


def test_a_plan_without_facts_fits_any_model() -> None:
    Plan({"0": LayerPlan((4, 3, 3, 3))}).check(nn.Sequential(nn.Conv2d(3, 9, 3)))


# ---- the page in the docs ----

PAGE = (Path(__file__).parents[1] / "docs" / "plans.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "plans.md", "exec"), scope)
    assert scope["plan"].params <= sum(p.numel() for p in scope["small"].parameters()) // 2
    (example,) = blocks("yaml")
    (tmp_path / "example.yaml").write_text(example)
    assert Plan.load(tmp_path / "example.yaml").layers == {"conv1": LayerPlan((16, 3, 3, 3), channel_starts="grid")}


def test_every_reason_is_explained() -> None:
    assert not [reason for reason in REASONS if f"`{reason}`" not in PAGE]
    explained = Path(_data.__file__).read_text(encoding="utf-8").partition("closed list")[2]
    assert not [reason for reason in REASONS if reason not in explained]


# ---- table ----


def test_the_table_shows_each_layer_and_the_totals() -> None:
    facts = {
        "a": WeightFacts((8, 4, 3, 3), False, None, 2880, 1500, 1400, "4x4x3x3 separable"),
        "b": WeightFacts((2, 8)),
    }
    plan = Plan({"a": LayerPlan((4, 4, 3, 3))}, {"b": "skipped"}, facts, Budget("Net", "params", 170, 304, 3000))
    lines = str(plan).splitlines()
    rows = [" ".join(line.split()) for line in lines[1:3]]
    assert rows == [
        "a 8x4x3x3 4x4x3x3 separable 2x1 learner 0.507 8 > 4 288 > 146 2,880 > 1,500",
        "b 2x8 left: skipped 16 ?",
    ]
    rest = [" ".join(line.split()) for line in lines[3:]]
    assert rest == [
        "1 layers to convert, 1 left",
        "parameters 304 > 162",
        "MAdds 3,000 > 1,620",
        "1,520 MAdds right after conversion: whole starts are not interpolated",
        "budget 170 parameters, 8 of it unused",
    ]


@given(
    weight=st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 2), st.integers(1, 2)),
    filters=st.integers(1, 8),
    inputs=st.integers(1, 8),
    form=st.sampled_from(["separable", "grid"]),
)
@settings(deadline=None, max_examples=60)
def test_no_generated_weight_exceeds_its_rank_bound(
    weight: tuple[int, ...], filters: int, inputs: int, form: Any
) -> None:
    shape = (min(filters, weight[0]), min(inputs, weight[1]), *weight[2:])
    layer = EpitomeConv2d(weight[1], weight[0], weight[2:], epitome_shape=shape, channel_starts=form, index="fixed")
    spec = EpitomeSpec.create(weight, shape, channel_starts=form)
    generated = layer.double().weight.detach().reshape(weight[0], -1)
    assert int(torch.linalg.matrix_rank(generated, tol=1e-6)) <= rank_bounds(spec)[1] <= rank_bounds(spec)[0]


def test_the_rank_bound_is_reached() -> None:
    layer = EpitomeConv2d(8, 8, 1, epitome_shape=(4, 4, 1, 1), index="fixed")
    assert int(torch.linalg.matrix_rank(layer.weight.detach()[..., 0, 0], tol=1e-5)) == rank_bounds(layer.spec)[1] == 4


def test_checking_a_plan_takes_no_step_of_a_power_iteration() -> None:
    model: Any = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 16, 3))).train()
    plan = epitorch.plan(model, torch.zeros(1, 3, 8, 8), ratio=1.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan.check(model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    model[0].weight  # noqa: B018 - reading the property is what must not happen
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("key", ["params_dense", "madds_dense"])
def test_totals_below_those_of_the_layers_are_refused(key: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3))
    file = epitorch.plan(model, torch.zeros(1, 3, 8, 8), ratio=2).save(tmp_path / "plan.json")
    content = json.loads(file.read_text())
    content["budget"][key] = 100
    file.write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=f"budget.{key}.*less than what the planned layers have"):
        Plan.load(file)


def test_a_layer_named_by_a_number_is_wanted_in_quotes(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("layers:\n  0: {epitome_shape: [8, 3, 3, 3]}\n")
    with pytest.raises(ConversionError, match=r'line 2: a key is not text(.|\n)*in quotes it is: "0"'):
        Plan.load(file)
    file.write_text('layers:\n  "0": {epitome_shape: [8, 3, 3, 3]}\n')
    assert set(Plan.load(file).layers) == {"0"}
