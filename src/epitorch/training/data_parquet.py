"""Image classification data in parquet files, laid out as the Hugging Face hub does."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epitorch.errors import DataError, explain, require
from epitorch.training.data_arrays import ImageArrays
from epitorch.training.data_cache import content_key, read_entry, write_entry
from epitorch.training.data_decode import EncodedBatch, decode_batches
from epitorch.training.data_files import find_split, locate, reading

log = logging.getLogger(__name__)

CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMN = "label"

_ROWS = 2048  # rows read at once


def load_parquet(folder: Path, split: str) -> ImageArrays:
    """Read one split of a folder of parquet files; `load_images` describes the layouts.

    Raises:
        DataError: If something is missing, damaged or not what it should be; names the file and the row.
    """
    files = find_split(folder, split)
    labels = [read_labels(file) for file in files]
    total = sum(map(len, labels))
    if total == 0:
        raise DataError(
            explain(
                f"split '{split}' is empty",
                expected="at least one row",
                got="0 rows",
                where=", ".join(map(str, files)),
            )
        )
    names = class_names(files)
    count = len(names) if names else dense_count(_reference_labels(folder, split, labels))
    for file, values in zip(files, labels, strict=True):
        check_range(file, values, count, named=names is not None)
    images = _pixels(folder, files, total)
    return ImageArrays(
        torch.from_numpy(images),
        torch.from_numpy(np.concatenate(labels)),
        names or _default_names(count, images.shape),
        f"parquet {folder}, split {split}",
    )


def open_parquet(file: Path) -> Any:
    """Return pyarrow's reader of a file; a context manager."""
    return require("pyarrow.parquet", "train").ParquetFile(file)


def read_labels(file: Path) -> np.ndarray:
    """Return the label column after checking the columns, shape: (rows,), int64."""
    with reading(file), open_parquet(file) as parquet:
        _check_columns(file, parquet.schema_arrow)
        column = parquet.read([LABEL_COLUMN]).column(0)
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy())[0])
            raise label_error(file, row, "null", "a whole number")
        return column.to_numpy().astype(np.int64)


def label_error(file: Path, row: int, got: object, expected: str) -> DataError:
    """Return the error for a label that cannot be used."""
    return DataError(
        explain(
            "a label is missing or out of range",
            expected=expected,
            got=f"label {got}",
            where=f"{file}, row {row}",
        )
    )


def _check_columns(file: Path, schema: Any) -> None:
    types = require("pyarrow.types", "train")
    image = image_column(schema.names)
    good_image = image is not None and types.is_struct(schema.field(image).type)
    good_label = LABEL_COLUMN in schema.names and types.is_integer(schema.field(LABEL_COLUMN).type)
    repeated = [name for name, n in Counter(schema.names).items() if n > 1]
    if not good_image or not good_label or repeated:
        found = ", ".join(f"'{field.name}' ({field.type})" for field in schema) or "none"
        raise DataError(
            explain(
                "the columns are not those of image classification",
                expected="'img' or 'image' (struct<bytes, path>) and 'label' (integer), each once",
                got=f"columns {found}",
                where=str(file),
            )
        )


def image_column(names: Sequence[str]) -> str | None:
    """Return the name of the column that holds the images."""
    return next((name for name in IMAGE_COLUMNS if name in names), None)


def _pixels(folder: Path, files: list[Path], total: int) -> np.ndarray:
    """Return the decoded images from the cache or the files, shape: (N, 3, H, W), uint8."""
    pillow = require("PIL", "train")
    with reading(files[0]):
        key = content_key(files, f"rgb-1 pillow-{pillow.__version__}")
    images = read_entry(key)
    if images is None:
        log.info("decoding %d images of %s", total, files[0].parent)
        decoded = decode_batches(_encoded(folder, files), total)
        images = decoded.images
        if decoded.embedded:  # else the key does not cover the files that the rows name
            write_entry(key, images)
    return images


def _encoded(folder: Path, files: list[Path]) -> Iterator[EncodedBatch]:
    for file in files:
        row = 0
        with reading(file), open_parquet(file) as parquet:
            column = image_column(parquet.schema_arrow.names)
            for batch in parquet.iter_batches(_ROWS, columns=[column]):
                values = batch.column(0).to_pylist()
                if values:
                    yield EncodedBatch(values, file, row, (file.parent, folder))
                row += len(values)


# Classes


def class_names(files: list[Path]) -> tuple[str, ...] | None:
    """Class names from the `huggingface` metadata, None where it has none; every shard must agree."""
    names = [_names_of(file) for file in files]
    for file, other in zip(files, names, strict=True):
        if other != names[0]:
            raise DataError(
                explain(
                    "the shards name different classes",
                    expected=f"the names of {files[0].name}: {names[0]}",
                    got=str(other),
                    where=str(file),
                )
            )
    return names[0]


def _names_of(file: Path) -> tuple[str, ...] | None:
    with reading(file), open_parquet(file) as parquet:
        metadata = parquet.schema_arrow.metadata or {}
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = features.get(LABEL_COLUMN, {}).get("names")
    except (ValueError, AttributeError) as error:
        raise DataError(
            explain(
                "the 'huggingface' metadata cannot be read",
                expected="a JSON object with info.features",
                got=str(error),
                where=str(file),
            )
        ) from error
    return tuple(map(str, names)) if isinstance(names, list) and names else None


def check_range(file: Path, labels: np.ndarray, count: int, *, named: bool) -> None:
    """Raise DataError for the first label that is none of `count` classes."""
    bad = np.flatnonzero((labels < 0) | (labels >= count))
    if len(bad):
        without_gap = f"classes 0, 1, 2, ... without a gap: no image has class {count}"
        expected = f"a class from 0 to {count - 1}" if named else without_gap
        raise label_error(file, int(bad[0]), labels[bad[0]], expected)


def _reference_labels(folder: Path, split: str, labels: list[np.ndarray]) -> list[np.ndarray]:
    """Labels that say how many classes there are: the training split's, as a test split may lack some."""
    if split == "train":
        return labels
    return [read_labels(file) for file in locate(folder, "train")] or labels


def dense_count(labels: list[np.ndarray]) -> int:
    """Length of the unbroken run 0, 1, 2, ... among the labels."""
    known = np.unique(np.concatenate(labels))
    known = known[known >= 0]
    return int((known == np.arange(len(known))).sum())


def _default_names(count: int, shape: tuple[int, ...]) -> tuple[str, ...]:
    """CIFAR-10's names for ten classes of 32x32 images, else the numbers."""
    if count == len(CIFAR10_CLASSES) and shape[2:] == (32, 32):
        return CIFAR10_CLASSES
    return tuple(map(str, range(count)))
