"""Sweep files: what they say, the methods that come of them, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_helpers import write_sweep

from epitorch.errors import EpitorchError, RecipeError
from epitorch.sweeps.file import SweepFile, load_sweep
from epitorch.sweeps.jobs import jobs_of
from epitorch.sweeps.methods import LONGEST, methods_of
from epitorch.training.recipe import load_recipe, recipe_names

ROOT = Path(__file__).resolve().parents[2]


def sweep(recipes: Path, text: str) -> SweepFile:
    return load_sweep(write_sweep(recipes / "s.yaml", text))


def labels(recipes: Path, text: str) -> list[str]:
    return [method.label for method in methods_of(sweep(recipes, text))]


def test_recipes_by_name_path_and_pattern(recipes: Path) -> None:
    assert labels(recipes, "recipes: [tiny/dense, recipes/tiny/wide.yaml]") == ["dense", "wide"]
    assert labels(recipes, "recipes: [tiny/*]") == ["dense", "epitome", "wide"]
    assert labels(recipes, "recipe: tiny/e*") == ["epitome"]


def test_recipes_as_they_are_keep_text_and_hash(recipes: Path) -> None:
    (method,) = methods_of(sweep(recipes, "recipe: tiny/dense"))
    assert (method.named, method.recipe) == ("tiny/dense", load_recipe("tiny/dense"))
    assert (method.seeds, method.folds) == ((0,), (None,))


def test_replaced_values_are_those_of_a_recipe_that_says_so(recipes: Path) -> None:
    text = "recipe: tiny/epitome\nset: {training.epochs: 7, model.arguments.widths: [8, 8], epitome.momentum: 0.9}"
    (method,) = methods_of(sweep(recipes, text))
    assert method.named is None
    assert (method.recipe.training.epochs, method.recipe.model.arguments["widths"]) == (7, [8, 8])
    assert method.recipe.epitome is not None
    assert (method.recipe.epitome.momentum, method.recipe.epitome.index) == (0.9, "learner")
    assert method.recipe.name == "s/epitome"
    path = recipes / "again.yaml"
    path.write_text(method.recipe.text)
    again = load_recipe(path)
    assert (again.sha256, again.content()) == (method.recipe.sha256, method.recipe.content())
    assert again.sha256 != load_recipe("tiny/epitome").sha256


def test_the_hash_does_not_depend_on_the_sweeps_place(recipes: Path) -> None:
    text = "name: same\nrecipe: tiny/dense\nset: {training.epochs: 7}"
    first = methods_of(sweep(recipes, text))[0].recipe
    (recipes / "below").mkdir()
    second = methods_of(load_sweep(write_sweep(recipes / "below" / "other.yaml", f"# moved\n{text}")))[0].recipe
    assert first.sha256 == second.sha256


def test_a_section_that_is_missing_is_made(recipes: Path) -> None:
    text = "recipe: tiny/dense\nset: {epitome.index: fixed, epitome.layers.conv2.epitome_shape: [2, 4, 3, 3]}"
    (method,) = methods_of(sweep(recipes, text))
    assert method.recipe.epitome is not None
    assert method.recipe.epitome.layers == {"conv2": {"epitome_shape": [2, 4, 3, 3]}}


def test_a_grid_is_every_combination(recipes: Path) -> None:
    text = "recipe: tiny/dense\ngrid: {training.epochs: [1, 2], training.peak_lr: [0.1, 2e-1, 0.3]}"
    methods = methods_of(sweep(recipes, text))
    got = {(m.recipe.training.epochs, m.recipe.training.peak_lr) for m in methods}
    assert got == {(e, lr) for e in (1, 2) for lr in (0.1, 0.2, 0.3)}
    assert methods[0].label == "dense+epochs-1+peak_lr-0.1"
    assert len({m.recipe.sha256 for m in methods}) == 6


def test_an_entry_has_its_own_values_name_and_seeds(recipes: Path) -> None:
    text = """\
