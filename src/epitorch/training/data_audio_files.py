"""The files of an ESC-50 folder: the table, and its sounds as equally long mono clips of one rate, cached."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from epitorch.errors import DataError, explain, require
from epitorch.training.data_cache import content_key, read_entry, write_entry

log = logging.getLogger(__name__)

TABLE = Path("meta") / "esc50.csv"
AUDIO = "audio"
COLUMNS = ("filename", "fold", "target", "category", "esc10", "src_file")

_OGG_PAGE = 65_307  # bytes in the largest page
_OGG_LAST = 4  # flag of a stream's last page


@dataclass(frozen=True)
class ClipRow:
    """One line of the table.

    Args:
        filename: In `audio/`.
        fold: Of the cross-validation.
        target: ESC-50's class number.
        category: Name of the class.
        esc10: The clip is part of ESC-10.
        src_file: The recording that it was cut from.
        where: File and line, for messages.
    """

    filename: str
    fold: int
    target: int
    category: str
    esc10: bool
    src_file: str
    where: str


def read_table(folder: Path, *, esc10: bool) -> list[ClipRow]:
    """Read `meta/esc50.csv` and make sure that the sounds are there.

    Args:
        folder: The data set.
        esc10: Only the rows of ESC-10.

    Raises:
        DataError: If the table or a sound is missing, a column is missing, or a value is wrong; names file and line.
    """
    path = folder / TABLE
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise DataError(
            explain("no table of the clips", expected=f"{TABLE} and {AUDIO}/", got=got, where=str(path))
        ) from error
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or [])]
    if missing:
        raise DataError(
            explain(
                "the table lacks a column",
                expected=", ".join(COLUMNS),
                got=", ".join(reader.fieldnames or []) or "an empty file",
                where=str(path),
            )
        )
    rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(reader, start=2)]
    _check_once(rows)
    chosen = [row for row in rows if row.esc10 or not esc10]
    if not chosen:
        wanted = "clips of ESC-10" if esc10 else "clips"
        raise DataError(explain(f"the table has no {wanted}", expected="some", got="none", where=str(path)))
    _check_there(folder, chosen, rows)
    return chosen


def _row(line: dict[str, Any], where: str) -> ClipRow:
    try:
        flag = {"true": True, "false": False}[line["esc10"].strip().lower()]
        numbers = int(line["fold"]), int(line["target"])
        names = [line[key].strip() for key in ("filename", "category", "src_file")]
    except (ValueError, KeyError, AttributeError) as error:
        raise _bad_row(line, where) from error
    # a name with a folder in it could lead out of the data set
    if not all(names) or Path(names[0]).name != names[0] or min(numbers) < 0:
        raise _bad_row(line, where)
    return ClipRow(names[0], *numbers, names[1], flag, names[2], where)


def _bad_row(line: dict[str, Any], where: str) -> DataError:
    expected = "filename, whole numbers from 0 in fold and target, category, True or False in esc10, src_file"
    got = ", ".join(f"{key}={line.get(key)!r}" for key in COLUMNS)
    return DataError(explain("a line of the table cannot be read", expected=expected, got=got, where=where))


def _check_once(rows: Sequence[ClipRow]) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.filename in seen:
            raise DataError(
                explain("a clip is listed twice", expected="each file once", got=row.filename, where=row.where)
            )
        seen.add(row.filename)


def _check_there(folder: Path, chosen: Sequence[ClipRow], rows: Sequence[ClipRow]) -> None:
    lost = [row for row in chosen if not (folder / AUDIO / row.filename).is_file()]
    if not lost:
        return
    small = [row for row in rows if row.esc10]
    only_esc10 = small and all((folder / AUDIO / row.filename).is_file() for row in small)
    raise DataError(
        explain(
            f"{len(lost)} of {len(chosen)} clips are missing",
            expected=str(folder / AUDIO / lost[0].filename),
            got="no such file",
            where=lost[0].where,
            fix="set sound.subset: esc10, whose clips are all there" if only_esc10 else "fetch the data set again",
        )
    )


def read_clips(folder: Path, rows: Sequence[ClipRow], rate: int, seconds: float) -> np.ndarray:
    """Return the clips in the order of the rows, from the cache if they are there.

    Args:
        folder: The data set.
        rows: Which clips.
        rate: Samples per second to resample to.
        seconds: Length of each: the rest of a longer clip is cut off, a shorter one is filled up with zeros.

    Returns:
        shape: (N, 1, round(rate * seconds)), int16.

    Raises:
        DataError: If a file cannot be decoded, was cut short, or has no samples.
        MissingExtraError: If soundfile or soxr is not installed.
    """
    soundfile, soxr = require("soundfile", "audio"), require("soxr", "audio")
    files = [folder / AUDIO / row.filename for row in rows]
    made_by = f"soundfile {soundfile.__libsndfile_version__}, soxr {version('soxr')}"
    key = content_key(files, f"clips of {seconds} s at {rate} Hz, {made_by}, form 1")
    cached = read_entry(key)
    if cached is not None:
        return cached
    log.info("decoding %d clips", len(files))
    clips = np.zeros((len(files), 1, round(rate * seconds)), np.int16)
    for clip, file in zip(clips, files, strict=True):
        mono, own_rate = _decode(file, soundfile)
        wave = soxr.resample(mono, own_rate, rate)[: clips.shape[2]]  # its default quality, HQ
        # what lies beyond full scale is clipped, as a sound card would
        clip[0, : len(wave)] = np.clip(np.rint(wave * 32768), -32768, 32767)
    write_entry(key, clips)
    return clips


def _decode(file: Path, soundfile: Any) -> tuple[np.ndarray, int]:
    """Return the mean of the channels, shape (samples,) float32, and the rate."""
    with _reading(file, soundfile), soundfile.SoundFile(file) as sound:
        promised, rate = sound.frames, sound.samplerate
        samples = sound.read(dtype="float32", always_2d=True)
    if _cut_short(file):
        raise _damaged(file, f"a file cut short after {len(samples) / rate:.2f} seconds")
    if len(samples) != promised or not len(samples):
        raise _damaged(file, f"{len(samples):,} of {promised:,} samples could be decoded")
    if not np.isfinite(samples).all():
        raise _damaged(file, "samples that are not numbers")
    return samples.mean(1), rate


@contextmanager
def _reading(file: Path, soundfile: Any) -> Iterator[None]:
    try:
        yield
    except (soundfile.SoundFileError, OSError, RuntimeError) as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, got: str) -> DataError:
    return DataError(explain("a sound is damaged", expected="Ogg, WAV or FLAC with samples", got=got, where=str(file)))


def _cut_short(file: Path) -> bool:
    """Say whether the end of an Ogg or WAV file is missing, which the decoder passes over in silence."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        kind, length = stream.read(4), int.from_bytes(stream.read(4), "little")
        if kind == b"RIFF":
            return length + 8 > size
        if kind != b"OggS":
            return False
        stream.seek(max(0, size - _OGG_PAGE))
        tail = stream.read()
    page = tail[tail.rfind(b"OggS") :]
    segments = page[26] if len(page) > 26 else 0
    whole = 27 + segments + sum(page[27 : 27 + segments])
    return not (len(page) >= whole > 27 and page[5] & _OGG_LAST)
