"""Recipes: what is read, and what is refused with which words."""

from __future__ import annotations

import dataclasses
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import epitorch
from epitorch.cost import count
from epitorch.errors import ConversionError, RecipeError
from epitorch.models.efficientnet import efficientnet_plan
from epitorch.models.mobilenetv2 import mobilenetv2
from epitorch.models.resolve import build_model
from epitorch.plans import planned_params
from epitorch.training.plans import recipe_plan
from epitorch.training.recipe import (
    DataSection,
    EpitomeSection,
    Recipe,
    TrainingSection,
    load_recipe,
    parse_recipe,
    recipe_names,
)

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.yaml"))
IMAGE = torch.zeros(1, 1, 8, 8)
SHORT = [name for name in FILES if name.startswith("cifar10-short/")]


def minimal(**sections: Any) -> dict[str, Any]:
    data = {"model": {"name": "epitorch:digits_cnn"}, "training": {"epochs": 2, "peak_lr": 0.1}}
    return {**data, **sections}


def read(text: str, tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def refusal(text: str, tmp_path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        read(text, tmp_path)
    return str(caught.value)


GOOD = """\
model:
  name: epitorch:digits_cnn
training:
  epochs: 2
  peak_lr: 0.1
"""


def test_defaults_are_filled_in() -> None:
    recipe = parse_recipe(minimal(), source="here", name="small")
    assert recipe.epitome is None
    assert recipe.data == DataSection(holdout=5000, crop_padding=4, flip=True)
    assert recipe.training == TrainingSection(epochs=2, peak_lr=0.1)
    assert recipe.content()["training"]["momentum"] == 0.9
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.training.epochs = 3  # type: ignore[misc]


def test_sha256_is_that_of_the_file(tmp_path: Path) -> None:
    recipe = read(GOOD, tmp_path)
    assert recipe.sha256 == sha256((tmp_path / "recipe.yaml").read_bytes()).hexdigest()
    assert read(GOOD + "# a comment\n", tmp_path).sha256 != recipe.sha256


@pytest.mark.parametrize("text", ["5e-4", "5.0e-4", "0.0005", "5E-4"])
def test_numbers_with_an_exponent_are_numbers(text: str, tmp_path: Path) -> None:
    recipe = read(GOOD + f"  weight_decay: {text}\n", tmp_path)
    assert recipe.training.weight_decay == 5e-4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  epoch: 3", ["unknown key 'training.epoch'; did you mean 'epochs'?", "line 6"]),
        (
            "  epoch: 3\n  momentun: 0.5",
            ["unknown keys 'training.epoch'; did you mean 'epochs'? and 'training.momentun'", "mean 'momentum'?", "6"],
        ),
        ("  peak_LR: 3", ["unknown key 'training.peak_LR'; did you mean 'peak_lr'?", "line 6"]),
        ("epitomes: {c: 0.2}", ["unknown key 'epitomes'; did you mean 'epitome'?", "line 6"]),
        ("epitome: {c: 0.2, lastconv: true}", ["unknown key 'epitome.lastconv'; did you mean 'last_conv'?"]),
        ("  seed: -1", ["'training.seed'", "a whole number of at least 0", "-1", "line 6"]),
        ("  seed: 1.0", ["'training.seed'", "1.0"]),
        ("  seed: 9223372036854775808", ["'training.seed'", "at most 9223372036854775807"]),
        ("  nesterov: true\n  momentum: 0", ["'training.nesterov' is on without momentum", "line 6"]),
        ("epitome: {layers: {a: 1}, policy: front_heavy}", ["'epitome.policy' has no effect", "line 6"]),
        ("epitome: {c: 0.2, policy: sideways}", ["'epitome.policy'", "uniform | front_heavy"]),
        ("epitome: {layers: {a: 1}, last_conv: true}", ["'epitome.last_conv' has no effect", "line 6"]),
        ("epitome: {layers: {}}", ["'epitome.layers'", "at least one key", "{}"]),
        ("description: 2026-02-30", ["a value is not valid", "2026-02-30", "line 6"]),
        ("description: a\0b", ["not valid YAML"]),
        ("  seed: true", ["'training.seed'", "True"]),
        ("  momentum: 1.5", ["'training.momentum'", "at most 1", "1.5"]),
        ("  weight_decay: .nan", ["'training.weight_decay'", "nan"]),
        ("  weight_decay: many", ["'training.weight_decay'", "'many'"]),
        ("  nesterov: 1", ["'training.nesterov'", "true | false"]),
        ("  precision: fp8", ["'training.precision'", "fp32 | bf16 | fp16", "'fp8'"]),
        ("  optimizer: [sgd]", ["'training.optimizer'", "sgd"]),
        ("data: 5000", ["'data' is not a mapping", "holdout", "line 6"]),
        ("data: {holdout: 0}", ["'data.holdout'", "at least 1"]),
        ("epitome: {c: 0}", ["'epitome.c'", "above 0 and at most 1"]),
        ("epitome: {c: 0.2, match_params: 9}", ["exactly one of", "c and match_params"]),
        ("epitome: {index: fixed}", ["exactly one of", "none of them"]),
        ("epitome: {plan: a.yaml, c: 0.2}", ["exactly one of", "c and plan"]),
        ("epitome: {budget: {ratio: 2}, c: 0.2}", ["exactly one of", "c and budget"]),
        ("epitome: {budget: {}}", ["'epitome.budget'", "at least one key"]),
        ("epitome: {budget: {form: grid}}", ["exactly one of params, madds, ratio", "none of them", "line 6"]),
        ("epitome: {budget: {ratio: 2, madds: 9}}", ["exactly one of params, madds, ratio", "madds and ratio"]),
        ("epitome: {budget: {ratio: 1}}", ["'epitome.budget.ratio'", "above 1"]),
        ("epitome: {budget: {ratio: 2, skip: conv1}}", ["'epitome.budget.skip'", "list of name patterns", "'conv1'"]),
        ("epitome: {budget: {ratio: 2, axes: {conv1: up}}}", ["'epitome.budget.axes'", "mapping from name pattern"]),
        ("epitome: {budget: {ratio: 2, skips: []}}", ["unknown key", "did you mean 'skip'"]),
        ("epitome: {budget: {ratio: 2}, group_length: 8}", ["budget.align of 8", "line 6", "add align: 8"]),
        ("epitome: {budget: {ratio: 2, align: 4}, group_length: 8}", ["align 4, group_length 8"]),
        ("epitome: {budget: {ratio: 2}, policy: front_heavy}", ["'epitome.policy' has no effect", "'policy', 'skip'"]),
        ("epitome: {budget: {ratio: 2}, last_conv: true}", ["'epitome.last_conv' has no effect", "'epitome.budget'"]),
        ("epitome: {plan: a.yaml, index: fixed}", ["'epitome.index' has no effect beside 'epitome.plan'"]),
        ("epitome: {c: 0.2, freeze_last_epochs: 3}", ["'epitome.freeze_last_epochs' is longer", "training.epochs = 2"]),
        ("epitome: {c: 0.2, snap: true}", ["'epitome.snap'", "freeze_last_epochs"]),
        ("name: ../../etc", ["'name'", "'../../etc'"]),
        ("  epochs: 4", ["'training.epochs' is given twice", "line 4 already", "line 6"]),
        ("data: &a {holdout: *a}", ["alias"]),
        ("1: 2", ["a key is not text"]),
        ("data: {holdout: 5", ["not valid YAML"]),
    ],
)
def test_refusals_say_what_where_and_what_instead(line: str, words: list[str], tmp_path: Path) -> None:
    message = refusal(GOOD + line + "\n", tmp_path)
    assert str(tmp_path / "recipe.yaml") in message.splitlines()[0]
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is not a mapping", "model"]),
        ("[1, 2]", ["is not a mapping"]),
        ("model: {name: x:y}", ["'training.epochs' is missing"]),
        ("training: {epochs: 1, peak_lr: 1}", ["'model.name' is missing"]),
        ("model:\n", ["'model' is not a mapping"]),
    ],
)
def test_missing_parts_are_named(text: str, words: list[str], tmp_path: Path) -> None:
    message = refusal(text, tmp_path)
    assert all(word in message for word in words)


