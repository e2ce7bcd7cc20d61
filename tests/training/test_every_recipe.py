"""Every recipe takes two steps, on generated data laid out exactly as its real data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parquet_files import encode, pixels, write
from run_helpers import quiet

from epitorch.training.recipe import Recipe, load_recipe
from epitorch.training.run import train
from sound_files import ESC10, write_sounds

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAMES = sorted(file.relative_to(RECIPES).with_suffix("").as_posix() for file in RECIPES.rglob("*.yaml"))
CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
WNIDS = ["n01440764", "n01443537", "n02084071", "n03000684", "n04311004"]


# ---- data sets in small ----


def cifar10(folder: Path) -> None:
    """As on the hub: two parquet files, JPEG in the column `img`, shuffled labels of ten named classes."""
    for seed, (split, n) in enumerate((("train", 40), ("test", 10))):
        labels = np.random.default_rng(seed).permutation(np.arange(n) % 10)
        images = [{"bytes": encode(image, "JPEG"), "path": None} for image in pixels(n, seed)]
        write(folder / f"{split}.parquet", images, labels.tolist(), names=CIFAR_CLASSES)


def esc50(folder: Path) -> None:
    write_sounds(folder, classes={target: ESC10.get(target, f"class_{target}") for target in range(50)})


def esc10(folder: Path) -> None:
    write_sounds(folder, clips=5)


def imagenet(folder: Path) -> None:
    """As it is unpacked: JPEG files of all sizes in a folder for each class, named by the class in training only."""
    for split, n in (("train", 6), ("val", 2)):
        for place, wnid in enumerate(WNIDS):
            (folder / split / wnid).mkdir(parents=True)
            for i in range(n):
                name = f"{wnid}_{i + 1}.JPEG" if split == "train" else f"ILSVRC2012_val_{n * place + i + 1:08d}.JPEG"
                size = (40 + 20 * i, 90 - 10 * i, 3)
                (folder / split / wnid / name).write_bytes(encode(pixels(1, seed=i, size=size)[0], "JPEG"))


def digits(folder: Path) -> None:
    """They come with scikit-learn."""


WRITERS: dict[str, Callable[[Path], None]] = {
    "cifar10": cifar10,
    "esc10": esc10,
    "esc50": esc50,
    "imagenet": imagenet,
    "digits": digits,
}
CLASSES = {"cifar10": 10, "esc10": 10, "esc50": 50, "imagenet": len(WNIDS), "digits": 10}
BATCH = {"cifar10": 10, "esc10": 20, "esc50": 50, "imagenet": 10, "digits": 128}
HOLDOUT = {"cifar10": 10, "esc10": 10, "esc50": 50, "imagenet": 10, "digits": 237}
TEST = {"cifar10": 10, "esc10": 50, "esc50": 150, "imagenet": 2 * len(WNIDS), "digits": 360}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in WRITERS}
    for kind, folder in found.items():
        WRITERS[kind](folder)
    return found


def kind_of(name: str) -> str:
    """Data set of a recipe, by its folder."""
    return next(kind for kind in WRITERS if name.startswith(kind))


def small(recipe: Recipe, kind: str) -> Recipe:
    """The same recipe on small inputs and batches; everything else stands as it is."""
    model = recipe.model
    if kind == "imagenet":
        assert model.arguments["num_classes"] == 1000
        model = replace(model, arguments={**model.arguments, "num_classes": len(WNIDS)})
    sound, images = recipe.sound, recipe.images
    return replace(
        recipe,
        model=model,
        data=replace(recipe.data, holdout=HOLDOUT[kind]),
        training=replace(recipe.training, batch_size=BATCH[kind]),
        sound=sound and replace(sound, sample_rate=8000, clip_seconds=0.5, crop_seconds=0.3),
        images=images and replace(images, size=32),
    )


# ---- the runs ----


@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    kind = kind_of(name)
    recipe = small(load_recipe(RECIPES / f"{name}.yaml"), kind)
    data = "digits" if kind == "digits" else folders[kind]
    options: dict[str, Any] = {"max_steps": 2, "accelerator": "cpu", "console": quiet(), "loggers": ["csv"]}
    if kind == "imagenet":
        options["workers"] = 0  # starting processes takes longer than reading so few images
    result = train(recipe, data, tmp_path / "run", **options)
    assert result.name == name
    assert result.data["steps_run"] == 2
    assert (result.accuracy.classes, result.accuracy.test_images) == (CLASSES[kind], TEST[kind])
    assert (result.recipe["sound"] is None, result.recipe["images"] is None) == (
        recipe.sound is None,
        recipe.images is None,
    )
    assert (result.parameters.epitome > 0) == (recipe.epitome is not None)
    compressed = ("epitome", "wsnet", "filters", "inputs", "both", "grid")
    assert any(word in name for word in compressed) == (recipe.epitome is not None)
    learns = recipe.epitome is not None and recipe.epitome.index == "learner"
    frozen = recipe.epitome is not None and recipe.epitome.freeze_last_epochs > 0
    assert (result.accuracy.test_learner is not None) == (learns and not frozen)


def test_recipes_for_imagenet_name_their_images_and_no_other_do() -> None:
    recipes: dict[str, Any] = {name: load_recipe(RECIPES / f"{name}.yaml") for name in NAMES}
    of_imagenet = {name for name in NAMES if kind_of(name) == "imagenet"}
    assert len(of_imagenet) > 30
    assert {name for name, recipe in recipes.items() if recipe.images is not None} == of_imagenet
    assert {recipe.images.size for name, recipe in recipes.items() if name in of_imagenet} == {224}
    assert {kind_of(name) for name, recipe in recipes.items() if recipe.sound is not None} == {"esc10", "esc50"}
