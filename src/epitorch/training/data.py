"""Image classification data for training, whole in memory: where it is read from.

The parts: `data_arrays` (the set, its split and statistics), `data_files`, `data_parquet`, `data_decode` and
`data_cache` (parquet folders), `data_loader` (batches), `data_batches` (augmentation, normalisation). Import from here.
"""

from __future__ import annotations

import pickle
import warnings
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from epitorch.errors import DataError, explain, require, suggest
from epitorch.training.data_arrays import ImageArrays, channel_stats, split_holdout
from epitorch.training.data_batches import BatchAugment, Normalize, crop_flip
from epitorch.training.data_files import find_split, has_parquet
from epitorch.training.data_loader import ArrayLoader
from epitorch.training.data_parquet import CIFAR10_CLASSES, load_parquet

__all__ = [
    "CIFAR10_CLASSES",
    "ArrayLoader",
    "BatchAugment",
    "ImageArrays",
    "Normalize",
    "channel_stats",
    "crop_flip",
    "find_images",
    "load_digits_arrays",
    "load_images",
    "split_holdout",
]

Format = Literal["auto", "parquet", "torchvision", "digits"]

_BATCHES = "cifar-10-batches-py"  # torchvision's name for the folder
_DIGITS_TEST = 360  # of 1,797: one in five
_DIGITS_SEED = 0


def load_images(path: str | PathLike[str], split: str, *, format: Format = "auto") -> ImageArrays:
    """Read one split of an image classification data set.

    Args:
        path: A folder with `SPLIT.parquet`, shards `SPLIT-00000-of-0000N.parquet` or numbered files
            `SPLIT/0000.parquet`, in itself, in `data/` or in one subfolder, with columns `img` or `image`
            (struct of bytes and path) and `label`; or `cifar-10-batches-py` or its parent, as torchvision
            leaves it; or the word `digits` for scikit-learn's handwritten digits.
        split: `train`, `test`, or any other that a parquet folder has.
        format: Which of the three it is; `auto` looks.

    Returns:
        The whole split. Images of a parquet folder are RGB. Without class names in the file, ten classes of
        32x32 images get CIFAR-10's names and all others their numbers.

    Raises:
        DataError: If something is missing, damaged or not what it should be; names the file and the row,
            counted from 0.

    Example:
        >>> load_images("digits", "test").image_shape
        (1, 8, 8)
    """
    if format not in get_args(Format):
        known = list(get_args(Format))
        asked = f"unknown data format{suggest(str(format), known)}"
        raise DataError(explain(asked, expected=", ".join(known), got=repr(format)))
    if format == "digits" or (format == "auto" and str(path) == "digits"):
        return load_digits_arrays(split)
    folder = _folder(path)
    if (_detect(folder) if format == "auto" else format) == "torchvision":
        return _load_torchvision(folder, split)
    return load_parquet(folder, split)


def find_images(path: str | PathLike[str]) -> None:
    """Look for both splits of an image data set without reading them.

    Raises:
        DataError: If there is no data set, or a split is missing.
    """
    if str(path) == "digits":
        return
    folder = _folder(path)
    if _detect(folder) == "parquet":
        for split in ("train", "test"):
            find_split(folder, split)


def _folder(path: str | PathLike[str]) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    found = "a file" if folder.exists() else "nothing"
    raise DataError(
        explain(
            "no data folder",
            expected="a folder with parquet files or with cifar-10-batches-py",
            got=found,
            where=str(folder),
            fix="give the folder that holds it" if found == "a file" else "check the path",
        )
    )


def _detect(folder: Path) -> Format:
    """Tell the two folder layouts apart by what is there."""
    found: list[Format] = []
    if has_parquet(folder):
        found.append("parquet")
    if folder.name == _BATCHES or (folder / _BATCHES).is_dir():
        found.append("torchvision")
    if len(found) == 1:
        return found[0]
    raise DataError(
        explain(
            "cannot tell which data to read" if found else "no data set in this folder",
            expected=f"train.parquet, data/train-00000-of-0000N.parquet or the like, or {_BATCHES}",
            got="both" if found else ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing",
            where=str(folder),
            fix=f"choose with format='{found[0]}'" if found else "check the path",
        )
    )


def _check_split(split: str, where: str) -> None:
    if split not in ("train", "test"):
        asked = f"no split '{split}'{suggest(split, ['train', 'test'])}"
        raise DataError(explain(asked, expected="train or test", got=repr(split), where=where))


def _load_torchvision(folder: Path, split: str) -> ImageArrays:
    """CIFAR-10 as torchvision stores it; torchvision compares the files' checksums."""
    _check_split(split, str(folder))
    cifar10 = require("torchvision.datasets", "train").CIFAR10
    root = folder.parent if folder.name == _BATCHES else folder
    try:
        with warnings.catch_warnings():
            # The published files were pickled by Python 2, which some NumPy 2.4 remark on.
            warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
            data = cifar10(root, train=split == "train", download=False)
        images = np.ascontiguousarray(data.data.transpose(0, 3, 1, 2))
        labels = torch.tensor(data.targets, dtype=torch.int64)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            explain(
                "not CIFAR-10 as torchvision stores it",
                expected="the six batches and batches.meta with their published checksums",
                got=str(error).split(". ")[0],
                where=str(_damaged_file(cifar10, root)),
                fix="fetch the data set again",
            )
        ) from error
    return ImageArrays(torch.from_numpy(images), labels, tuple(data.classes), f"torchvision {root}, split {split}")


def _damaged_file(cifar10: Any, root: Path) -> Path:
    """Return the first file that is missing or has another checksum, the folder if none has."""
    check = require("torchvision.datasets.utils", "train").check_integrity
    base = root / _BATCHES
    sums = [*cifar10.train_list, *cifar10.test_list, [cifar10.meta["filename"], cifar10.meta["md5"]]]
    return next((base / name for name, md5 in sums if not check(base / name, md5)), base)


def load_digits_arrays(split: str = "train") -> ImageArrays:
    """Return scikit-learn's 8x8 handwritten digits: 1,437 to train on and 360 to test, always the same.

    Args:
        split: `train` or `test`.

    Returns:
        Images of shape (N, 1, 8, 8), the grey levels 0..16 scaled to 0..255.

    Raises:
        DataError: If there is no such split.
        MissingExtraError: If scikit-learn is not installed.
    """
    _check_split(split, "digits")
    digits = require("sklearn.datasets", "demo").load_digits()
    pixels = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(digits.target.astype(np.int64))
    whole = ImageArrays(pixels, labels, tuple("0123456789"), "scikit-learn digits")
    train, test = split_holdout(whole, _DIGITS_TEST, _DIGITS_SEED)
    chosen = train if split == "train" else test
    return ImageArrays(chosen.images, chosen.labels, whole.classes, f"{whole.source}, split {split}")
