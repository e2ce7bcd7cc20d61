"""Short recipes and a quiet console for tests that train."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytorch_lightning as pl
from rich.console import Console
from torch import nn

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


def rank_free_net(num_classes: int = 10, dropout: float = 0.0) -> nn.Sequential:
    """Return a small network of the digits whose normalisation looks at one image at a time."""
    parts: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(1, 8, 3, padding=1, bias=False)),
        ("norm1", nn.GroupNorm(2, 8)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)),
        ("norm2", nn.GroupNorm(2, 8)),
        ("relu2", nn.ReLU()),
        ("conv3", nn.Conv2d(8, 16, 3, padding=1, bias=False)),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flat", nn.Flatten()),
        ("drop", nn.Dropout(dropout)),
        ("classifier", nn.Linear(16, num_classes)),
    ]
    return nn.Sequential(OrderedDict(parts))


def rank_free_recipe(
    index: str = "learner", *, epochs: int = 2, dropout: float = 0.0, epitome: Any = None, **training: Any
) -> Recipe:
    """Return a recipe of that network; two layers are epitomes."""
    data = {
        "name": f"rank_free/{index}",
        "model": {"name": "run_helpers:rank_free_net", "arguments": {"dropout": dropout}},
        "epitome": {"index": index, "layers": LAYERS, **(epitome or {})},
        "data": {"holdout": 100, "crop_padding": 1, "flip": True},
        "training": {"epochs": epochs, "batch_size": 128, "peak_lr": 0.1, **training},
    }
    return parse_recipe(data, source="rank free")


class Killed(BaseException):
    """Ends a run where it stands, as far as one process can do that to itself."""


class KillAt(pl.Callback):
    """Raises Killed after so many optimiser steps, or so many held-out batches."""

    def __init__(self, step: int | None = None, heldout: int | None = None) -> None:
        self.step, self.heldout = step, heldout

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.heldout is not None:
            self.heldout -= 1
            if self.heldout == 0:
                raise Killed
