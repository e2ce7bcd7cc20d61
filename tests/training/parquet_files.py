"""Parquet files as the hub lays them out, generated small."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def pixels(n: int, seed: int = 0, size: tuple[int, ...] = (32, 32, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *size), np.uint8)


def encode(image: np.ndarray, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, kind)
    return stream.getvalue()


def cells(images: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    return [{"bytes": encode(image), "path": f"{i}.png"} for i, image in enumerate(images)]


def write(
    file: Path,
    images: Sequence[Any],
    labels: Sequence[Any],
    *,
    column: str = "img",
    names: list[str] | None = None,
    metadata: bytes | None = None,
    row_group_size: int = 3,
) -> Path:
    """Write a parquet file as the hub has it; `images` are arrays or ready cells."""
    ready = images if images and isinstance(images[0], dict | None) else cells(images)
    table = pa.table({column: pa.array(ready, IMAGE), "label": pa.array(labels, pa.int64())})
    if names is not None:
        features = {column: {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        metadata = json.dumps({"info": {"features": features}}).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table.replace_schema_metadata({b"huggingface": metadata} if metadata else None),
        file,
        row_group_size=row_group_size,
    )
    return file


def as_written(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
