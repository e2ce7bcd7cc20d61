"""Tar files in WebDataset's form as shards: members `KEY.jpg` (or jpeg, png) and `KEY.cls` that follow each other."""

from __future__ import annotations

import hashlib
import logging
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from epitorch.errors import DataError, explain, require
from epitorch.training.data_cache import read_entry, write_entry
from epitorch.training.data_parquet import dense_count
from epitorch.training.data_shards import Sample, ShardImages, Span, spans_of
from epitorch.training.data_views import View

log = logging.getLogger(__name__)

_IMAGES = ("jpg", "jpeg", "png")
_CLASS = "cls"
_META = re.compile(r"__[^/]*__($|/)")  # what WebDataset's own reader passes over


def load_tar_shards(root: Path, files: list[Path], view: View, classes: tuple[str, ...] | None = None) -> ShardImages:
    """Read the classes of a split, and nothing of its images.

    They are kept in the cache: the headers of a large set take minutes to walk through.

    Args:
        root: The data set's folder.
        files: Of the split, in order.
        view: What becomes of each image.
        classes: Of the training images, which these have too; without them they are the numbers that occur.

    Raises:
        DataError: If a file cannot be read, or a member is missing or no class; names file and member.
    """
    labels = _labels(files)
    count = dense_count(labels) if classes is None else len(classes)
    for file, values in zip(files, labels, strict=True):
        _check_range(file, values, count)
    return ShardImages(
        root,
        spans_of(files, [[len(values)] for values in labels]),
        np.concatenate(labels),
        tuple(map(str, range(count))) if classes is None else classes,
        f"WebDataset {root}, {len(files)} files",
        view,
        read_tar,
    )


def read_tar(span: Span, root: Path) -> Iterator[Sample]:
    """Yield the images of a span; members before it are passed over.

    Raises:
        DataError: If the file cannot be read; names it and the member.
    """
    with _opened(span.file) as tar:
        for row, (key, image, cls) in enumerate(_samples(span.file, tar)):
            if row >= span.first:
                with _reported(span.file, key):
                    data, label = tar.extractfile(image).read(), tar.extractfile(cls).read()
                where, number = f"{span.file}, member {image.name}", span.number + row - span.first
                yield Sample(data, _class(span.file, key, label), where, number)
            if row + 1 == span.stop:
                return


def _labels(files: list[Path]) -> list[np.ndarray]:
    """Class of every image of every file, from the cache where the files are as they were."""
    key = _key(files)
    known = read_entry(key)
    if known is None:
        log.info("reading the classes of %d tar files below %s", len(files), files[0].parent)
        found = [_read_labels(file) for file in files]
        write_entry(key, np.concatenate([[len(values) for values in found], *found]).astype(np.int64))
        return found
    lengths, labels = known[: len(files)], known[len(files) :]
    return np.split(labels, np.cumsum(lengths)[:-1])


def _key(files: list[Path]) -> str:
    """Changes with the place, size or date of any file: contents would take as long as an epoch to read."""
    key = hashlib.sha256(b"webdataset-1")
    for file in files:
        status = file.stat()
        key.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return key.hexdigest()[:32]


def _read_labels(file: Path) -> np.ndarray:
    labels = []
    with _opened(file) as tar:
        for key, _, cls in _samples(file, tar):
            with _reported(file, key):
                text = tar.extractfile(cls).read()
            labels.append(_class(file, key, text))
    if labels:
        return np.array(labels, dtype=np.int64)
    raise DataError(explain("a shard is empty", expected="members KEY.jpg and KEY.cls", got="none", where=str(file)))


def _samples(file: Path, tar: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, image member and class member of every image, in order."""
    group_by_keys = require("webdataset.tariterators", "streaming").group_by_keys
    try:
        for sample in group_by_keys(_members(file, tar)):
            key = sample["__key__"]
            images = [sample[ext] for ext in _IMAGES if ext in sample]
            if len(images) != 1 or _CLASS not in sample:
                raise _incomplete(file, key, sample)
            yield key, images[0], sample[_CLASS]
    except ValueError as error:  # two members of one name
        if isinstance(error, DataError):
            raise
        raise DataError(
            explain("a shard cannot be used", expected="every member once", got=error.args[0], where=str(file))
        ) from error


def _members(file: Path, tar: Any) -> Iterator[dict[str, Any]]:
    """Yield the members with a key, in the form that WebDataset groups; contents are not read."""
    last = "the first member"
    while True:
        with _reported(file, f"after {last}"):
            member = tar.next()
        if member is None:
            _check_end(file, tar, last)
            return
        tar.members = []  # else it keeps the headers of the whole file
        last = member.name
        if member.isreg() and not _META.match(member.name) and "." in Path(member.name).name:
            yield {"fname": member.name, "data": member, "__url__": str(file)}


def _check_end(file: Path, tar: Any, last: str) -> None:
    """A file that was cut at a member's header looks whole to tarfile, but for the empty block that ends it."""
    if file.stat().st_size < tar.offset + tarfile.BLOCKSIZE:
        raise _unreadable(file, f"after {last}", "its end is missing")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with _reported(file, "its beginning"):
        tar = tarfile.open(file, "r:")  # noqa: SIM115  closed below
    with tar:
        yield tar


@contextmanager
def _reported(file: Path, place: str) -> Iterator[None]:
    """Turn what the system and tarfile raise into a DataError that names file and member."""
    try:
        yield
    except (OSError, tarfile.TarError) as error:
        raise _unreadable(file, place, str(error) or type(error).__name__) from error


def _unreadable(file: Path, place: str, got: str) -> DataError:
    return DataError(
        explain(
            "a shard cannot be read",
            expected="a whole, uncompressed tar file",
            got=got,
            where=f"{file}, member {place}",
            fix="fetch the file again: it may be half-written",
        )
    )


def _incomplete(file: Path, key: str, sample: dict[str, Any]) -> DataError:
    return DataError(
        explain(
            "members do not make an image and its class",
            expected=f"one of {', '.join(_IMAGES)}, and cls",
            got=", ".join(sorted(name for name in sample if not name.startswith("__"))) or "nothing",
            where=f"{file}, member {key}",
        )
    )


def _class(file: Path, key: str, text: bytes) -> int:
    if re.fullmatch(rb"\s*\d{1,9}\s*", text):
        return int(text)
    raise DataError(
        explain(
            "a class is not a number",
            expected="a whole number from 0",
            got=repr(text[:40]),
            where=f"{file}, member {key}.{_CLASS}",
        )
    )


def _check_range(file: Path, labels: np.ndarray, count: int) -> None:
    bad = np.flatnonzero(labels >= count)
    if not len(bad):
        return
    raise DataError(
        explain(
            "a label is out of range",
            expected=f"classes 0 to {count - 1} without a gap, as in the training images",
            got=f"class {labels[bad[0]]}",
            where=f"{file}, member {_name(file, int(bad[0]))}",
        )
    )


def _name(file: Path, row: int) -> str:
    with _opened(file) as tar:
        return next(f"{key}.{_CLASS}" for i, (key, _, _) in enumerate(_samples(file, tar)) if i == row)
