"""The demo: fair sizes, the same recipes as the files, and a whole run with its epochs cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_helpers import quiet

from epitorch.checkpoint import ModelInput
from epitorch.cost import count
from epitorch.errors import InputError
from epitorch.results import load_results
from epitorch.training import demo
from epitorch.training.recipe import Recipe, load_recipe
from epitorch.training.setup import build

RECIPES = Path(__file__).parents[2] / "recipes"
DIGITS = ModelInput((1, 8, 8), (0.5,), (0.5,), tuple("0123456789"))


@pytest.mark.parametrize("recipe", demo.demo_recipes(), ids=lambda recipe: recipe.name)
def test_recipe_files_say_the_same(recipe: Recipe) -> None:
    on_file = load_recipe(RECIPES / f"{recipe.name}.yaml").content()
    assert on_file.pop("description")
    mine = recipe.content()
    mine.pop("description")
    assert on_file == mine


def test_epitomes_are_as_large_as_the_narrowed_network() -> None:
    costs = {r.name: count(build(r, DIGITS).model, torch.zeros(1, 1, 8, 8)) for r in demo.demo_recipes()}
    narrow = costs["digits/narrow"].params
    assert narrow == 12_082
    assert costs["digits/dense"].params == 47_194
    for name in ("digits/epitome", "digits/epitome-grid"):
        assert costs[name].params == narrow
        assert costs[name].params_epitome + costs[name].params_routing > narrow // 2
    assert costs["digits/epitome"].madds < 1.2 * costs["digits/narrow"].madds


def test_all_recipes_train_alike() -> None:
    recipes = demo.demo_recipes()
    assert len({recipe.training for recipe in recipes}) == 1
    assert len({recipe.data for recipe in recipes}) == 1


@pytest.fixture
def one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo.demo_recipes()
    cut = [replace(recipe, training=replace(recipe.training, epochs=1)) for recipe in real]
    monkeypatch.setattr(demo, "demo_recipes", lambda: cut)


@pytest.mark.usefixtures("one_epoch")
def test_demo_writes_its_results_and_may_be_repeated(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    results = demo.run_demo(tmp_path, seed=5, console=quiet())
    assert torch.get_num_threads() == threads
    assert load_results(tmp_path / "results.json") == results
    assert [result.name for result in results] == [recipe.name for recipe in demo.demo_recipes()]
    assert {result.seed for result in results} == {5}
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "dense", "narrow", "epitome", "epitome-grid"}
    again = demo.run_demo(tmp_path, seed=5, console=quiet())
    assert [result.loss for result in again] == [result.loss for result in results]


def test_results_of_something_else_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"mine": 1}))
    with pytest.raises(InputError):
        demo.run_demo(tmp_path, console=quiet())
    assert json.loads((tmp_path / "results.json").read_text()) == {"mine": 1}