@given(st.sampled_from([f.name for f in dataclasses.fields(TrainingSection)]), st.data())
def test_a_key_short_of_one_letter_is_recognised(key: str, data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(key) - 1))
    typo = key[:gone] + key[gone + 1 :]
    training = {"epochs": 1, "peak_lr": 0.1, typo: 1}
    with pytest.raises(RecipeError, match="unknown key") as caught:
        parse_recipe(minimal(training=training), source="here")
    assert f"did you mean '{key}'" in str(caught.value)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(path)


def test_names_are_looked_up_in_the_working_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits/dense").model.arguments == {"widths": [16, 32, 48, 64]}
    mine = tmp_path / "recipes" / "digits" / "dense.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(GOOD, encoding="utf-8")
    assert load_recipe("digits/dense").model.arguments == {}
    assert "digits/dense" in recipe_names()


def test_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(RecipeError, match="did you mean 'cifar10-short/dense'"):
        load_recipe("cifar10-short/dens")


# ---- the recipes that come with the project ----


@pytest.mark.parametrize("name", FILES)
def test_project_recipes_load(name: str) -> None:
    recipe = load_recipe(RECIPES / name)
    assert recipe.name == name.removesuffix(".yaml")
    assert recipe.content()["model"].items() >= yaml.safe_load(recipe.text)["model"].items()


