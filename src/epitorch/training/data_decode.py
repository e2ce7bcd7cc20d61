"""JPEG and PNG images from bytes or files into one uint8 array."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from epitorch.errors import DataError, explain, require

_FORMATS = ("JPEG", "PNG")
# Modes that convert("RGB") maps faithfully; the 16-bit and float modes it would clip.
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
_CHUNK = 128  # images per job of the pool


@dataclass(frozen=True)
class EncodedBatch:
    """Consecutive rows of one file, not decoded yet.

    Args:
        values: Each `{"bytes": ..., "path": ...}` as in a Hugging Face image column; None for a missing one.
        file: The file they come from.
        first_row: Row of `values[0]` in the file, from 0.
        folders: Where a row without bytes looks for its `path`, in this order.
    """

    values: Sequence[Mapping[str, Any] | None]
    file: Path
    first_row: int
    folders: tuple[Path, ...]

    def where(self, i: int) -> str:
        """File and row of `values[i]`, for messages."""
        return f"{self.file}, row {self.first_row + i}"

    def cut(self, start: int, stop: int) -> EncodedBatch:
        """Return the rows `start` to `stop` of this batch."""
        return EncodedBatch(self.values[start:stop], self.file, self.first_row + start, self.folders)


@dataclass(frozen=True)
class DecodedImages:
    """The pixels, and whether all of them came from the batches themselves.

    Args:
        images: shape: (N, 3, H, W), uint8.
        embedded: False when some row only named a file of its own.
    """

    images: np.ndarray
    embedded: bool


def decode_batches(batches: Iterable[EncodedBatch], total: int) -> DecodedImages:
    """Decode rows into one array, a few threads at a time (the codecs let go of the interpreter lock).

    Args:
        batches: All rows, in order, at least one.
        total: Their number, N.

    Raises:
        DataError: If an image is missing, broken or of another size than the first; names file and row.
    """
    images, at, embedded = None, 0, True
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for batch in batches:
            if images is None:
                height, width = decode_row(batch, 0).shape[:2]
                images = np.empty((total, 3, height, width), np.uint8)
            target = images[at : at + len(batch.values)]
            starts = range(0, len(batch.values), _CHUNK)
            jobs = [(target[s : s + _CHUNK], batch.cut(s, s + _CHUNK)) for s in starts]
            embedded &= all(list(pool.map(_fill, *zip(*jobs, strict=True))))
            at += len(batch.values)
    if images is None or at != total:
        raise DataError(explain("images and labels differ in number", expected=f"{total} images", got=str(at)))
    return DecodedImages(images, embedded)


def _fill(target: np.ndarray, batch: EncodedBatch) -> bool:
    """Decode into `target`, shape (n, 3, H, W); return whether every image was embedded."""
    for i in range(len(batch.values)):
        pixels = decode_row(batch, i)
        if pixels.shape[:2] != target.shape[2:]:
            raise DataError(
                explain(
                    "images of different sizes",
                    expected=f"{_size(target.shape[2:])} pixels, as the first image",
                    got=f"{_size(pixels.shape[:2])} pixels",
                    where=batch.where(i),
                    fix="resize the images before training",
                )
            )
        target[i] = pixels.transpose(2, 0, 1)
    return all((value or {}).get("bytes") is not None for value in batch.values)


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}x{shape[1]}"


def decode_row(batch: EncodedBatch, i: int) -> np.ndarray:
    """Decode one image of a batch.

    Returns:
        shape: (H, W, 3), uint8, RGB.

    Raises:
        DataError: If it is missing, broken or neither JPEG nor PNG.
    """
    image_module = require("PIL.Image", "train")
    data = row_bytes(batch, i)
    try:
        with image_module.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.mode not in _MODES:
                raise ValueError(f"pixels of mode {image.mode}")
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # a broken stream makes the codecs raise nearly anything
        raise DataError(
            explain(
                "an image cannot be decoded",
                expected="a whole JPEG or PNG image of 8 bits per channel",
                got=f"{len(data)} bytes: {what_pillow_said(error)}",
                where=batch.where(i),
                fix="fetch the file again",
            )
        ) from error


def what_pillow_said(error: Exception) -> str:
    """The message without the address of the buffer that the image was in."""
    return re.sub(r" <_io\.BytesIO object at 0x[0-9a-f]+>", "", str(error)) or type(error).__name__


def row_bytes(batch: EncodedBatch, i: int) -> bytes:
    """Return an encoded image of a batch, read from the file that its row names where it holds none itself.

    Raises:
        DataError: If there is neither.
    """
    value = batch.values[i] or {}
    data, path = value.get("bytes"), value.get("path")
    if data is not None:
        return data
    if not path:
        raise DataError(
            explain(
                "a row without an image",
                expected="the image's bytes, or the path of its file",
                got="neither",
                where=batch.where(i),
            )
        )
    return _file_bytes(batch, i, str(path))


def _file_bytes(batch: EncodedBatch, i: int, path: str) -> bytes:
    """Read the file that a row names; only below the data set's own folders."""
    for folder in batch.folders:
        file = Path(os.path.normpath(folder / path))
        if file.is_relative_to(os.path.normpath(folder)) and file.is_file():
            try:
                return file.read_bytes()
            except OSError as error:
                raise DataError(
                    explain(
                        f"cannot read the image {file}",
                        expected="a readable file",
                        got=str(error),
                        where=batch.where(i),
                    )
                ) from error
    raise DataError(
        explain(
            "the image that a row names is missing",
            expected=f"a file below {' or '.join(map(str, batch.folders))}",
            got=path,
            where=batch.where(i),
        )
    )
