"""Types of the command line's arguments: each says what it expects where a text does not fit."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

_MAX_SEED = 2**63 - 1  # what torch takes


@contextmanager
def _expected(what: str, text: str) -> Iterator[None]:
    """Turn a failed conversion inside into argparse's own error, which says what would fit."""
    try:
        yield
    except (ValueError, ArithmeticError) as error:
        raise ArgumentTypeError(f"expected {what}, got {text!r}") from error


def _check(fits: bool) -> None:
    if not fits:
        raise ValueError


def folder(text: str) -> Path:
    with _expected("a folder", text):
        _check(bool(text.strip()))
    return Path(text)


def sizes(text: str) -> tuple[int, ...]:
    with _expected("whole numbers from 1 with commas, such as 1,3,224,224", text):
        return tuple(_whole(part, 1) for part in text.split(","))


def amount(text: str) -> int:
    """2.1M, 300k, 1.2G or 1234; exact, since 2.1 * 10**6 is not in binary."""
    with _expected("a number above 0, such as 2.1M, 300k, 1.2G or 1234", text):
        factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
        number = Decimal(text[:-1] if factor > 1 else text)
        _check(number.is_finite() and number > 0 and number * factor == int(number * factor))
        return int(number * factor)


def seed(text: str) -> int:
    with _expected("a seed, a whole number from 0", text):
        return _whole(text, 0, _MAX_SEED)


def seeds(text: str) -> tuple[int, ...]:
    with _expected("whole numbers from 0 with commas, such as 0,1,2", text):
        return tuple(dict.fromkeys(_whole(part, 0, _MAX_SEED) for part in text.split(",")))


def names(text: str) -> tuple[str, ...]:
    with _expected("names with commas between them", text):
        parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        _check(bool(parts))
        return parts


def at_least_1(text: str) -> int:
    with _expected("a whole number from 1", text):
        return _whole(text, 1)


def share(text: str) -> float:
    with _expected("a number from 0", text):
        number = float(text)
        _check(0 <= number < 10**6)
        return number


def _whole(text: str, least: int, most: int | None = None) -> int:
    number = int(text)
    _check(number >= least and (most is None or number <= most))
    return number