def test_short_recipes_differ_in_the_model_only() -> None:
    recipes = [load_recipe(RECIPES / name) for name in SHORT]
    assert len(recipes) == 14
    assert {recipe.training for recipe in recipes} == {
        TrainingSection(epochs=8, peak_lr=0.15, batch_size=128, weight_decay=5e-4)
    }
    assert {recipe.data for recipe in recipes} == {DataSection()}
    shared = {"num_classes": 10, "cifar": True, "stem_stride": 2}
    for recipe in recipes:
        assert shared.items() <= recipe.model.arguments.items()
        assert recipe.epitome is None or recipe.epitome.last_conv or recipe.epitome.budget is not None


def test_matched_recipes_are_as_large_as_the_narrow_network() -> None:
    narrow = load_recipe(RECIPES / "cifar10-short/narrow-0.18.yaml")
    total = sum(p.numel() for p in build_model(narrow.model.name, narrow.model.arguments).parameters())
    dense = mobilenetv2(10, cifar=True, stem_stride=2)
    for index in ("learner", "direct", "fixed"):
        section = load_recipe(RECIPES / f"cifar10-short/epitome-matched-{index}.yaml").epitome
        assert section is not None
        assert section.match_params == total
        matched = planned_params(dense, recipe_plan(dense, section, torch.zeros(1, 3, 32, 32)))
        assert 0 <= total - matched < 0.001 * total


# ---- plans ----


def test_epitome_c_is_for_efficientnet_too_and_refuses_others_by_name() -> None:
    section = EpitomeSection(c=0.5, policy="front_heavy", classifier=0.5, index="direct")
    with torch.device("meta"):
        model = build_model("timm:efficientnet_b0")
        other = build_model("timm:resnet18")
    plan = recipe_plan(model, section, torch.zeros(1, 3, 224, 224))
    wanted = efficientnet_plan(model, 0.5, policy="front_heavy", classifier=0.5, index="direct")
    assert (plan.layers, plan.left) == (wanted.layers, wanted.left)
    assert plan.layers != efficientnet_plan(model, 0.5, classifier=0.5, index="direct").layers
    fitted = planned_params(
        model, recipe_plan(model, EpitomeSection(match_params=3_000_000), torch.zeros(1, 3, 224, 224))
    )
    assert 2_990_000 < fitted <= 3_000_000
    with pytest.raises(ConversionError, match=r"(?s)got: +ResNet.*epitome\.budget"):
        recipe_plan(other, section, torch.zeros(1, 3, 224, 224))