recipes:
  - tiny/dense
  - {recipe: tiny/dense, name: long, set: {training.epochs: 9}, seeds: 5}
  - {recipe: tiny/epitome, grid: {epitome.index: [fixed, direct]}, seeds: [0]}
set: {training.epochs: 2}
seeds: [0, 1]
"""
    methods = {method.label: method for method in methods_of(sweep(recipes, text))}
    assert list(methods) == ["dense", "long", "epitome+index-fixed", "epitome+index-direct"]
    assert [method.recipe.training.epochs for method in methods.values()] == [2, 9, 2, 2]
    assert [method.seeds for method in methods.values()] == [(0, 1), (5,), (0,), (0,)]


def test_an_entrys_value_takes_the_place_of_the_shared_grid(recipes: Path) -> None:
    text = """\
recipes: [tiny/dense, {recipe: tiny/wide, set: {training.epochs: 9}}]
grid: {training.epochs: [1, 2]}
"""
    assert labels(recipes, text) == ["dense+epochs-1", "dense+epochs-2", "wide"]


def test_recipes_of_one_file_name_are_told_apart(recipes: Path) -> None:
    (recipes / "recipes/other").mkdir()
    (recipes / "recipes/other/dense.yaml").write_text((recipes / "recipes/tiny/dense.yaml").read_text() + "\n")
    assert labels(recipes, "recipes: [tiny/dense, other/dense, tiny/wide]") == ["tiny_dense", "other_dense", "wide"]


def test_labels_are_names_of_folders(recipes: Path) -> None:
    text = "recipe: tiny/dense\ngrid: {model.arguments.widths: [[4, 4], [8, 8]], model.name: ['epitorch:digits_cnn']}"
    assert labels(recipes, text) == [
        "dense+widths-_4_4_+name-epitorch_digits_cnn",
        "dense+widths-_8_8_+name-epitorch_digits_cnn",
    ]
    long = ", ".join(f"[{', '.join(['4'] * n)}]" for n in (60, 61))
    made = labels(recipes, f"recipe: tiny/dense\ngrid: {{model.arguments.widths: [{long}]}}")
    assert len(set(made)) == 2
    assert max(map(len, made)) <= LONGEST


def test_seeds_go_one_after_the_other_so_that_runs_are_paired_early(recipes: Path) -> None:
    methods = methods_of(sweep(recipes, "recipes: [sound/*]\nseeds: [0, 3]\nfolds: [1, 2]"))
    names = [job.name for job in jobs_of(methods, Path("out"))]
    assert names[:4] == ["one-fold1-seed0", "two-fold1-seed0", "one-fold2-seed0", "two-fold2-seed0"]
    assert names[4:] == [name.replace("seed0", "seed3") for name in names[:4]]


def test_without_seeds_and_folds_a_recipe_has_its_own(recipes: Path) -> None:
    text = (recipes / "recipes/sound/one.yaml").read_text()
    (recipes / "recipes/sound/one.yaml").write_text(
        text.replace("esc10}", "esc10, fold: 4}").replace("0.01", "0.01, seed: 7")
    )
    (job,) = jobs_of(methods_of(sweep(recipes, "recipe: sound/one")), Path("out"))
    assert (job.name, job.fold, job.seed) == ("one-fold4-seed7", 4, 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recipe: tiny/dense\nseed: 1", "s.yaml, line 2: unknown key 'seed'; did you mean 'seeds'?"),
        ("recipe: tiny/dense\nseeds: [0, 0]", "s.yaml, line 2: 'seeds' has a value that does not fit"),
        ("recipe: tiny/dense\nseeds: [-1]", "s.yaml, line 2: 'seeds'"),
        ("recipe: tiny/dense\nset:\n  training.epoch: 3", "s.yaml, line 3: unknown key 'training.epoch'; did you "),
        ("recipe: tiny/dense\ngrid:\n  training.epochs: [1, x]", "s.yaml, line 3: 'training.epochs' has a value"),
        ("recipe: tiny/dense\nset:\n  trainin.epochs: 3", "s.yaml, line 3"),
        ("recipe: tiny/dense\ngrid:\n  training.epochs: []", "s.yaml, line 3: 'grid.training.epochs'"),
        ("recipe: tiny/dense\ngrid:\n  training.seed: [0, 1]", "line 3: 'training.seed' is not replaced"),
        ("recipe: tiny/dense\nset:\n  sound.fold: 1", "line 3: 'sound.fold' is not replaced"),
        ("recipe: tiny/dense\nset:\n  epochs: 1", "line 3: 'epochs' names no value of a recipe"),
        ("recipe: tiny/dense\nset:\n  model.name.x: 1", "line 3: 'model.name.x' cannot be replaced"),
        ("recipe: tiny/epitome\nset:\n  epitome.freeze_last_epochs: 5", "line 3: 'epitome.freeze_last_epochs' is"),
        ("recipe: tiny/dense\nset: {data.holdout: 1}\ngrid: {data.holdout: [1]}", "line 3: 'data.holdout' is set"),
        ("seeds: [0]", "exactly one of 'recipe' and 'recipes'"),
        ("recipe: a\nrecipes: [b]", "got:      both"),
        ("recipes:\n  - {name: x}", "an entry of 'recipes' has no recipe"),
        ("recipes:\n  - recipe: tiny/dense\n    sets: {}", "s.yaml, line 3: unknown key 'recipes.0.sets'"),
        ("recipe: tiny/dens", "there is no recipe 'tiny/dens'; did you mean 'tiny/dense'?"),
        ("recipe: none/*", "no recipe fits 'none/*'"),
        ("recipes: [tiny/dense, tiny/dense]", "2 methods are called 'dense'"),
        ("recipes: [tiny/dense]\nreference: dens", "line 2: there is no method 'dens'; did you mean 'dense'?"),
        ("recipes: [tiny/dense, tiny/wide]\nreference:\n  wide: dense\n  dense: x*", "line 4: no other method"),
        ("recipes: [tiny/dense, tiny/wide]\nreference: {dense: dense}", "line 2: no other method than 'dense' fits"),
        ("recipe: tiny/dense\nreference: {dense: []}", "line 2: 'reference' has a value that does not fit"),
        ("recipe: tiny/dense\nreference: {dense: [1]}", "line 2: 'reference' has a value that does not fit"),
        ("recipe: tiny/dense\nfolds: [1]", "line 2: 'tiny/dense' has no folds"),
        ("recipe: tiny/dense\npublished: esc50", "line 2: 'published' has a value that does not fit"),
        ("name: ../x\nrecipe: tiny/dense", "line 1: 'name' has a value that does not fit"),
        ("[1]", "is not a mapping"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_line(recipes: Path, text: str, words: str) -> None:
    with pytest.raises(EpitorchError) as caught:
        methods_of(sweep(recipes, text))
    assert words in str(caught.value)


def test_a_refused_value_names_recipe_and_values(recipes: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe:   tiny/dense with training\.epochs = 0"):
        methods_of(sweep(recipes, "recipe: tiny/dense\nset: {training.epochs: 0}"))


def test_a_missing_file_is_named(recipes: Path) -> None:
    with pytest.raises(RecipeError, match=r"there is no sweep 'digit'; did you mean 'digits'\?"):
        load_sweep("digit")


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sweeps_of_the_repository_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = methods_of(load_sweep(path))
    assert len(found) >= 2
    assert {method.named for method in found if method.named} <= set(recipe_names())


def test_esc10_has_the_folders_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = [job.name for job in jobs_of(methods_of(load_sweep("sweeps/esc10.yaml")), Path("runs/esc10"))]
    methods = ("baseline", "wsnet-4x", "epitome-4x")
    assert names == [f"{m}-fold{f}-seed{s}" for s in (0, 1) for f in range(1, 6) for m in methods]
