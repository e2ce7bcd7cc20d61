"""Recipes: everything that decides a training run, read from a YAML file into frozen data.

A recipe names the model, says how it becomes an epitome network (or leaves `epitome` out: no conversion), how the data
are split and augmented, and how the network is trained. Unknown keys are refused, so a misspelt one cannot be ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from epitorch._rules import (
    Place,
    Rule,
    check_keys,
    choice,
    filled_mapping,
    flag,
    mapping,
    number,
    optional,
    read_section,
    read_value,
    ruled,
    text,
    whole,
)
from epitorch._yaml import KeyPath, read_yaml_file
from epitorch.errors import RecipeError, explain, suggest
from epitorch.training.recipe_budget import check_budget
from epitorch.training.recipe_images import ImagesSection, check_images_section
from epitorch.training.recipe_sound import SoundSection, check_sound
from epitorch.training.recipe_training import MAX_SEED, TrainingSection, check_training

__all__ = [
    "MAX_SEED",
    "DataSection",
    "EpitomeSection",
    "ModelSection",
    "Recipe",
    "TrainingSection",
    "load_recipe",
    "parse_recipe",
    "recipe_folders",
    "recipe_names",
]


@dataclass(frozen=True)
class ModelSection:
    """Which network: `epitorch:NAME | timm:NAME | torchvision:NAME | package.module:factory`, and its arguments.

    Args:
        checkpoint: Start from the tensors of this checkpoint that have the same name and shape; the others, a new
            head for example, are drawn. An epitome network brings its plan.
    """

    name: str = ruled(text())
    arguments: dict[str, Any] = ruled(mapping(), {})  # noqa: RUF009
    checkpoint: str | None = ruled(optional(text()), None)


@dataclass(frozen=True)
class EpitomeSection:
    """How the network becomes an epitome network. Exactly one of the first five is given.

    Args:
        c: The paper's compression factor of the expansions of MobileNetV2 or EfficientNet.
        match_params: Total parameters: the largest c that stays within them is taken.
        budget: What `epitorch.plan` is given: `BudgetSection` has the keys. Any network.
        layers: Layer by layer: name of a module to the fields of its `LayerPlan` (`epitome_shape` and so on).
        plan: File that `Plan.save` or `epitorch plan` wrote; how each layer's starts are learned stands there.
        last_conv: Compress the last convolution of such a network too.
        classifier: Compress its classifier along its inputs, to this share.
        policy: `front_heavy` keeps less of the first layers and more of the last (the paper's "-A").
        init: `least_squares` begins with the epitomes nearest to the dense weights (of `model.checkpoint`, say).
        index: How starts are learned.
        group_length: Length g of the super-index on channel axes.
        momentum: Of the routing map's moving average.
        freeze_last_epochs: In so many last epochs the routing map is fixed and used in training as well.
        snap: At that moment, move the map to whole positions first.
    """

    c: float | None = ruled(optional(number(0, 1, above=True)), None)
    match_params: int | None = ruled(optional(whole(1)), None)
    budget: dict[str, Any] | None = ruled(optional(filled_mapping()), None)  # noqa: RUF009
    layers: dict[str, Any] | None = ruled(optional(filled_mapping()), None)  # noqa: RUF009
    plan: str | None = ruled(optional(text()), None)
    last_conv: bool = ruled(flag(), False)
    classifier: float | None = ruled(optional(number(0, 1, above=True)), None)
    policy: str = ruled(choice("uniform", "front_heavy"), "uniform")
    init: str = ruled(choice("fresh", "least_squares"), "fresh")
    index: str = ruled(choice("learner", "direct", "fixed"), "learner")
    group_length: int | None = ruled(optional(whole(1)), None)
    momentum: float = ruled(number(0, 0.999999), 0.97)
    freeze_last_epochs: int = ruled(whole(0), 0)
    snap: bool = ruled(flag(), False)


@dataclass(frozen=True)
class DataSection:
    """How many training images are held out to choose by, and the augmentation of the others."""

    holdout: int = ruled(whole(1), 5000)
    crop_padding: int = ruled(whole(0), 4)
    flip: bool = ruled(flag(), True)


@dataclass(frozen=True)
class Recipe:
    """A whole recipe. `text` is what it was read from: `sha256` and the results refer to it."""

    name: str
    model: ModelSection
    training: TrainingSection
    data: DataSection
    epitome: EpitomeSection | None = None
    sound: SoundSection | None = None
    images: ImagesSection | None = None
    description: str = ""
    text: str = ""
    source: str = ""

    @property
    def sha256(self) -> str:
        """Hash of the recipe's text (of the file, where there is one)."""
        return sha256(self.text.encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        """Return the recipe as plain data with every default filled in."""
        content = asdict(self)
        del content["text"], content["source"]
        return content


_SECTIONS: dict[str, type[Any]] = {
    "model": ModelSection,
    "epitome": EpitomeSection,
    "data": DataSection,
    "sound": SoundSection,
    "images": ImagesSection,
    "training": TrainingSection,
}
_AMOUNTS = ("c", "match_params", "budget", "layers", "plan")
_NAME = re.compile(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*")
# The name is part of the default output folder, so it must not lead out of it.
NAME_RULE = Rule("letters, digits and -+_. in parts joined by /", lambda v: bool(_NAME.fullmatch(str(v))), str)
_TEXTS = {"name": NAME_RULE, "description": text()}


def parse_recipe(
    data: Any,
    *,
    source: str,
    lines: Mapping[KeyPath, int] | None = None,
    text: str | None = None,
    name: str | None = None,
) -> Recipe:
    """Read a recipe from plain data.

    Args:
        data: A mapping with the sections `model`, `training` and, if wanted, `data`, `sound`, `images` and `epitome`.
        source: Where it comes from, for messages.
        lines: Line of each key in that source.
        text: The text it was read from; default its JSON form.
        name: Name of the run where the data give none.

    Raises:
        RecipeError: If a key is unknown or missing, or a value does not fit.
    """
    place = Place(source, lines or {})
    check_keys(data, [*_TEXTS, *_SECTIONS], place)
    texts = {key: read_value(_TEXTS[key], data[key], place.below(key)) for key in _TEXTS if key in data}
    given = {key: data[key] for key in _SECTIONS if key in data and not _left_out(key, data[key])}
    # A section that is missing is read as an empty one: its required keys are then asked for by name.
    wanted = {"model": {}, "training": {}, "data": {}, **given}
    sections = {key: read_section(_SECTIONS[key], value, place.below(key)) for key, value in wanted.items()}
    recipe = Recipe(
        name=texts.get("name") or name or source,
        description=texts.get("description", ""),
        text=json.dumps(data, indent=1) if text is None else text,
        source=source,
        **sections,
    )
    _check_together(recipe, place)
    return recipe


def _left_out(key: str, value: Any) -> bool:
    return key in ("epitome", "sound", "images") and value is None


def _check_together(recipe: Recipe, place: Place) -> None:
    check_sound(recipe, place)
    check_images_section(recipe, place)
    check_training(recipe.training, place.below("training"))
    epitome = recipe.epitome
    if epitome is None:
        return
    given = [key for key in _AMOUNTS if getattr(epitome, key) is not None]
    if len(given) != 1:
        raise RecipeError(
            explain(
                "'epitome' must say in one way how much to compress",
                expected=f"exactly one of {', '.join(_AMOUNTS)}",
                got=" and ".join(given) or "none of them",
                where=str(place.below("epitome")),
            )
        )
    check_budget(epitome.budget, epitome.group_length, place.below("epitome"))
    _refuse_unused(epitome, place)
    if epitome.freeze_last_epochs > recipe.training.epochs:
        raise RecipeError(
            explain(
                "'epitome.freeze_last_epochs' is longer than the training",
                expected=f"at most training.epochs = {recipe.training.epochs}",
                got=epitome.freeze_last_epochs,
                where=str(place.below("epitome").below("freeze_last_epochs")),
            )
        )
    if epitome.snap and not epitome.freeze_last_epochs:
        raise RecipeError(
            explain(
                "'epitome.snap' has no moment to act",
                expected="freeze_last_epochs of at least 1",
                got=0,
                where=str(place.below("epitome").below("snap")),
                fix="say in how many last epochs the map is snapped and frozen",
            )
        )


_INSTEAD = {
    "budget": "'policy', 'skip' or 'only' in the budget",
    "layers": "the layer itself among 'layers'",
    "plan": "the same in the plan's layers",
}


def _refuse_unused(epitome: EpitomeSection, place: Place) -> None:
    """Beside another plan, what shapes the paper's would be ignored; beside `plan`, what stands in the file too."""
    other = next((key for key in ("budget", "layers", "plan") if getattr(epitome, key) is not None), None)
    if other is None:
        return
    shaping = ("last_conv", "classifier", "policy") + (("index", "group_length", "momentum") if other == "plan" else ())
    unused = [key for key in shaping if getattr(epitome, key) != EpitomeSection.__dataclass_fields__[key].default]
    if unused:
        raise RecipeError(
            explain(
                f"'epitome.{unused[0]}' has no effect beside 'epitome.{other}'",
                expected=_INSTEAD[other],
                got=repr(getattr(epitome, unused[0])),
                where=str(place.below("epitome").below(unused[0])),
            )
        )


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read a recipe file.

    Args:
        path_or_name: A path, or a name such as `cifar10-short/dense`, looked up in `recipes/` of the working
            directory, then among the recipes that come with epitorch.

    Raises:
        RecipeError: If there is no such file or it is not a valid recipe.
    """
    path = _find(path_or_name)
    document = read_yaml_file(path, "recipe")
    name = f"{path.resolve().parent.name}/{path.stem}"
    return parse_recipe(document.data, source=str(path), lines=document.lines, text=document.text, name=name)


def recipe_folders() -> list[Path]:
    """Return the folders in which recipe names are looked up; first those of the user, then those of the package."""
    package = Path(__file__).resolve().parents[1]
    # An installed package carries its recipes inside; a source tree has them beside src/.
    folders = (Path("recipes"), package / "recipes", package.parents[1] / "recipes")
    return [folder for folder in folders if folder.is_dir()]


def recipe_names() -> list[str]:
    """Return the names that `load_recipe` finds without a path."""
    found = ((folder, file) for folder in recipe_folders() for file in folder.rglob("*.yaml"))
    return sorted({file.relative_to(folder).with_suffix("").as_posix() for folder, file in found})


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    if path.is_file():
        return path
    name = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    for folder in recipe_folders():
        if not path.is_absolute() and (folder / name).is_file():
            return folder / name
    known = recipe_names()
    raise RecipeError(
        explain(
            f"there is no recipe '{path_or_name}'{suggest(str(path_or_name), known)}",
            expected=f"a path to a YAML file, or one of {', '.join(known) or 'recipes/ (empty here)'}",
            got="no such file",
        )
    )
