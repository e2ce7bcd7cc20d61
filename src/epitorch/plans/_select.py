"""Which layers are meant: by name pattern, by type, by predicate."""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from epitorch.errors import InputError, explain, suggest

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]


def selected(selectors: Collection[Selector], name: str, layer: nn.Module) -> bool:
    """Whether any selector means this layer."""
    return any(_means(selector, name, layer) for selector in selectors)


def check_selectors(option: str, selectors: Any, layers: Collection[str]) -> None:
    """Refuse what is no collection of selectors, and a name pattern that no layer has: it is likely misspelt.

    Raises:
        InputError: In these cases.
    """
    if isinstance(selectors, str) or not isinstance(selectors, Collection):
        raise InputError(
            explain(
                f"{option} is not a list of layers",
                expected="name patterns, types or functions, such as ['fc', 'layer4.*', nn.Linear]",
                got=repr(selectors),
            )
        )
    for selector in selectors:
        if not isinstance(selector, str) and not callable(selector):
            wrong = f"{option} holds something that selects no layer"
            raise InputError(explain(wrong, expected="a name pattern, a type or a function", got=repr(selector)))
        if isinstance(selector, str) and not any(fnmatchcase(name, selector) for name in layers):
            raise InputError(
                explain(
                    f"no layer has the name that {option} gives{suggest(selector, list(layers))}",
                    expected="a pattern of the qualified name of a convolution or linear layer",
                    got=repr(selector),
                )
            )


def _means(selector: Selector, name: str, layer: nn.Module) -> bool:
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    if isinstance(selector, type):
        return isinstance(layer, selector)
    return bool(selector(name, layer))
