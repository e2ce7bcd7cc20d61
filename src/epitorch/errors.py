"""One exception family. Every message says what was asked, what was expected, what came, where, and what to do."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from types import ModuleType
from typing import Any


class EpitorchError(Exception):
    """Base of every error that epitorch raises on purpose."""


class InputError(EpitorchError, ValueError):
    """Wrong input from the user: the command line answers with exit code 2."""


class ShapeError(InputError):
    """Sizes, blocks or groups that do not fit together."""


class StartsError(InputError):
    """Start indices that are missing, misshapen or not finite."""


class ConversionError(InputError):
    """A model or layer that cannot be converted as asked."""


class RecipeError(InputError):
    """A recipe with an unknown key, a missing key or a wrong value."""


class DataError(InputError):
    """A data file that is missing, half-written or not what it should be."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged or belongs to another architecture."""


class HubError(EpitorchError):
    """The Hugging Face Hub that cannot be reached, or refuses."""


class TrainingError(EpitorchError):
    """Training that could not go on, for example because the loss is not finite."""


class ExportError(EpitorchError):
    """A model that cannot be written in the format asked for, or a file that its runtime does not run."""


class MissingExtraError(EpitorchError, ImportError):
    """An optional dependency is not installed."""


def explain(asked: str, *, expected: object, got: object, where: str | None = None, fix: str | None = None) -> str:
    """Return a message of the family's form.

    Args:
        asked: What the user wanted, as a short phrase.
        expected: What would have been right.
        got: What came.
        where: Module name, file or line; left out where there is none.
        fix: What to do.
    """
    lines = [f"{where}: {asked}" if where else asked, f"  expected: {expected}", f"  got:      {got}"]
    if fix:
        lines.append(f"  to do:    {fix}")
    return "\n".join(lines)


def suggest(word: str, known: list[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known word, or an empty string."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def check_is_model(model: object) -> None:
    """Refuse what is no module before one of its attributes is missed.

    Raises:
        InputError: If it is none.
    """
    from torch import nn  # shapes and messages are there without torch

    if not isinstance(model, nn.Module):
        got = f"{type(model).__name__}: {model!r:.80}"
        raise InputError(explain("this is no model", expected="a torch.nn.Module", got=got))


def require(module: str, extra: str) -> ModuleType | Any:
    """Import an optional module, or say which extra to install.

    Raises:
        MissingExtraError: If the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise MissingExtraError(
            explain(
                f"'{module}' is needed here",
                expected=f"the optional dependency '{module.split('.')[0]}'",
                got="it is not installed",
                fix=f"pip install 'epitorch[{extra}]'",
            )
        ) from error
