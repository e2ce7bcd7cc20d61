"""The demo: one small network on handwritten digits, dense, narrowed, and as epitomes of the narrowed one's size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from epitorch.errors import InputError, explain
from epitorch.results import RunResult, load_results, save_results
from epitorch.training.folder import RESULTS, refuse_used
from epitorch.training.recipe import Recipe, parse_recipe
from epitorch.training.run import train

WIDTHS = (16, 32, 48, 64)
NARROW_WIDTHS = (8, 16, 24, 32)
# Shapes (O, I, 3, 3) near half of both axes that bring the total to the narrowed network's 12,082 parameters exactly.
# The epitome networks also keep the wide batch norms, first convolution and classifier: that is counted.
SEPARABLE_SHAPES = {"conv2": (15, 8), "conv3": (24, 16), "conv4": (31, 23)}
GRID_SHAPES = {"conv2": (14, 9), "conv3": (25, 15), "conv4": (31, 23)}


def demo_recipes() -> list[Recipe]:
    """Return the recipes of the demo, in the order in which they are run; `recipes/digits/` has them as files."""
    return [
        _recipe("digits/dense", WIDTHS, None),
        _recipe("digits/narrow", NARROW_WIDTHS, None),
        _recipe("digits/epitome", WIDTHS, {"index": "learner", "layers": _layers(SEPARABLE_SHAPES, "separable")}),
        _recipe("digits/epitome-grid", WIDTHS, {"index": "fixed", "layers": _layers(GRID_SHAPES, "grid")}),
    ]


def _recipe(name: str, widths: tuple[int, ...], epitome: dict[str, Any] | None) -> Recipe:
    data = {
        "name": name,
        "model": {"name": "epitorch:digits_cnn", "arguments": {"widths": list(widths)}},
        "epitome": epitome,
        "data": {"holdout": 237, "crop_padding": 1, "flip": False},
        "training": {"epochs": 15, "batch_size": 64, "peak_lr": 0.1, "weight_decay": 5e-4},
    }
    return parse_recipe(data, source=name)


def _layers(shapes: dict[str, tuple[int, int]], channel_starts: str) -> dict[str, Any]:
    return {
        name: {"epitome_shape": [*channels, 3, 3], "channel_starts": channel_starts}
        for name, channels in shapes.items()
    }


def run_demo(out_dir: str | Path, *, seed: int = 0, console: Console | None = None) -> list[RunResult]:
    """Train and measure every recipe of the demo.

    Args:
        out_dir: Receives `results.json` and a folder for each run; an earlier demo there is replaced.
        seed: Of every run.
        console: Where the progress bars go; default standard error.

    Returns:
        The results, in the order of `demo_recipes`.

    Raises:
        InputError: If the folder holds results of something else.
    """
    out, recipes = Path(out_dir), demo_recipes()
    refuse_used(out, overwrite=True)
    _refuse_other_results(out / RESULTS, [recipe.name for recipe in recipes])
    for recipe in recipes:
        _refuse_other_results(out / Path(recipe.name).name / RESULTS, [recipe.name])
    (out / RESULTS).unlink(missing_ok=True)
    with one_thread():
        results = [
            train(recipe, "digits", out / Path(recipe.name).name, seed=seed, overwrite=True, console=console)
            for recipe in recipes
        ]
    save_results(out / RESULTS, results)
    return results


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside: on layers this small a second one costs more in waiting than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _refuse_other_results(path: Path, names: list[str]) -> None:
    if not path.exists():
        return
    found = [result.name for result in load_results(path)]
    if found != names:
        raise InputError(
            explain(
                "this folder has the results of something else",
                expected="an empty folder, or one of an earlier demo",
                got=f"results of {', '.join(found)}",
                where=str(path),
                fix="choose another folder with --out",
            )
        )
