"""Images or sounds: what reading, augmenting and normalising mean for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from epitorch.checkpoint import ModelInput
from epitorch.training.data import BatchAugment, ImageArrays, Normalize, load_images
from epitorch.training.data_audio import load_sounds
from epitorch.training.data_audio_batches import NormalizeSound, SoundAugment
from epitorch.training.recipe import Recipe
from epitorch.training.recipe_sound import SoundSection


def load_split(path: str | Path, split: str, sound: SoundSection | None) -> ImageArrays:
    """Read one split: of sounds if the recipe has a section for them, else of images.

    Raises:
        DataError: As `load_sounds` and `load_images`.
    """
    return load_images(path, split) if sound is None else load_sounds(path, split, sound)


def sound_of(recipe: Mapping[str, Any]) -> SoundSection | None:
    """Return the section `sound` of a recipe that a checkpoint holds as plain data."""
    section = recipe.get("sound")
    return SoundSection(**section) if isinstance(section, dict) else None


def augmentation(recipe: Recipe) -> BatchAugment | SoundAugment:
    """Return what is done to the training batches of a recipe."""
    sound = recipe.sound
    if sound is None:
        return BatchAugment(recipe.data.crop_padding, flip=recipe.data.flip)
    return SoundAugment(round(sound.crop_seconds * sound.sample_rate), sound.gain_db)


def normalization(model_input: ModelInput) -> nn.Module:
    """Return what brings images (shape of three axes) or sounds (of two) to the scale that the model was trained on."""
    kind = Normalize if len(model_input.shape) == 3 else NormalizeSound
    return kind(model_input.mean, model_input.std)
