"""Large images on disk: which layout a folder has, its splits, and what is held out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from epitorch.errors import DataError, explain, suggest
from epitorch.training.data_arrays import holdout_error, split_holdout
from epitorch.training.data_files import find_split, known_splits
from epitorch.training.data_folder import FolderImages, class_folders, load_folder
from epitorch.training.data_shards import ShardImages
from epitorch.training.data_shards_parquet import load_parquet_shards
from epitorch.training.data_shards_tar import load_tar_shards
from epitorch.training.data_views import View
from epitorch.training.recipe_images import ImagesSection

LargeImages = FolderImages | ShardImages

HOLDOUT_SEED = 0  # the same held-out images in every run, whatever its seed
_TRAIN = "train"
_TESTS = ("validation", "val", "valid", "test")  # ImageNet's test images have no labels
_WORD = re.compile(rf"(?:^|[-_.])({'|'.join((_TRAIN, *_TESTS))})(?=[-_.]|$)")
_LAYOUTS = "train/CLASS/*.JPEG and val/CLASS/*.JPEG; train-00000-of-0000N.parquet; train-0000.tar or train/0000.tar"


@dataclass(frozen=True)
class ImageData:
    """A data set to train on.

    Args:
        train: Training images, augmented.
        heldout: Training images held out to choose by.
        tested: Whether there is a split to test on.
        notes: What a reader of the log must know.
    """

    train: LargeImages
    heldout: LargeImages
    tested: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Found:
    """The splits of a folder, and how one is read."""

    root: Path
    splits: dict[str, Any]  # its name to its folder, or to its files
    load: Callable[[Path, Any, View, Any], Any]

    @property
    def train(self) -> str:
        """Name of the training split: the only one, whatever its name, where there is only one."""
        only = len(self.splits) == 1 and not set(self.splits) & set(_TESTS)
        if _TRAIN in self.splits or not only:
            return _TRAIN
        return next(iter(self.splits))

    @property
    def test(self) -> str | None:
        """Name of the split to test on."""
        return next((name for name in _TESTS if name in self.splits), None)

    def read(self, name: str, view: View, classes: tuple[str, ...] | None = None) -> Any:
        """Read a split that has the classes of the training images, where they are known.

        Raises:
            DataError: If there is none of that name.
        """
        if name not in self.splits:
            known = list(self.splits)
            raise DataError(
                explain(
                    f"no split '{name}'{suggest(name, known)}",
                    expected=_LAYOUTS if name == _TRAIN else "one of the splits that there are",
                    got=f"splits {', '.join(known)}",
                    where=str(self.root),
                )
            )
        return self.load(self.root, self.splits[name], view, classes)


def load_image_training(path: str | Path, section: ImagesSection, holdout: int) -> ImageData:
    """Find training, held-out and test images; none of them is decoded yet.

    Held out are, of images in folders, each class's share, always the same; of shards, the last ones in the order of
    the files. Without a split to test on, at most a fifth.

    Raises:
        DataError: If something is missing, or the splits do not go together.
    """
    found = find_layout(path)
    whole = found.read(found.train, View(section))
    tested = found.test is not None
    if found.test is not None:
        _check_classes(whole.classes, found.read(found.test, View(section), whole.classes))
    held = holdout if tested else min(holdout, max(1, len(whole) // 5))
    notes = []
    if not tested:
        notes.append(f"there is no split to test on in {found.root}: the {held} held-out images stand in")
    if held != holdout:
        notes.append(f"data.holdout = {holdout} is too many of {len(whole)} images: {held} are held out")
    train, heldout = _split(whole, held)
    bare = _classes_left_out(train)
    if bare and tested:
        raise _left_out_error(train, bare)
    if bare:
        notes.append(f"{len(bare)} of {len(train.classes)} classes have no training image")
    return ImageData(replace(train, view=View(section, augmented=True)), heldout, tested, tuple(notes))


def load_image_split(path: str | Path, split: str, section: ImagesSection, holdout: int) -> LargeImages:
    """Find the images of one split.

    Args:
        path: The data set's folder.
        split: `train` (all of them), `heldout`, `test` (the validation split; where there is none, the held-out images
            stand in, and `source` says so), or the name of one that there is.
        section: Of the recipe.
        holdout: Images that training held out.

    Raises:
        DataError: If there is no such split, or its images are not what they should be.
    """
    found = find_layout(path)
    name = {_TRAIN: found.train, "test": found.test}.get(split, split)
    if split == "heldout" or name is None:
        data = load_image_training(path, section, holdout)
        return data.heldout if split == "heldout" else _standing_in(data.heldout)
    known = None if name == found.train else _training_classes(found, section)
    images = found.read(name, View(section), known)
    if known is not None:
        _check_classes(known, images)
    return images


def _training_classes(found: _Found, section: ImagesSection) -> tuple[str, ...] | None:
    """Classes of the training images, None where there are none: a folder with the validation split alone."""
    source = found.splits.get(found.train)
    if source is None:
        return None
    if isinstance(source, Path):
        return class_folders(source)  # listing all the images takes a while
    return found.read(found.train, View(section)).classes


def find_layout(path: str | Path) -> _Found:
    """Tell the layouts of large images apart by what is there; no image is read.

    Raises:
        DataError: If there is none, or more than one.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        got = "a file" if root.exists() else "nothing"
        raise DataError(explain("no data folder", expected=f"a folder with {_LAYOUTS}", got=got, where=str(root)))
    folders = _find_folders(root)
    # the search for parquet files would walk through all class folders
    parquet = _find_parquet(root) if folders is None or any(root.glob("*.parquet")) else None
    found = [layout for layout in (folders, parquet, _find_tars(root)) if layout is not None]
    if len(found) == 1:
        return found[0]
    entries = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    raise DataError(
        explain(
            "cannot tell which images to read" if found else "no images in this folder",
            expected=f"one of: {_LAYOUTS}",
            got=f"more than one of them: {entries}" if found else entries,
            where=str(root),
            fix="keep them in folders of their own" if found else "check the path",
        )
    )


