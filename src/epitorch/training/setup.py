"""Before the first step: the data on their device, the model built and checked, the surroundings recorded."""

from __future__ import annotations

import platform
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from epitorch import __version__
from epitorch.checkpoint import ModelInput
from epitorch.errors import InputError, explain
from epitorch.training.data import channel_stats, load_images, split_holdout
from epitorch.training.data_audio import load_sound_training, sound_stats
from epitorch.training.data_files import find_split, has_parquet
from epitorch.training.data_images import HOLDOUT_SEED, load_image_training
from epitorch.training.data_kinds import AnyImages
from epitorch.training.data_views import check_view, imagenet_stats
from epitorch.training.recipe import Recipe
from epitorch.training.starting import BuiltModel, first_model

_PACKAGES = ("torch", "torchvision", "timm", "pytorch-lightning", "numpy", "safetensors")


@dataclass(frozen=True)
class TrainingData:
    """Training and held-out images, and what the model has to know about them.

    Args:
        train: Training images.
        heldout: Training images held out to choose by.
        input: What the model sees.
        tested: Whether there are test images; where not, the held-out ones stand in.
        notes: What a reader of the log must know.
    """

    train: AnyImages
    heldout: AnyImages
    input: ModelInput
    tested: bool = True
    notes: tuple[str, ...] = ()


def load_training_data(recipe: Recipe, path: str | Path) -> TrainingData:
    """Read and split the training images; the test images are only looked for, not read.

    Raises:
        DataError: If the data are missing or damaged, or there are too few to hold out.
    """
    if recipe.sound is not None:
        sounds, heldout_sounds = load_sound_training(path, recipe.sound, recipe.data.holdout)
        shape, stats = sounds.image_shape, sound_stats(sounds)
        return TrainingData(sounds, heldout_sounds, ModelInput(shape, *stats, sounds.classes))
    if recipe.images is not None:
        check_view(recipe.images, recipe.source)
        data = load_image_training(path, recipe.images, recipe.data.holdout)
        seen = ModelInput(data.train.image_shape, *imagenet_stats(), data.train.classes)
        return TrainingData(data.train, data.heldout, seen, data.tested, data.notes)
    if Path(path).is_dir() and has_parquet(Path(path)):
        find_split(Path(path), "test")  # fail now rather than after the last epoch
    whole = load_images(path, "train")
    train, heldout = split_holdout(whole, recipe.data.holdout, HOLDOUT_SEED)
    mean, std = channel_stats(train)
    return TrainingData(train, heldout, ModelInput(whole.image_shape, mean, std, whole.classes))


def build(recipe: Recipe, model_input: ModelInput) -> BuiltModel:
    """Build and convert the recipe's model and check that it fits the images.

    Raises:
        InputError: If there is no such model, it cannot be converted as asked, the checkpoint to start from does not
            fit, or the model does not give one number per class for an image of this shape.
    """
    built = first_model(recipe, example_image(model_input))
    _check_output(built.model, model_input, recipe)
    return built


def example_image(model_input: ModelInput) -> Tensor:
    """Return one image of zeros, shape (1, C, H, W)."""
    return torch.zeros(1, *model_input.shape)


def _check_output(model: nn.Module, model_input: ModelInput, recipe: Recipe) -> None:
    classes = len(model_input.classes)
    training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(example_image(model_input))
    except RuntimeError as error:
        got: str = str(error).splitlines()[0]
    else:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    finally:
        model.train(training)
    if got == f"shape {(1, classes)}":
        return
    raise InputError(
        explain(
            f"the model '{recipe.model.name}' does not fit the data",
            expected=f"shape {(1, classes)} for an image of shape {(1, *model_input.shape)}",
            got=got,
            where=recipe.source,
            fix="set the model's arguments (num_classes, ...) in the recipe",
        )
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch inside; all generators are put back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a reader of the results must know about the machine and the software."""
    return {
        "epitorch": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Commit of the source tree that the package runs from; None for an installed one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
