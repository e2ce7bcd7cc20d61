"""From a sweep file to its methods: each a recipe with some values replaced."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from itertools import product
from typing import Any

import yaml

from epitorch._rules import KeyPath, Place
from epitorch._yaml import read_yaml
from epitorch.errors import InputError, RecipeError, explain, suggest
from epitorch.sweeps.file import Entry, SweepFile, Value
from epitorch.training.recipe import Recipe, load_recipe, parse_recipe, recipe_names

LONGEST = 100  # characters of a label: it is part of a folder's name


@dataclass(frozen=True)
class Method:
    """What is compared in a sweep.

    Args:
        label: Name in the sweep and of the folders.
        recipe: With the values replaced.
        named: How `epitorch train` finds the recipe; None where values were replaced, so that it must be written first.
        seeds: To run it with.
        folds: To test it on; (None,) where there are none.
    """

    label: str
    recipe: Recipe
    named: str | None
    seeds: tuple[int, ...]
    folds: tuple[int | None, ...]


def methods_of(sweep: SweepFile) -> list[Method]:
    """Return the methods of a sweep, in the order of its file.

    Raises:
        RecipeError: If a recipe is missing or not valid with the values replaced, or two methods have one name.
        InputError: If a reference is no method, or no method is compared with it.
    """
    found = [(entry, name) for entry in sweep.entries for name in _named(entry)]
    base = _base_labels(found)
    methods = [
        method for (entry, name), label in zip(found, base, strict=True) for method in _grid(sweep, entry, name, label)
    ]
    counts = Counter(method.label for method in methods)
    twice = [label for label, n in counts.items() if n > 1]
    if twice:
        raise RecipeError(
            explain(
                f"{counts[twice[0]]} methods are called '{twice[0]}'",
                expected="a name for each",
                got=", ".join(twice),
                where=sweep.place.source,
                fix="give an entry of 'recipes' a 'name'",
            )
        )
    _check_references(sweep, [method.label for method in methods])
    return methods


def _check_references(sweep: SweepFile, known: list[str]) -> None:
    place = sweep.place.below("reference")
    for name, patterns in sweep.references.items():
        own = place.below(name)
        where = str(own if own.path in own.lines else place)
        check_labels([name], known, where)
        others = [label for label in known if label != name]
        for pattern in patterns:
            if others and not any(fnmatchcase(label, pattern) for label in others):
                expected = f"a pattern over the methods {', '.join(others)}"
                got = f"no other method than '{name}' fits '{pattern}'"
                raise InputError(explain(got, expected=expected, got=pattern, where=where))


def check_labels(labels: Sequence[str], known: list[str], where: str) -> None:
    """Raise InputError if one of the labels is not among the known ones."""
    for label in labels:
        if label not in known:
            raise InputError(
                explain(
                    f"there is no method '{label}'{suggest(label, known)}",
                    expected=f"one of {', '.join(known)}",
                    got=label,
                    where=where,
                )
            )


def _named(entry: Entry) -> list[str]:
    if not set("*?[") & set(entry.recipe):
        return [entry.recipe]
    known = recipe_names()
    found = [name for name in known if fnmatchcase(name, entry.recipe)]
    if not found:
        raise RecipeError(
            explain(
                f"no recipe fits '{entry.recipe}'",
                expected=f"a pattern over the recipes {', '.join(known)}",
                got="none that fits",
                where=str(entry.place),
            )
        )
    return found


def _base_labels(found: list[tuple[Entry, str]]) -> list[str]:
    """The entry's name, else the recipe's last part, else (where two would be alike) the whole recipe's name."""
    short = [entry.name or re.sub(r"\.ya?ml$", "", name).rsplit("/", 1)[-1] for entry, name in found]
    recipes: dict[str, set[str]] = {}
    for label, (_, name) in zip(short, found, strict=True):
        recipes.setdefault(label, set()).add(name)
    return [
        label if entry.name or len(recipes[label]) == 1 else re.sub(r"\.ya?ml$", "", name).strip("/.")
        for label, (entry, name) in zip(short, found, strict=True)
    ]


def _grid(sweep: SweepFile, entry: Entry, name: str, label: str) -> Iterator[Method]:
    try:
        recipe = load_recipe(name)
    except RecipeError as error:
        raise RecipeError(f"{error}\n  asked by: {entry.place}") from error
    for values in product(*entry.grid):
        full = _safe("+".join([label, *map(_suffix, values)]))
        replaced = entry.values + values
        changed = with_values(recipe, replaced, f"{sweep.name}/{full}") if replaced else recipe
        seeds = entry.seeds or sweep.seeds or (recipe.training.seed,)
        yield Method(full, changed, None if replaced else name, seeds, _folds(sweep, entry, changed))


def _folds(sweep: SweepFile, entry: Entry, recipe: Recipe) -> tuple[int | None, ...]:
    asked = entry.folds or sweep.folds
    if recipe.sound is not None:
        return asked or (recipe.sound.fold,)
    if asked is not None:
        raise RecipeError(
            explain(
                f"'{recipe.name}' has no folds",
                expected="recipes with a section 'sound'",
                got=f"folds {', '.join(map(str, asked))}",
                where=str((entry.place if entry.folds else sweep.place).below("folds")),
            )
        )
    return (None,)


def _suffix(value: Value) -> str:
    plain = value.value if isinstance(value.value, str) else json.dumps(value.value, separators=(",", ":"))
    return f"{value.key.rsplit('.', 1)[-1]}-{plain}"


def _safe(label: str) -> str:
    """The label with what a folder's name allows, and short enough for one."""
    safe = re.sub(r"[^\w.+-]+", "_", label).strip("_.")
    return safe if len(safe) <= LONGEST else f"{safe[: LONGEST - 9]}-{sha256(label.encode()).hexdigest()[:8]}"


# ---- replaced values ----


def with_values(recipe: Recipe, values: Sequence[Value], name: str) -> Recipe:
    """Return the recipe with values replaced; its text and hash are those of a file that says so.

    Raises:
        RecipeError: If the recipe's own rules refuse a value; the message has the line that asks for it.
    """
    data = copy.deepcopy(read_yaml(recipe.text, recipe.source).data)
    lines: dict[KeyPath, int] = {}
    for value in values:
        path = tuple(value.key.split("."))
        _replace(data, path, value)
        line = value.place.lines.get(value.place.path)
        if line is not None:
            lines[path] = line
            lines.setdefault(path[:1], line)  # an unknown section is told by its own name
    told = ", ".join(f"{value.key} = {_shown(value.value)}" for value in values)
    content = f"# {recipe.name} with {told}\n" + yaml.safe_dump({**data, "name": name}, sort_keys=False, width=120)
    source = values[0].place.source
    try:
        changed = parse_recipe({**data, "name": name}, source=source, lines=lines, text=content)
    except RecipeError as error:
        raise RecipeError(f"{error}\n  recipe:   {recipe.name} with {told}") from error
    return replace(changed, source=f"{recipe.source} with {told}")


def _replace(data: dict[str, Any], path: KeyPath, value: Value) -> None:
    section = data
    for depth, key in enumerate(path[:-1], 1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise RecipeError(
                explain(
                    f"'{value.key}' cannot be replaced",
                    expected="a key of a mapping",
                    got=f"{'.'.join(path[:depth])} = {section!r}",
                    where=str(value.place),
                )
            )
    section[path[-1]] = copy.deepcopy(value.value)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def plain_value(key: str, value: Any, source: str) -> Value:
    """Return a replacement that stands in no file."""
    return Value(key, value, Place(source, {}))
