"""Tiny runs, and a reader of pages."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rich.console import Console

from epitorch.results import RunResult
from epitorch.training.recipe import parse_recipe
from epitorch.training.run import train

VOID = {"meta", "link", "br", "img", "input", "hr"}


def train_tiny(name: str, widths: list[int], epitome: Any, out: Path, *, epochs: int = 2, seed: int = 0) -> RunResult:
    """Train a very small network on the digits."""
    data = {
        "name": name,
        "model": {"name": "epitorch:digits_cnn", "arguments": {"widths": widths}},
        "epitome": epitome,
        "data": {"holdout": 100, "crop_padding": 1, "flip": False},
        "training": {"epochs": epochs, "batch_size": 256, "peak_lr": 0.1},
    }
    console = Console(file=io.StringIO())
    return train(parse_recipe(data, source="tiny"), "digits", out, seed=seed, console=console, command=["epitorch"])


class Page(HTMLParser):
    """What a page is made of: elements with their attributes, text by element, and whether tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str) -> str:
        """Text directly in elements of a kind."""
        return " ".join(self.words.get(tag, []))
