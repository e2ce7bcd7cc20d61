"""Short recipes and a quiet console for tests that train."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from epitorch.training.recipe import Recipe, parse_recipe

LAYERS = {"conv2": {"epitome_shape": [4, 4, 3, 3]}, "conv3": {"epitome_shape": [8, 4, 3, 3]}}


def tiny_recipe(index: str | None = None, *, epochs: int = 1, epitome: Any = None, **training: Any) -> Recipe:
    """Return a recipe of a very small network on the digits; with an index kind, two layers are epitomes."""
    data = {
        "name": f"tiny/{index or 'dense'}",
        "model": {"name": "epitorch:digits_cnn", "arguments": {"widths": [8, 8, 16]}},
        "epitome": None if index is None else {"index": index, "layers": LAYERS, **(epitome or {})},
        "data": {"holdout": 100, "crop_padding": 1, "flip": False},
        "training": {"epochs": epochs, "batch_size": 64, "peak_lr": 0.1, **training},
    }
    return parse_recipe(data, source="tiny")


def quiet() -> Console:
    """Return a console that shows nothing."""
    return Console(file=io.StringIO())
