"""Sweep files: which recipes, with which values replaced, on which seeds and folds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epitorch._rules import Place, Rule, check_keys, mapping, optional, read_value, text
from epitorch._yaml import read_yaml_file
from epitorch.errors import RecipeError, explain, suggest
from epitorch.training.recipe import MAX_SEED, NAME_RULE


@dataclass(frozen=True)
class Value:
    """A value that replaces a recipe's, and where the sweep file says so.

    Args:
        key: Dotted: `training.epochs`.
        value: Plain data.
        place: For messages.
    """

    key: str
    value: Any
    place: Place


@dataclass(frozen=True)
class Entry:
    """One recipe of a sweep file, or all that a pattern names.

    Args:
        recipe: Path, name or pattern such as `esc10/*`.
        place: For messages.
        name: Of the method; None takes the recipe's.
        values: That replace the recipe's in all of its methods.
        grid: For each key the values that replace it, one method for each combination.
        seeds: None takes those of the file.
        folds: Likewise.
    """

    recipe: str
    place: Place
    name: str | None
    values: tuple[Value, ...]
    grid: tuple[tuple[Value, ...], ...]
    seeds: tuple[int, ...] | None
    folds: tuple[int, ...] | None


@dataclass(frozen=True)
class SweepFile:
    """What a sweep file says.

    Args:
        name: Of the sweep.
        entries: Its recipes.
        seeds: Of every method; None takes each recipe's own.
        folds: For sounds; likewise.
        references: Methods that others are compared with, and for each patterns of those others' names.
        published: Published results to draw beside: `imagenet`, `cifar10` or None.
        place: For messages.
    """

    name: str
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...] | None
    folds: tuple[int, ...] | None
    references: Mapping[str, tuple[str, ...]]
    published: str | None
    place: Place


def _numbers(low: int, high: int, what: str) -> Rule:
    def accepts(value: Any) -> bool:
        values = value if isinstance(value, list) else [value]
        fits = all(type(v) is int and low <= v <= high for v in values)
        return bool(values) and fits and len(set(values)) == len(values)

    return Rule(f"{what}, each once", accepts, lambda v: tuple(v) if isinstance(v, list) else (v,))


def _texts(value: Any) -> tuple[str, ...]:
    """A text or a list of texts; empty where it is neither."""
    values = value if isinstance(value, list) else [value]
    return tuple(values) if all(isinstance(v, str) and v.strip() for v in values) else ()


def _references() -> Rule:
    """Names; or names and, for each, patterns of the methods that are compared with it."""

    def convert(value: Any) -> dict[str, tuple[str, ...]]:
        if isinstance(value, dict):
            return {name: _texts(patterns) for name, patterns in value.items()}
        return dict.fromkeys(_texts(value), ("*",))

    def accepts(value: Any) -> bool:
        read = convert(value)
        return bool(read) and all(isinstance(name, str) and patterns for name, patterns in read.items())

    return Rule("a name, a list of names, or a mapping from names to patterns such as '*-4x*'", accepts, convert)


def _filled() -> Rule:
    return Rule("a list of values", lambda v: isinstance(v, list) and bool(v))


SEEDS = _numbers(0, MAX_SEED, f"whole numbers from 0 to {MAX_SEED}")
FOLDS = _numbers(1, 10**6, "whole numbers from 1")
_RULES: dict[str, Rule] = {
    "name": NAME_RULE,
    "recipe": text(),
    "recipes": Rule("a list of recipes", lambda v: isinstance(v, list) and bool(v)),
    "set": mapping(),
    "grid": mapping(),
    "seeds": optional(SEEDS),
    "folds": optional(FOLDS),
    "reference": optional(_references()),
    "published": optional(Rule("imagenet | cifar10", lambda v: v in ("imagenet", "cifar10"))),
}
_ENTRY_RULES = {key: _RULES[key] for key in ("recipe", "name", "set", "grid", "seeds", "folds")}
_ELSEWHERE = {"training.seed": "seeds", "sound.fold": "folds"}


def sweep_folders() -> list[Path]:
    """Return the folders in which sweeps are looked up; first that of the user, then those of the package."""
    package = Path(__file__).resolve().parents[1]
    # An installed package carries its sweeps inside; a source tree has them beside src/.
    folders = (Path("sweeps"), package / "sweep_files", package.parents[1] / "sweeps")
    return [folder for folder in folders if folder.is_dir()]


def sweep_names() -> list[str]:
    """Return the names that `load_sweep` finds without a path."""
    return sorted({file.stem for folder in sweep_folders() for file in folder.glob("*.yaml")})


def load_sweep(path_or_name: str | Path) -> SweepFile:
    """Read a sweep file.

    Args:
        path_or_name: A path, or a name such as `digits`, looked up in `sweeps/` of the working directory, then among
            the sweeps that come with epitorch.

    Raises:
        RecipeError: If there is no such file, or it is not a valid sweep.
    """
    path = _find(path_or_name)
    document = read_yaml_file(path, "sweep")
    return parse_sweep(document.data, Place(str(path), document.lines), name=path.stem)


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    if path.is_file():
        return path
    name = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    for folder in sweep_folders():
        if not path.is_absolute() and (folder / name).is_file():
            return folder / name
    known = sweep_names()
    raise RecipeError(
        explain(
            f"there is no sweep '{path_or_name}'{suggest(str(path_or_name), known)}",
            expected=f"a path to a YAML file, or one of {', '.join(known) or 'sweeps/ (empty here)'}",
            got="no such file",
        )
    )


def parse_sweep(data: Any, place: Place, *, name: str) -> SweepFile:
    """Read a sweep from plain data.

    Args:
        data: A mapping with `recipes` or `recipe`, and if wanted `name`, `set`, `grid`, `seeds`, `folds`, `reference`
            and `published`.
        place: For messages.
        name: Where the data give none.

    Raises:
        RecipeError: If a key is unknown or missing, or a value does not fit.
    """
    given = _read(data, _RULES, place)
    shared = _values(given, place)
    return SweepFile(
        name=given.get("name") or name,
        entries=tuple(_entry(item, below, shared) for item, below in _recipes(given, place)),
        seeds=given.get("seeds"),
        folds=given.get("folds"),
        references=given.get("reference") or {},
        published=given.get("published"),
        place=place,
    )


def _read(data: Any, rules: Mapping[str, Rule], place: Place) -> dict[str, Any]:
    check_keys(data, list(rules), place)
    return {key: read_value(rules[key], data[key], place.below(key)) for key in rules if key in data}


def _recipes(given: dict[str, Any], place: Place) -> Iterator[tuple[Any, Place]]:
    if ("recipe" in given) == ("recipes" in given):
        raise RecipeError(
            explain(
                "the sweep must name its recipes in one way",
                expected="exactly one of 'recipe' and 'recipes'",
                got="both" if "recipe" in given else "none of them",
                where=str(place),
            )
        )
    if "recipe" in given:
        yield given["recipe"], place.below("recipe")
        return
    below = place.below("recipes")
    for i, item in enumerate(given["recipes"]):
        yield item, below.below(str(i))


_Shared = tuple[tuple[Value, ...], tuple[tuple[Value, ...], ...]]


def _entry(item: Any, place: Place, shared: _Shared) -> Entry:
    if isinstance(item, str):
        item = {"recipe": item}
    given = _read(item, _ENTRY_RULES, place)
    if "recipe" not in given:
        raise RecipeError(
            explain("an entry of 'recipes' has no recipe", expected="the key 'recipe'", got=item, where=str(place))
        )
    values, grid = _values(given, place)
    own = {value.key for value in values} | {axis[0].key for axis in grid}
    kept = tuple(value for value in shared[0] if value.key not in own)
    axes = tuple(axis for axis in shared[1] if axis[0].key not in own)
    return Entry(
        given["recipe"], place, given.get("name"), kept + values, axes + grid, given.get("seeds"), given.get("folds")
    )


def _values(given: dict[str, Any], place: Place) -> _Shared:
    """Read `set` and `grid`."""
    single, grid = place.below("set"), place.below("grid")
    values = tuple(_value(key, value, single.below(key)) for key, value in given.get("set", {}).items())
    axes = []
    for key, items in given.get("grid", {}).items():
        below = grid.below(key)
        axes.append(tuple(_value(key, item, below) for item in read_value(_filled(), items, below)))
    both = {value.key for value in values} & {axis[0].key for axis in axes}
    if both:
        key = min(both)
        raise RecipeError(
            explain(f"'{key}' is set twice", expected="either set or grid", got="both", where=str(grid.below(key)))
        )
    return values, tuple(axes)


def _value(key: str, value: Any, place: Place) -> Value:
    if key in _ELSEWHERE:
        raise RecipeError(
            explain(
                f"'{key}' is not replaced like other values",
                expected=f"the key '{_ELSEWHERE[key]}', by which runs are paired",
                got=repr(value),
                where=str(place),
            )
        )
    if "." not in key.strip("."):
        raise RecipeError(
            explain(
                f"'{key}' names no value of a recipe",
                expected="section and key with a dot, such as training.epochs",
                got=repr(key),
                where=str(place),
            )
        )
    return Value(key, value, place)
