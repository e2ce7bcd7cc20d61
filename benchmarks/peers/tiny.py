"""Tiny generated data sets in the layouts of the real ones: colours, tones and noise."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from epitorch.errors import require

_CLASSES = 10


def tiny_images(folder: Path, *, size: int = 32, train: int = 256, test: int = 96) -> Path:
    """Write train.parquet and test.parquet: images of a colour for each class, with noise."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, n in (("train", train), ("test", test)):
        _write(folder / f"{split}.parquet", "img", *_drawn(n, size, seed=n))
    return folder


def tiny_sample(file: Path, *, n: int = 40, size: int = 256) -> Path:
    """Write one parquet file with the columns image and label."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, "image", *_drawn(n, size, seed=n))
    return file


def _drawn(n: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = np.arange(n) % _CLASSES
    colours = np.random.default_rng(0).integers(40, 216, (_CLASSES, 3))
    noise = random.integers(-40, 40, (n, size, size, 3))
    return (colours[labels][:, None, None] + noise).clip(0, 255).astype(np.uint8), labels


def _write(file: Path, column: str, images: np.ndarray, labels: np.ndarray) -> None:
    arrow: Any = require("pyarrow", "train")
    parquet: Any = require("pyarrow.parquet", "train")
    rows = [{"bytes": _png(image), "path": None} for image in images]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    parquet.write_table(arrow.table({column: arrow.array(rows, kind), "label": arrow.array(labels)}), file)


def _png(image: np.ndarray) -> bytes:
    pillow: Any = require("PIL.Image", "train")
    stream = io.BytesIO()
    pillow.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def tiny_sounds(folder: Path, *, rate: int = 8000, seconds: float = 0.5) -> Path:
    """Write meta/esc50.csv and audio/: a tone for each of ESC-10's classes, five folds of three clips each."""
    sound: Any = require("soundfile", "audio")
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    (folder / "meta").mkdir(exist_ok=True)
    columns = ["filename", "fold", "target", "category", "esc10", "src_file", "take"]
    random = np.random.default_rng(0)
    time = np.arange(round(seconds * rate)) / rate
    with (folder / "meta" / "esc50.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(columns)
        for number, (fold, target, _) in enumerate(np.ndindex(5, _CLASSES, 3)):
            name = f"{fold + 1}-{number}-A-{target}.wav"
            tone = 0.4 * np.sin(2 * np.pi * (150 + 37 * target) * time) + random.normal(0, 0.02, len(time))
            sound.write(folder / "audio" / name, tone.astype(np.float32), rate)
            table.writerow([name, fold + 1, target, f"class{target}", "True", number, "A"])
    return folder
