"""Images in class folders, read one by one while training."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from epitorch.errors import DataError, explain, require
from epitorch.training.data_views import View


@dataclass(frozen=True, eq=False)
class FolderImages:
    """Images of one split, each a file.

    Args:
        root: Folder of the class folders.
        files: Path of each below `root`, shape: (N,), bytes: one block of memory that worker processes share.
        labels: shape: (N,), int64.
        classes: Name of each class.
        source: Where they come from, for logs and results.
        view: What becomes of each.
    """

    root: Path
    files: np.ndarray = field(repr=False)
    labels: Tensor = field(repr=False)
    classes: tuple[str, ...]
    source: str
    view: View

    def __len__(self) -> int:
        return len(self.files)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """`(3, H, W)` of every image that is given."""
        return self.view.shape

    def select(self, index: Tensor, source: str) -> FolderImages:
        """Return the images of a mask or index, shape: (N,) booleans or (n,) integers."""
        return replace(self, files=self.files[index.numpy()], labels=self.labels[index], source=source)

    def read(self, number: int) -> Tensor:
        """Read an image.

        Returns:
            shape: (3, H, W), uint8.

        Raises:
            DataError: If the file cannot be read or decoded.
        """
        file = self.root / os.fsdecode(bytes(self.files[number]))
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(
                explain("an image cannot be read", expected="a readable file", got=error.strerror, where=str(file))
            ) from error
        return self.view(data, str(file))


def load_folder(root: Path, view: View) -> FolderImages:
    """List the images of a split, by torchvision's rules: class folders in order of their names.

    Raises:
        DataError: If there is no class folder, or one without an image.
    """
    folders = require("torchvision.datasets.folder", "models")
    classes = class_folders(root)
    indices = {name: index for index, name in enumerate(classes)}
    found = folders.make_dataset(str(root), indices, folders.IMG_EXTENSIONS, allow_empty=True)
    labels = np.array([label for _, label in found], dtype=np.int64)
    empty = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)
    if len(empty):
        raise DataError(
            explain(
                "a class folder has no image",
                expected=f"files that end in {', '.join(folders.IMG_EXTENSIONS)}",
                got=f"{len(empty)} of {len(classes)} class folders without one",
                where=str(root / classes[empty[0]]),
                fix="fetch the missing images, or remove the folder",
            )
        )
    files = np.array([os.fsencode(os.path.relpath(path, root)) for path, _ in found])
    return FolderImages(root, files, torch.from_numpy(labels), classes, f"image folder {root}", view)


def class_folders(root: Path) -> tuple[str, ...]:
    """Return the names of the class folders, in the order of the classes.

    Raises:
        DataError: If there are none, or the folder cannot be listed.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise DataError(
            explain("a folder cannot be listed", expected="a readable folder", got=error.strerror, where=str(root))
        ) from error
    if names:
        return tuple(names)
    raise DataError(
        explain(
            "no class folder",
            expected="one folder for each class, with its images",
            got="no folder",
            where=str(root),
            fix="sort the images into a folder for each class",
        )
    )
