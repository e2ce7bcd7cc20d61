"""Which parquet files make up a split, in the layouts that the Hugging Face hub uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epitorch.errors import DataError, explain, require, suggest

_NAME = re.compile(r"(?P<split>[\w.-]+?)(-(?P<index>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?)?\.parquet")
_NUMBERED = re.compile(r"\d+\.parquet")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what pyarrow and the system raise into a DataError that names the file or folder."""
    arrow = require("pyarrow", "train")
    try:
        yield
    except (OSError, arrow.ArrowException) as error:
        folder = path.is_dir()
        raise DataError(
            explain(
                "cannot be read",
                expected="a folder that may be listed" if folder else "a whole, readable parquet file",
                got=" ".join(str(error).split()) or type(error).__name__,
                where=str(path),
                fix="check its permissions" if folder else "fetch the file again: it may be half-written",
            )
        ) from error


def has_parquet(folder: Path) -> bool:
    """Whether a folder holds any split in one of the layouts."""
    with reading(folder):
        return bool(known_splits(folder))


def find_split(folder: Path, split: str) -> list[Path]:
    """Return the files of a split, shards in order.

    Raises:
        DataError: If there are none, a shard is missing or more than one choice fits.
    """
    files = locate(folder, split)
    if not files:
        known = known_splits(folder)
        raise DataError(
            explain(
                f"no split '{split}'{suggest(split, known)}",
                expected=f"{split}.parquet or {split}-00000-of-0000N.parquet here, in data/ or a subfolder",
                got=f"splits {', '.join(known)}" if known else "no parquet file of a split",
                where=str(folder),
            )
        )
    return files


def locate(folder: Path, split: str) -> list[Path]:
    """Return the files of a split as `find_split` does, an empty list where there are none."""
    with reading(folder):
        levels = _levels(folder)
    for level in levels:
        found = [files for files in (_split_files(place, split) for place in level) if files]
        if len(found) > 1:
            places = ", ".join(str(files[0].parent) for files in found)
            raise _ambiguous(folder, split, places, "give the subfolder itself as the path")
        if found:
            return _check_shards(folder, split, found[0])
    return []


def _levels(folder: Path) -> list[list[Path]]:
    """Folders to search; the first level that has the split wins."""
    below = sorted(p for p in folder.iterdir() if p.is_dir())
    data = [p for p in below if p.name == "data"]
    return [[folder], data, [p for p in below if p not in data]]


def _split_files(place: Path, split: str) -> list[Path]:
    """Files of a split right in `place`, or numbered in a folder that has the split's name."""
    matches = ((p, _NAME.fullmatch(p.name)) for p in place.glob("*.parquet"))
    named = sorted(p for p, match in matches if match and match["split"] == split)
    numbered = (p for p in (place / split).glob("*.parquet") if _NUMBERED.fullmatch(p.name))
    return named or sorted(numbered, key=lambda p: int(p.stem))


def _check_shards(folder: Path, split: str, files: list[Path]) -> list[Path]:
    """Refuse a set of shards with a gap, or a whole file beside shards."""
    matches = [match for file in files if (match := _NAME.fullmatch(file.name))]
    if _NUMBERED.fullmatch(files[0].name):
        return files
    indices = {int(match["index"] or 0) for match in matches}
    counts = {match["count"] for match in matches}
    if len(counts) > 1 or len(indices) < len(files):
        raise _ambiguous(folder, split, ", ".join(f.name for f in files), "keep one set of files per split")
    count = counts.pop()
    missing = sorted(set(range(int(count or 1))) - indices)
    if missing:
        raise DataError(
            explain(
                f"split '{split}' lacks a shard",
                expected=f"{split}-{missing[0]:05d}-of-{count}.parquet",
                got=f"{len(files)} of {int(count)} shards",
                where=str(files[0].parent),
                fix="fetch the missing files",
            )
        )
    return files


def _ambiguous(folder: Path, split: str, got: str, fix: str) -> DataError:
    return DataError(
        explain(
            f"more than one choice of files for split '{split}'",
            expected="one file or one set of shards",
            got=got,
            where=str(folder),
            fix=fix,
        )
    )


def known_splits(folder: Path) -> list[str]:
    """Names of all splits that `locate` could find."""
    places = [place for level in _levels(folder) for place in level]
    matches = (_NAME.fullmatch(p.name) for place in places for p in place.glob("*.parquet"))
    named = {match["split"] for match in matches if match}
    numbered = {p.parent.name for place in places for p in place.glob("*/*.parquet") if _NUMBERED.fullmatch(p.name)}
    return sorted({name for name in named if not name.isdigit()} | numbered)
