"""What becomes of an image: decoding as torchvision and timm do, timm's transforms, random numbers by image."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import picture, saved
from PIL import Image
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import functional as TF

from epitorch.errors import DataError, RecipeError
from epitorch.training.data_views import View, check_view, decode_rgb, imagenet_stats
from epitorch.training.draws import seed_image
from epitorch.training.recipe_images import ImagesSection


def rotated(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    return saved(image, "JPEG", exif=exif)


PICTURE = picture()
ENCODED = {
    "jpeg": saved(PICTURE, "JPEG"),
    "grey": saved(PICTURE.convert("L"), "JPEG"),
    "cmyk": saved(PICTURE.convert("CMYK"), "JPEG"),
    "palette": saved(PICTURE.convert("P")),
    "see-through palette": saved(PICTURE.convert("P"), transparency=bytes(range(256))),
    "alpha": saved(PICTURE.convert("RGBA")),
    "grey and alpha": saved(PICTURE.convert("LA")),
    "one bit": saved(PICTURE.convert("1")),
    "webp": saved(PICTURE, "WEBP"),
    "exif": rotated(PICTURE),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("kind", ENCODED)
def test_decodes_as_torchvision(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(ENCODED[kind])
    expected = pil_loader(str(file))
    got = decode_rgb(ENCODED[kind], "here")
    assert (got.mode, got.size) == ("RGB", (50, 40))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_exif_would_show() -> None:
    """The negative control: the file says that it is to be turned."""
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(ENCODED["exif"])))
    assert turned.size == (40, 50)


def test_sixteen_bits_are_divided_not_clipped() -> None:
    values = np.arange(0, 65536, 1311, dtype=np.uint16).reshape(5, 10)
    data = saved(Image.fromarray(values))
    got = np.asarray(decode_rgb(data, "here"))
    for channel in range(3):
        np.testing.assert_array_equal(got[..., channel], values // 256)


BROKEN = {
    "truncated": ENCODED["jpeg"][:-200],
    "truncated png": ENCODED["alpha"][:-200],
    "empty": b"",
    "text": b"<html>not found</html>",
    "float": saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"),
    "32 bits": saved(Image.fromarray(np.full((4, 4), 70000, np.int32)), "TIFF"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_images_are_named(kind: str) -> None:
    with pytest.raises(DataError, match=r"(?s)^n01/a.JPEG: an image cannot be decoded.*to do:"):
        decode_rgb(BROKEN[kind], "n01/a.JPEG")


def test_evaluation_is_resize_and_centre_crop() -> None:
    view = View(ImagesSection(size=24, crop_pct=0.75, interpolation="bilinear"))
    expected = TF.center_crop(TF.resize(PICTURE, 32, TF.InterpolationMode.BILINEAR), [24, 24])
    got = view(saved(PICTURE), "here")
    assert got.dtype == torch.uint8
    torch.testing.assert_close(got, TF.pil_to_tensor(expected), rtol=0, atol=0)
    assert view.shape == tuple(got.shape)
    other = View(ImagesSection(size=24, crop_pct=1.0, interpolation="bilinear"))(saved(PICTURE), "here")
    assert not torch.equal(other, got)


def drawn(view: View, seed: int, epoch: int, number: int) -> torch.Tensor:
    seed_image(seed, epoch, number)
    return view(saved(PICTURE), "here")


AUGMENTED = [
    {},
    {"color_jitter": 0.4},
    {"auto_augment": "rand-m9-mstd0.5-inc1"},
    {"auto_augment": "original"},
    {"random_erasing": 1.0},
    {"interpolation": "random"},
]


@pytest.mark.parametrize("keys", AUGMENTED)
def test_augmentation_is_drawn_for_each_image(keys: dict[str, Any]) -> None:
    view = View(ImagesSection(size=24, **keys), augmented=True)
    first = drawn(view, 0, 0, 0)
    others = [drawn(view, *place) for place in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    torch.testing.assert_close(drawn(view, 0, 0, 0), first, rtol=0, atol=0)
    assert not any(torch.equal(first, other) for other in others)
    assert (first.shape, first.dtype) == ((3, 24, 24), torch.uint8)


@pytest.mark.parametrize("key", [key for keys in AUGMENTED[1:5] for key in keys.items()])
def test_each_key_does_something(key: tuple[str, Any]) -> None:
    plain = View(ImagesSection(size=24), augmented=True)
    view = View(ImagesSection(size=24, **dict([key])), augmented=True)
    assert any(not torch.equal(drawn(plain, 0, 0, i), drawn(view, 0, 0, i)) for i in range(4))


def test_flips_and_crops_follow_their_keys() -> None:
    whole = View(ImagesSection(size=24, min_scale=1.0, hflip=1.0, interpolation="bilinear"), augmented=True)
    square = picture((24, 24))
    seed_image(0, 0, 0)
    got = whole(saved(square), "here")
    torch.testing.assert_close(got, TF.pil_to_tensor(TF.hflip(square)), rtol=0, atol=0)


def test_erased_pixels_have_the_mean_colour() -> None:
    keys = {"size": 24, "min_scale": 1.0, "hflip": 0.0}
    square = saved(Image.new("RGB", (24, 24), (255, 0, 9)))
    erased = View(ImagesSection(**keys, random_erasing=1.0), augmented=True)
    seed_image(0, 0, 3)
    pixels = {tuple(p) for p in erased(square, "here").flatten(1).T.tolist()}
    mean, _ = imagenet_stats()
    assert pixels == {(255, 0, 9), tuple(round(255 * value) for value in mean)}


def test_seeding_an_image_covers_every_generator() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    seed_image(3, 1, 7)
    first = draws()
    seed_image(3, 1, 7)
    assert draws() == first
    seed_image(3, 1, 8)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


@pytest.mark.parametrize("policy", ["rand-x9", "nonsense"])
def test_unknown_policies_are_refused(policy: str) -> None:
    with pytest.raises(RecipeError, match=r"(?s)timm does not know.*images.auto_augment"):
        check_view(ImagesSection(auto_augment=policy), "recipe.yaml")
