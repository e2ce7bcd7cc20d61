"""Types of the command line's arguments."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from pathlib import Path


def folder(text: str) -> Path:
    if not text.strip():
        raise ValueError(text)
    return Path(text)


folder.__name__ = "folder"


def sizes(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if not numbers or min(numbers) < 1:
        raise ValueError(text)
    return numbers


def amount(text: str) -> int:
    """2.1M, 300k, 1.2G or 1234; exact, since 2.1 * 10**6 is not in binary."""
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    try:
        number = Decimal(text[:-1] if factor > 1 else text)
    except InvalidOperation as error:
        raise ValueError(text) from error
    if not number.is_finite() or number <= 0 or number * factor != int(number * factor):
        raise ValueError(text)
    return int(number * factor)


def seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**63:  # what torch takes
        raise ValueError(text)
    return number


def seeds(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(seed(part) for part in text.split(",")))


def names(text: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ValueError(text)
    return parts


def at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 10**6:
        raise ValueError(text)
    return number


seeds.__name__ = "list of seeds"
names.__name__ = "list of names"
at_least_1.__name__ = "number"
share.__name__ = "number"
amount.__name__ = "number"
sizes.__name__ = "shape"  # argparse names it: "invalid shape value"
