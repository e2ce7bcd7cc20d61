"""Sounds laid out exactly as ESC-50, generated small: a tone per class with noise."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile

# ESC-50's own numbers and names of ESC-10's classes
NAMES = "dog rooster rain sea_waves crackling_fire crying_baby sneezing clock_tick helicopter chainsaw"
ESC10 = dict(zip((0, 1, 10, 11, 12, 20, 21, 38, 40, 41), NAMES.split(), strict=True))
COLUMNS = ["filename", "fold", "target", "category", "esc10", "src_file", "take"]
Row = dict[str, object]


def tone(target: int, seconds: float, rate: int, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 0.02, round(seconds * rate))
    time = np.arange(len(noise)) / rate
    return (0.4 * np.sin(2 * np.pi * (150 + 37 * target) * time) + noise).astype(np.float32)


def clip_rows(folds: int, clips: int, classes: dict[int, str], suffix: str) -> list[Row]:
    """`clips` of each class in each fold; the first two of a class and fold are takes of one recording."""
    rows: list[Row] = []
    for fold in range(1, folds + 1):
        for target, category in classes.items():
            for clip in range(clips):
                source, take = str(1000 * fold + 10 * target + max(clip - 1, 0)), "AB"[clip == 1]
                name = f"{fold}-{source}-{take}-{target}.{suffix}"
                flag = str(target in ESC10)
                rows.append(dict(zip(COLUMNS, (name, fold, target, category, flag, source, take), strict=True)))
    return rows


def write_table(folder: Path, rows: Sequence[Row], columns: Sequence[str] = COLUMNS) -> Path:
    file = folder / "meta" / "esc50.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(columns), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_sounds(
    folder: Path,
    *,
    folds: int = 2,
    clips: int = 3,
    classes: dict[int, str] | None = None,
    seconds: float = 0.5,
    rate: int = 8000,
    suffix: str = "wav",
) -> list[Row]:
    """Write a whole data set; return the rows of its table."""
    rows = clip_rows(folds, clips, ESC10 if classes is None else classes, suffix)
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    for seed, row in enumerate(rows):
        soundfile.write(
            folder / "audio" / str(row["filename"]), tone(int(str(row["target"])), seconds, rate, seed), rate
        )
    write_table(folder, rows)
    return rows
