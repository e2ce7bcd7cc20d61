"""Rules for the values of recipes and plans: what a field accepts, said in words that a message can quote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from epitorch.errors import RecipeError, explain, suggest

Section = TypeVar("Section")
KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """What one field accepts."""

    expected: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Place:
    """Where a value stands: the file, the line of every key, and the path of the section being read."""

    source: str
    lines: Mapping[KeyPath, int]
    path: KeyPath = ()

    def below(self, key: str) -> Place:
        """Return the place of a key of this section."""
        return Place(self.source, self.lines, (*self.path, key))

    def __str__(self) -> str:
        line = self.lines.get(self.path)
        return self.source if line is None else f"{self.source}, line {line}"


def whole(low: int, high: float = math.inf) -> Rule:
    """Whole numbers from `low` to `high`; True is not a number here."""
    end = "" if high == math.inf else f" and at most {high}"
    return Rule(f"a whole number of at least {low}{end}", lambda v: type(v) is int and low <= v <= high)


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Rule:
    """Finite numbers from `low` (or above it) to `high`."""
    start = f"above {low:g}" if above else f"of at least {low:g}"
    end = "" if high == math.inf else f" and at most {high:g}"

    def accepts(value: Any) -> bool:
        if type(value) not in (int, float) or not math.isfinite(value):
            return False
        return (value > low if above else value >= low) and value <= high

    return Rule(f"a number {start}{end}", accepts, float)


def sizes(at_least: int = 1) -> Rule:
    """Whole numbers above 0, kept as a tuple."""

    def accepts(value: Any) -> bool:
        return (
            isinstance(value, list | tuple) and len(value) >= at_least and all(type(n) is int and n > 0 for n in value)
        )

    return Rule("a list of whole numbers above 0, such as [32, 64, 3, 3]", accepts, tuple)


def choice(*words: str) -> Rule:
    """One of a few words."""
    return Rule(" | ".join(words), lambda v: isinstance(v, str) and v in words)


def flag() -> Rule:
    """True or false."""
    return Rule("true | false", lambda v: isinstance(v, bool))


def text() -> Rule:
    """Text that is not empty."""
    return Rule("some text", lambda v: isinstance(v, str) and bool(v.strip()))


def mapping() -> Rule:
    """A mapping, kept as it is."""
    return Rule("a mapping", lambda v: isinstance(v, dict), dict)


def filled_mapping() -> Rule:
    """A mapping with at least one key."""
    return Rule("a mapping with at least one key", lambda v: isinstance(v, dict) and bool(v), dict)


def optional(rule: Rule) -> Rule:
    """The rule, or null."""
    return Rule(
        f"{rule.expected}, or null",
        lambda v: v is None or rule.accepts(v),
        lambda v: None if v is None else rule.convert(v),
    )


def dotted(path: KeyPath) -> str:
    """Return the path as it is printed: `training.peak_lr`."""
    return ".".join(path) or "the file"


def ruled(rule: Rule, *default: Any) -> Any:
    """Return a dataclass field that follows a rule; without a default the key must be there."""
    if not default:
        return field(metadata={"rule": rule})
    if isinstance(default[0], dict):
        return field(default_factory=lambda: dict(default[0]), metadata={"rule": rule})
    return field(default=default[0], metadata={"rule": rule})


def read_section(cls: type[Section], data: Any, place: Place) -> Section:
    """Fill a dataclass of ruled fields from a mapping.

    Raises:
        RecipeError: If a key is unknown or missing, or a value breaks its rule.
    """
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    check_keys(data, list(known), place)
    values: dict[str, Any] = {}
    for name, spec in known.items():
        if name in data:
            values[name] = read_value(spec.metadata["rule"], data[name], place.below(name))
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise _missing(name, spec.metadata["rule"], place)
    return cls(**values)


def read_value(rule: Rule, value: Any, place: Place) -> Any:
    """Return the value as the rule converts it, or refuse it."""
    if not rule.accepts(value):
        raise RecipeError(
            explain(
                f"'{dotted(place.path)}' has a value that does not fit",
                expected=rule.expected,
                got=repr(value),
                where=str(place),
            )
        )
    return rule.convert(value)


def check_keys(data: Any, known: list[str], place: Place) -> None:
    """Refuse what is not a mapping and all keys that are not known, at once."""
    if not isinstance(data, Mapping):
        raise RecipeError(
            explain(
                f"'{dotted(place.path)}' is not a mapping",
                expected=f"the keys {', '.join(known)}",
                got=repr(data),
                where=str(place),
            )
        )
    unknown = [key for key in data if key not in known]
    if unknown:
        below = place.below(str(unknown[0]))
        told = [f"'{dotted(place.below(str(key)).path)}'{suggest(str(key), known)}" for key in unknown]
        raise RecipeError(
            explain(
                f"unknown key{'s' * (len(told) > 1)} {' and '.join(told)}",
                expected=f"{'one' if len(told) == 1 else 'keys'} of {', '.join(known)}",
                got=", ".join(map(repr, unknown)),
                where=str(below),
            )
        )


def _missing(name: str, rule: Rule, place: Place) -> RecipeError:
    return RecipeError(
        explain(
            f"the key '{dotted((*place.path, name))}' is missing",
            expected=rule.expected,
            got="no such key",
            where=str(place),
        )
    )
