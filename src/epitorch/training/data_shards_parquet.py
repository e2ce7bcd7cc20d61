"""Parquet files as shards: the columns of image classification, streamed by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from epitorch.training.data_decode import EncodedBatch, row_bytes
from epitorch.training.data_files import reading
from epitorch.training.data_parquet import (
    LABEL_COLUMN,
    check_range,
    class_names,
    dense_count,
    image_column,
    open_parquet,
    read_labels,
)
from epitorch.training.data_shards import Sample, ShardImages, Span, spans_of
from epitorch.training.data_views import View

_ROWS = 32  # read at once: a few megabytes of encoded images


def load_parquet_shards(
    root: Path, files: list[Path], view: View, classes: tuple[str, ...] | None = None
) -> ShardImages:
    """Read the labels of a split, and nothing of its images.

    Args:
        root: The data set's folder.
        files: Of the split, in order.
        view: What becomes of each image.
        classes: Of the training images, which these have where the files name none.

    Raises:
        DataError: If a file cannot be read, or a label is missing or out of range; names file and row.
    """
    labels = [read_labels(file) for file in files]
    names = class_names(files)
    count = len(names) if names else dense_count(labels) if classes is None else len(classes)
    for file, values in zip(files, labels, strict=True):
        check_range(file, values, count, named=names is not None or classes is not None)
    return ShardImages(
        root,
        spans_of(files, [_row_groups(file) for file in files]),
        np.concatenate(labels),
        names or (tuple(map(str, range(count))) if classes is None else classes),
        f"parquet {root}, {len(files)} files",
        view,
        read_parquet,
    )


def _row_groups(file: Path) -> list[int]:
    with reading(file), open_parquet(file) as parquet:
        groups = parquet.metadata
        return [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]


def read_parquet(span: Span, root: Path) -> Iterator[Sample]:
    """Yield the images of a span; only the row groups in which they lie are read.

    Raises:
        DataError: If the file cannot be read, or a row has no image; names file and row.
    """
    # pyarrow's errors are reported here, not those of whoever takes the images
    for batch, labels in _reported(span, root):
        for i, label in enumerate(labels):
            row = batch.first_row + i
            if span.first <= row < span.stop:
                yield Sample(row_bytes(batch, i), label, batch.where(i), span.number + row - span.first)


def _reported(span: Span, root: Path) -> Iterator[tuple[EncodedBatch, list[int]]]:
    batches = _row_batches(span, root)
    while True:
        with reading(span.file):
            found = next(batches, None)
        if found is None:
            return
        yield found


def _row_batches(span: Span, root: Path) -> Iterator[tuple[EncodedBatch, list[int]]]:
    with open_parquet(span.file) as parquet:
        column = image_column(parquet.schema_arrow.names)
        row = 0
        for group in range(parquet.metadata.num_row_groups):
            end = row + parquet.metadata.row_group(group).num_rows
            if row < span.stop and span.first < end:
                for batch in parquet.iter_batches(
                    _ROWS, row_groups=[group], columns=[column, LABEL_COLUMN], use_threads=False
                ):
                    if row < span.stop and span.first < row + batch.num_rows:
                        values, labels = batch.column(column).to_pylist(), batch.column(LABEL_COLUMN).to_pylist()
                        yield EncodedBatch(values, span.file, row, (span.file.parent, root)), labels
                    row += batch.num_rows
            row = end
