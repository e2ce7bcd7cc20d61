"""Images, large images or sounds: what reading, batching, augmenting and normalising mean for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch.checkpoint import ModelInput
from epitorch.training.data import ArrayLoader, BatchAugment, ImageArrays, Normalize, find_images, load_images
from epitorch.training.data_audio import find_sounds, load_sounds
from epitorch.training.data_audio_batches import NormalizeSound, SoundAugment
from epitorch.training.data_folder import FolderImages
from epitorch.training.data_images import find_layout, load_image_split
from epitorch.training.data_shards import ShardImages
from epitorch.training.data_workers import FolderLoader, StreamLoader
from epitorch.training.ranks import ALONE, Ranks
from epitorch.training.recipe import Recipe
from epitorch.training.recipe_images import ImagesSection
from epitorch.training.recipe_sound import SoundSection

AnyImages = ImageArrays | FolderImages | ShardImages
AnyLoader = ArrayLoader | FolderLoader | StreamLoader


@dataclass(frozen=True)
class Kind:
    """What a recipe says of how its data are read.

    Args:
        sound: The section, where the data are sounds.
        images: The section, where they are images of any size.
        holdout: Training images that are held out.
    """

    sound: SoundSection | None = None
    images: ImagesSection | None = None
    holdout: int = 0


def kind_of(recipe: Recipe) -> Kind:
    """Return what a recipe says."""
    return Kind(recipe.sound, recipe.images, recipe.data.holdout)


def kind_in(content: Mapping[str, Any]) -> Kind:
    """Return what a recipe says that a checkpoint holds as plain data."""
    sound, images, data = (content.get(key) for key in ("sound", "images", "data"))
    return Kind(
        SoundSection(**sound) if isinstance(sound, dict) else None,
        ImagesSection(**images) if isinstance(images, dict) else None,
        data.get("holdout", 0) if isinstance(data, dict) else 0,
    )


def load_split(path: str | Path, split: str, kind: Kind) -> AnyImages:
    """Read one split of arrays; of large images, find it.

    Raises:
        DataError: As `load_images`, `load_sounds` and `load_image_split`.
    """
    if kind.sound is not None:
        return load_sounds(path, split, kind.sound)
    if kind.images is not None:
        return load_image_split(path, split, kind.images, kind.holdout)
    return load_images(path, split)


def find_data(path: str | Path, kind: Kind) -> None:
    """Look for a data set without reading it, so that a mistake shows before anything is begun.

    Raises:
        DataError: If there is none of this kind, or a part of it is missing.
    """
    if kind.sound is not None:
        find_sounds(path, kind.sound)
    elif kind.images is not None:
        find_layout(path)
    else:
        find_images(path)


def make_loader(
    images: AnyImages,
    batch_size: int,
    device: torch.device,
    *,
    shuffle: bool = False,
    seed: int = 0,
    ranks: Ranks = ALONE,
    workers: int = 0,
) -> AnyLoader:
    """Return the batches of a set: arrays on the device, other images from workers.

    Args:
        images: The set.
        batch_size: Over all processes.
        device: That the batches are for.
        shuffle: For training: another order in each epoch, and whole batches only.
        seed: Decides the orders.
        ranks: Which of the processes this is.
        workers: That read, for what does not lie on the device.
    """
    # A rest of a few images would give batch norm a poor estimate.
    if isinstance(images, ImageArrays):
        return ArrayLoader(images.to(device), batch_size, shuffle=shuffle, seed=seed, drop_last=shuffle, ranks=ranks)
    kind: Any = FolderLoader if isinstance(images, FolderImages) else StreamLoader
    return kind(
        images,
        batch_size,
        workers=workers,
        pinned=device.type == "cuda",
        shuffle=shuffle,
        seed=seed,
        drop_last=shuffle,
        ranks=ranks,
    )


def first_images(images: AnyImages, number: int) -> Tensor:
    """Return the first images of a set, shape: (n, C, H, W), uint8; fewer where there are fewer."""
    if isinstance(images, ImageArrays):
        return images.images[:number]
    batch, _ = next(iter(make_loader(images, number, torch.device("cpu"))))
    return batch


class AsRead(nn.Module):
    """Leaves batches as they are: their images were augmented one by one where they were read."""

    def forward(self, images: Tensor, generator: torch.Generator | None = None, *, ranks: Ranks = ALONE) -> Tensor:
        """Return the batch, shape (B, C, H, W)."""
        return images


def augmentation(recipe: Recipe) -> nn.Module:
    """Return what is done to the training batches of a recipe."""
    sound = recipe.sound
    if recipe.images is not None:
        return AsRead()
    if sound is None:
        return BatchAugment(recipe.data.crop_padding, flip=recipe.data.flip)
    return SoundAugment(round(sound.crop_seconds * sound.sample_rate), sound.gain_db)


def normalization(model_input: ModelInput) -> nn.Module:
    """Return what brings images (shape of three axes) or sounds (of two) to the scale that the model was trained on."""
    kind = Normalize if len(model_input.shape) == 3 else NormalizeSound
    return kind(model_input.mean, model_input.std)