def test_layers_become_a_plan() -> None:
    layers = {"conv2": {"epitome_shape": [16, 8, 3, 3], "channel_starts": "grid"}}
    recipe = parse_recipe(minimal(epitome={"layers": layers, "index": "fixed", "momentum": 0.5}), source="here")
    assert recipe.epitome is not None
    plan = recipe_plan(build_model("epitorch:digits_cnn"), recipe.epitome, IMAGE)
    assert list(plan.layers) == ["conv2"]
    layer = plan.layers["conv2"]
    assert (layer.epitome_shape, layer.channel_starts, layer.index, layer.momentum) == (
        (16, 8, 3, 3),
        "grid",
        "fixed",
        0.5,
    )


def test_a_budget_becomes_a_plan() -> None:
    budget = {"ratio": 3, "form": "separable", "axes": {"conv3": "in", "*": "out"}, "skip": ["conv1", "classifier"]}
    recipe = parse_recipe(minimal(epitome={"budget": budget, "index": "direct", "momentum": 0.5}), source="here")
    assert recipe.epitome is not None
    model = build_model("epitorch:digits_cnn")
    plan = recipe_plan(model, recipe.epitome, IMAGE)
    axes = {"conv3": "in", "*": "out"}
    want = epitorch.plan(model, IMAGE, ratio=3, form="separable", axes=axes, skip=["conv1", "classifier"])  # type: ignore[arg-type]
    assert list(plan.layers) == list(want.layers) == ["conv2", "conv3", "conv4"]
    assert [layer.epitome_shape for layer in plan.layers.values()] == [
        layer.epitome_shape for layer in want.layers.values()
    ]
    assert {(layer.index, layer.momentum) for layer in plan.layers.values()} == {("direct", 0.5)}
    assert plan.params == want.params
    dense = count(model, IMAGE).params
    epitorch.convert_(model, plan)
    assert dense / 3 * 0.97 < count(model, IMAGE).params <= dense / 3


def test_a_budget_of_multiply_adds_counts_them_on_the_image() -> None:
    recipe = parse_recipe(minimal(epitome={"budget": {"madds": 60_000}}), source="here")
    assert recipe.epitome is not None
    plan = recipe_plan(build_model("epitorch:digits_cnn"), recipe.epitome, IMAGE)
    assert plan.madds is not None
    assert 55_000 < plan.madds <= 60_000
    larger = recipe_plan(build_model("epitorch:digits_cnn"), recipe.epitome, torch.zeros(1, 1, 16, 16))
    assert larger.madds is not None
    assert larger.madds <= 60_000
    assert larger.params < plan.params / 2
    with pytest.raises(ConversionError, match="60,000"):
        recipe_plan(build_model("epitorch:digits_cnn"), recipe.epitome, torch.zeros(1, 1, 64, 64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epitome_shap": [1, 2]}, "did you mean 'epitome_shape'"),
        ({}, "epitome_shape' is missing"),
        ({"epitome_shape": ["a"]}, "a list of whole numbers"),
        ({"epitome_shape": [8.0, 8, 3, 3]}, "a list of whole numbers"),
        ({"epitome_shape": [8, 8, 3, 3], "flatten_kernel": "yes"}, r"true \| false"),
        ([8, 8], "is not a mapping"),
    ],
)
def test_layer_options_are_checked(options: Any, words: str) -> None:
    section = EpitomeSection(layers={"conv2": options})
    with pytest.raises(RecipeError, match=words) as caught:
        recipe_plan(build_model("epitorch:digits_cnn"), section, IMAGE)
    assert "epitome.layers.conv2" in str(caught.value)
