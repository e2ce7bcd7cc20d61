"""Large images in every layout, generated small: each has a colour of its own, so that it is known after any crop."""

from __future__ import annotations

import io
import tarfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parquet_files import encode, write
from PIL import Image
from torch import Tensor, nn

from epitorch.training.recipe import Recipe, parse_recipe

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
LAYOUTS = ("folder", "parquet", "tar")


def colour(number: int) -> np.ndarray:
    """Return image `number`: 40 x 30 pixels of one colour."""
    return np.broadcast_to(np.array([number // 256, number % 256, 7], np.uint8), (30, 40, 3)).copy()


def numbers(images: Tensor) -> list[int]:
    """Return which images are in a batch of uint8, shape (B, 3, H, W)."""
    return [int(image[0, 0, 0]) * 256 + int(image[1, 0, 0]) for image in images]


def seen(images: Tensor) -> list[int]:
    """Return which images are in a normalised batch."""
    return numbers(((images * STD + MEAN) * 255).round().to(torch.uint8))


def write_folder(root: Path, split: str, labels: Sequence[int], first: int = 0) -> None:
    for i, label in enumerate(labels):
        file = root / split / f"class{label:02d}" / f"{i:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode(colour(first + i)))


def write_parquets(root: Path, split: str, labels: Sequence[int], first: int = 0, shards: int = 2) -> list[Path]:
    files = []
    for shard, rows in enumerate(np.array_split(np.arange(len(labels)), shards)):
        file = root / "data" / f"{split}-{shard:05d}-of-{shards:05d}.parquet"
        images = [colour(first + int(i)) for i in rows]
        files.append(write(file, images, [labels[i] for i in rows], column="image", row_group_size=3))
    return files


def write_tar(file: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file


def members(rows: Sequence[int], labels: Sequence[int], first: int = 0) -> list[tuple[str, bytes]]:
    pairs = [
        [(f"k{i:04d}.png", encode(colour(first + int(i)))), (f"k{i:04d}.cls", str(labels[i]).encode())] for i in rows
    ]
    return [member for pair in pairs for member in pair]


def write_tars(root: Path, split: str, labels: Sequence[int], first: int = 0, shards: int = 3) -> list[Path]:
    parts = np.array_split(np.arange(len(labels)), shards)
    return [
        write_tar(root / f"tiny-{split}-{shard:04d}.tar", members(rows.tolist(), labels, first))
        for shard, rows in enumerate(parts)
    ]


WRITERS: dict[str, Any] = {"folder": write_folder, "parquet": write_parquets, "tar": write_tars}


def cycle(n: int, classes: int = 3) -> list[int]:
    return [i % classes for i in range(n)]


def write_set(root: Path, layout: str, train: int = 60, val: int = 12, classes: int = 3) -> Path:
    """Write a whole data set: training images from number 0, validation images from 1000."""
    WRITERS[layout](root, "train", cycle(train, classes))
    if val:
        WRITERS[layout](root, "val" if layout == "folder" else "validation", cycle(val, classes), 1000)
    return root


def image_net(num_classes: int = 3, rate: float = 0.1) -> nn.Sequential:
    """Return a small network whose normalisation looks at one image at a time."""
    parts: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)),
        ("norm1", nn.GroupNorm(2, 8)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flat", nn.Flatten()),
        ("drop", nn.Dropout(rate)),
        ("classifier", nn.Linear(8, num_classes)),
    ]
    return nn.Sequential(OrderedDict(parts))


def image_recipe(
    *, epochs: int = 2, holdout: int = 6, images: Any = None, model: Any = None, **training: Any
) -> Recipe:
    """Return a recipe of that network on images of 16 x 16."""
    data = {
        "name": "tiny/images",
        "model": {"name": "image_files:image_net", "arguments": {"num_classes": 3, **(model or {})}},
        "data": {"holdout": holdout},
        "images": {"size": 16, "shuffle_buffer": 10, **(images or {})},
        "training": {"epochs": epochs, "batch_size": 8, "peak_lr": 0.05, **training},
    }
    return parse_recipe(data, source="tiny images")


def picture(size: tuple[int, int] = (50, 40), seed: int = 0) -> Image.Image:
    """Return smooth noise, so that JPEG and resizing have something to do."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()