def _find_folders(root: Path) -> _Found | None:
    splits = {name: root / name for name in (_TRAIN, *_TESTS) if _has_classes(root / name)}
    flat = [root / name for name in _TESTS if splits and _is_flat(root / name)]
    if flat and not set(splits) & set(_TESTS):
        splits[flat[0].name] = flat[0]  # reading it says that class folders are missing
    return _Found(root, splits, _load_folder) if splits else None


def _load_folder(root: Path, folder: Path, view: View, classes: Any) -> FolderImages:
    return load_folder(folder, view)


def _has_classes(folder: Path) -> bool:
    return folder.is_dir() and any(p.is_dir() for p in folder.iterdir())


def _is_flat(folder: Path) -> bool:
    return folder.is_dir() and any(p.suffix.lower() in (".jpg", ".jpeg", ".png") for p in folder.iterdir())


def _find_parquet(root: Path) -> _Found | None:
    splits = {name: find_split(root, name) for name in known_splits(root)}
    return _Found(root, splits, load_parquet_shards) if splits else None


def _find_tars(root: Path) -> _Found | None:
    """Group the tar files here and one folder below by the split that their own or their folder's name says."""
    splits: dict[str, list[Path]] = {}
    for file in sorted([*root.glob("*.tar"), *root.glob("*/*.tar")]):
        word = _WORD.search(file.stem) or _WORD.search(file.parent.name if file.parent != root else "")
        splits.setdefault(word[1] if word else "data", []).append(file)
    return _Found(root, splits, load_tar_shards) if splits else None


def _check_classes(known: tuple[str, ...], test: LargeImages) -> None:
    if known == test.classes:
        return
    lacking, more = sorted(set(known) - set(test.classes)), sorted(set(test.classes) - set(known))
    parts = [f"{word} {', '.join(names[:4])}" for word, names in (("lacks", lacking), ("has also", more)) if names]
    raise DataError(
        explain(
            "training and test images have different classes",
            expected=f"the {len(known)} classes of the training images",
            got="; ".join(parts) or "the same classes in another order",
            where=test.source,
        )
    )


def _split(whole: Any, holdout: int) -> tuple[Any, Any]:
    if isinstance(whole, FolderImages):
        return split_holdout(whole, holdout, HOLDOUT_SEED)
    at = len(whole) - holdout
    if at < 1:
        raise holdout_error(whole, holdout, f"a whole number from 1 to {len(whole) - 1}")
    train = whole.between(0, at, f"{whole.source}, without the last {holdout:,} images")
    return train, whole.between(at, len(whole), f"{whole.source}, the last {holdout:,} images")


def _classes_left_out(train: LargeImages) -> list[str]:
    counts = np.bincount(np.asarray(train.labels), minlength=len(train.classes))
    return [train.classes[i] for i in np.flatnonzero(counts == 0)]


def _left_out_error(train: LargeImages, classes: list[str]) -> DataError:
    return DataError(
        explain(
            "classes are left without a training image",
            expected="every class before the last images, which are held out",
            got=f"{len(classes)} classes without one: {', '.join(classes[:4])}",
            where=train.source,
            fix="shuffle the images before they are written to shards, or lower data.holdout",
        )
    )


def _standing_in(heldout: Any) -> Any:
    return replace(heldout, source=f"{heldout.source}, standing in for a test split that is not there")


def same_classes(known: Sequence[str], images: LargeImages) -> bool:
    """Say whether a model's classes are those of a set; numbers stand for any names."""
    numbers = tuple(map(str, range(len(known))))
    return len(known) == len(images.classes) and (
        tuple(known) in (images.classes, numbers) or images.classes == numbers
    )
