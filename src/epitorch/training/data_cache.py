"""A cache of decoded images: one plain `.npz` file per content, checked when read, replaced in one step."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from epitorch._files import cache_dir

log = logging.getLogger(__name__)

_DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile)


def content_key(files: Iterable[Path], version: str) -> str:
    """Return a key that changes with any byte of the files, with their order and with the version.

    Args:
        files: Files whose content the cached value is made of; their names and dates do not count.
        version: Names everything else that the value depends on, the decoder for one.

    Raises:
        OSError: If a file cannot be read.
    """
    key = hashlib.sha256(version.encode())
    for file in files:
        with file.open("rb") as stream:
            key.update(hashlib.file_digest(stream, "sha256").digest())
    return key.hexdigest()[:32]


def read_entry(key: str) -> np.ndarray | None:
    """Return the cached array, or None where there is none or it is damaged."""
    try:
        file = _entry(key)
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as entry:
            images, digest = entry["images"], entry["digest"]
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        return None
    except _DAMAGED as error:
        log.info("cache entry %s cannot be read and is made anew (%s)", file, error)
        return None
    if digest.tobytes() != _digest(images):
        log.info("cache entry %s is damaged and is made anew", file)
        return None
    return images


def write_entry(key: str, images: np.ndarray) -> None:
    """Store an array; where the folder cannot be written this only logs a line.

    The file appears under its name when it is complete, so that a run cut short leaves no half of it.
    """
    try:
        _write(_entry(key), images)
    except (OSError, RuntimeError) as error:
        log.info("decoded images are not cached: %s", error)


def _write(file: Path, images: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, images=images, digest=np.frombuffer(_digest(images), np.uint8))
        os.replace(name, file)
    except BaseException:  # Ctrl-C as well must not leave the temporary file
        with suppress(OSError):
            os.unlink(name)
        raise


def _entry(key: str) -> Path:
    """File of a key; RuntimeError, from `expanduser`, where there is no home folder."""
    return cache_dir().expanduser() / f"images-{key}.npz"


def _digest(images: np.ndarray) -> bytes:
    """Checksum over type, shape and every byte."""
    digest = hashlib.sha256(f"{images.dtype.str}{images.shape}".encode())
    digest.update(np.ascontiguousarray(images).data.cast("B"))
    return digest.digest()
