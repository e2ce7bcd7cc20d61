"""From an encoded image of any size to the network's input, by timm's transforms."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epitorch.errors import DataError, RecipeError, explain, require
from epitorch.training.data_decode import what_pillow_said
from epitorch.training.recipe_images import ImagesSection

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I")  # Pillow's own conversion clips them at 255


@dataclass(frozen=True)
class View:
    """What becomes of every image of a set: a random crop and augmentation, or the centre crop.

    Args:
        section: Of the recipe.
        augmented: Training images; else the centre crop.
    """

    section: ImagesSection
    augmented: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(3, H, W)` of what comes out."""
        return 3, self.section.size, self.section.size

    def __call__(self, data: bytes, where: str) -> Tensor:
        """Decode and transform an image; random numbers come from Python's, NumPy's and torch's own generators.

        Args:
            data: The file's content.
            where: Its place, for messages.

        Returns:
            shape: (3, H, W), uint8. Not normalised: a quarter of the bytes on the way to the device.

        Raises:
            DataError: If it cannot be decoded.
        """
        return _transform(self)(decode_rgb(data, where))


def imagenet_stats() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return ImageNet's mean and standard deviation of each channel as timm has them, on the scale 0 to 1."""
    timm = require("timm.data", "models")
    return tuple(timm.IMAGENET_DEFAULT_MEAN), tuple(timm.IMAGENET_DEFAULT_STD)


def decode_rgb(data: bytes, where: str) -> Any:
    """Decode an image as torchvision and timm do.

    Grey, palette and CMYK images are converted, an alpha channel is dropped, a rotation in the EXIF data is not
    applied. 16-bit grey values are divided by 256; torchvision would clip them at 255, to a white image.

    Returns:
        A `PIL.Image` of mode RGB.

    Raises:
        DataError: If it is broken, or of a format or depth that is not read.
    """
    pillow = require("PIL.Image", "train")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd EXIF data and palettes
            with pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
                return _narrowed(pillow, image).convert("RGB")
    except Exception as error:  # a broken stream makes the codecs raise nearly anything
        raise DataError(
            explain(
                "an image cannot be decoded",
                expected=f"a whole image ({', '.join(_FORMATS)}) of 8 or 16 bits per channel",
                got=f"{len(data)} bytes: {what_pillow_said(error)}",
                where=where,
                fix="fetch the file again, or take it out of the data set",
            )
        ) from error


def _narrowed(pillow: Any, image: Any) -> Any:
    if image.mode == "F":
        raise ValueError("pixels of mode F")
    if image.mode not in _SIXTEEN_BITS:
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("pixels of 32 bits")
    return pillow.fromarray((values >> 8).astype(np.uint8))


@cache
def _transform(view: View) -> Callable[[Any], Tensor]:
    """Timm's transform; one for each process."""
    section, augmented = view.section, view.augmented
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform = require("timm.data", "models").create_transform(
            section.size,
            is_training=augmented,
            scale=(section.min_scale, 1.0),
            hflip=section.hflip,
            color_jitter=section.color_jitter or None,
            auto_augment=section.auto_augment,
            # timm draws one of two for training images; for others there is nothing to draw
            interpolation="bilinear" if section.interpolation == "random" and not augmented else section.interpolation,
            crop_pct=section.crop_pct,
            normalize=False,
        )
    if not (augmented and section.random_erasing):
        return transform
    return _Erased(transform, section.random_erasing)


class _Erased:
    """A transform, then timm's random erasing of its uint8 result, with the mean colour."""

    def __init__(self, transform: Callable[[Any], Tensor], probability: float) -> None:
        self.transform = transform
        self.erase = require("timm.data.random_erasing", "models").RandomErasing(probability, device="cpu")
        mean, _ = imagenet_stats()
        self.mean = torch.tensor([round(255 * value) for value in mean], dtype=torch.int16)[:, None, None]

    def __call__(self, image: Any) -> Tensor:
        # timm erases to zero, which is the mean colour in normalised images: the same here, around that colour
        shifted = self.transform(image).to(torch.int16) - self.mean
        return (self.erase(shifted) + self.mean).to(torch.uint8)


def check_view(section: ImagesSection, where: str) -> None:
    """Build the training transform.

    Raises:
        RecipeError: If timm does not know the augmentation.
    """
    try:
        _transform(View(section, augmented=True))
    except Exception as error:  # timm asserts, or fails to convert a number
        raise RecipeError(
            explain(
                "timm does not know this augmentation",
                expected="a policy such as rand-m9-mstd0.5-inc1 or original",
                got=f"{section.auto_augment!r}: {error or type(error).__name__}",
                where=where,
                fix="correct images.auto_augment",
            )
        ) from error
