"""Sound classification data in the layout of ESC-50: folds, training and held-out clips, in memory.

The parts: `data_audio_files` (table and sounds read, resampled, cached), `data_audio_batches` (crops, gain,
normalisation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from epitorch.errors import DataError, explain
from epitorch.training.data_arrays import ImageArrays
from epitorch.training.data_audio_files import ClipRow, read_clips, read_table
from epitorch.training.recipe_sound import SoundSection

FULL_SCALE = 32768  # of int16


@dataclass(frozen=True, eq=False)
class SoundArrays(ImageArrays):
    """Clips of one length and rate; `images` holds the waveforms, shape (N, 1, samples), int16."""

    def __post_init__(self) -> None:
        self._check_images(3, torch.int16, "int16 of shape (N, 1, samples)")
        self._check_labels()

    @property
    def image_shape(self) -> tuple[int, ...]:
        """`(1, samples)` of every clip."""
        return tuple(self.images.shape[1:])


@dataclass(frozen=True)
class _Clips:
    """Rows of the table with the class number of each."""

    rows: Sequence[ClipRow]
    labels: Sequence[int]
    classes: tuple[str, ...]


def load_sounds(path: str | Path, split: str, section: SoundSection) -> SoundArrays:
    """Read one side of the cross-validation.

    Args:
        path: Folder with `meta/esc50.csv` and `audio/`.
        split: `test` is the section's fold, `train` all others.
        section: The recipe's `sound`.

    Returns:
        The clips in the order of the table. Classes are numbered 0, 1, ... in ascending order of ESC-50's own class
        numbers, and have the names of the table's `category`.

    Raises:
        DataError: If a file is missing or damaged (named), a fold or a class has no clip, or the table is wrong.
        MissingExtraError: If soundfile or soxr is not installed.
    """
    return _load(Path(path).expanduser(), split, section)[0]


def load_sound_training(path: str | Path, section: SoundSection, holdout: int) -> tuple[SoundArrays, SoundArrays]:
    """Read the training folds and hold clips out to choose by; the test fold's table is checked, its sounds not kept.

    All clips cut from one recording (`src_file`) stay on one side, so that a network cannot recognise the recording.
    Each class gives about the same number; the same arguments give the same parts.

    Args:
        path: As `load_sounds` takes it.
        section: The recipe's `sound`.
        holdout: About how many clips to hold out, at most.

    Returns:
        `(train, held_out)`.

    Raises:
        DataError: As `load_sounds`, and if nothing could be held out or a class would have nothing to train on.
    """
    folder = Path(path).expanduser()
    arrays, clips = _load(folder, "train", section)
    _rows_of(_table(folder, section), "test", section, folder)
    held = _held_out(clips, holdout, arrays.source)
    part = f"{int(held.sum())} clips held out by recording"
    return arrays.select(~held, f"{arrays.source}, without {part}"), arrays.select(held, f"{arrays.source}, {part}")


def find_sounds(path: str | Path, section: SoundSection) -> None:
    """Read the table of a data set of sounds and look for its clips, without reading them.

    Raises:
        DataError: If the data set, a clip or the fold is missing, or a line of the table cannot be read.
    """
    folder = Path(path).expanduser()
    table = _table(folder, section)
    for split in ("train", "test"):
        _rows_of(table, split, section, folder)


def _load(folder: Path, split: str, section: SoundSection) -> tuple[SoundArrays, _Clips]:
    if split not in ("train", "test"):
        raise DataError(explain(f"no split '{split}'", expected="train or test", got=repr(split), where=str(folder)))
    table = _table(folder, section)
    clips = _rows_of(table, split, section, folder)
    # all clips, whatever the fold: one cache entry serves every fold
    waves = read_clips(folder, table.rows, section.sample_rate, section.clip_seconds)
    place = {row.filename: i for i, row in enumerate(table.rows)}
    index = torch.tensor([place[row.filename] for row in clips.rows])
    sides = f"fold {section.fold}" if split == "test" else f"all folds but {section.fold}"
    source = f"sounds {folder}, {sides}, {section.sample_rate} Hz"
    return SoundArrays(torch.from_numpy(waves)[index], torch.tensor(clips.labels), clips.classes, source), clips


def _table(folder: Path, section: SoundSection) -> _Clips:
    rows = read_table(folder, esc10=section.subset == "esc10")
    names: dict[int, str] = {}
    for row in rows:
        if names.setdefault(row.target, row.category) != row.category:
            raise DataError(
                explain(
                    f"class {row.target} has two names",
                    expected=f"'{names[row.target]}', as in an earlier row",
                    got=f"'{row.category}'",
                    where=row.where,
                )
            )
    order = {target: i for i, target in enumerate(sorted(names))}
    return _Clips(rows, [order[row.target] for row in rows], tuple(names[target] for target in order))


def _rows_of(table: _Clips, split: str, section: SoundSection, folder: Path) -> _Clips:
    """The rows of one side; every class must be there on it."""
    folds = sorted({row.fold for row in table.rows})
    if section.fold not in folds or len(folds) < 2:
        raise DataError(
            explain(
                f"cannot test on fold {section.fold}",
                expected=f"one of at least two folds, here {', '.join(map(str, folds))}",
                got=section.fold,
                where=str(folder),
                fix="set sound.fold in the recipe, or --fold",
            )
        )
    pairs = zip(table.rows, table.labels, strict=True)
    kept = [(row, label) for row, label in pairs if (row.fold == section.fold) == (split == "test")]
    rows, labels = [row for row, _ in kept], [label for _, label in kept]
    missing = [name for label, name in enumerate(table.classes) if label not in set(labels)]
    if missing:
        raise DataError(
            explain(
                f"class '{missing[0]}' has no clip in the {split} folds",
                expected="at least one clip of each class",
                got=f"none of {', '.join(missing)}",
                where=f"{folder}, fold {section.fold} to test on",
            )
        )
    return _Clips(rows, labels, table.classes)


def _held_out(clips: _Clips, holdout: int, source: str) -> Tensor:
    """Mark whole recordings, class by class, as long as they fit into the class's share. shape: (N,), bool."""
    generator = torch.Generator().manual_seed(0)
    held = torch.zeros(len(clips.rows), dtype=torch.bool)
    for label, name in enumerate(clips.classes):
        members = [i for i, of in enumerate(clips.labels) if of == label]
        recordings = defaultdict(list)
        for i in members:
            recordings[clips.rows[i].src_file].append(i)
        room = min(holdout * (label + 1) // len(clips.classes) - holdout * label // len(clips.classes), len(members))
        names = sorted(recordings)
        for at in torch.randperm(len(names), generator=generator).tolist():
            taken = recordings[names[at]]
            if len(taken) <= room and len(taken) < len(members):
                held[taken] = True
                room -= len(taken)
        if held[members].all():
            raise _holdout_error(holdout, f"class '{name}' keeps none of its {len(members)} clips to train on", source)
    if not held.any():
        raise _holdout_error(holdout, "no recording fits into its class's share", source)
    return held


def _holdout_error(holdout: int, got: str, source: str) -> DataError:
    return DataError(
        explain(
            f"cannot hold out {holdout} clips",
            expected="a number that leaves each class clips on the training side, and gives some to the other",
            got=got,
            where=source,
            fix="change data.holdout",
        )
    )


def sound_stats(arrays: SoundArrays) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of all samples on the scale -1 to 1, each a tuple of one.

    Raises:
        DataError: If the clips are silent.
    """
    total, square, n = 0, 0, arrays.images.numel()
    for chunk in arrays.images.split(64):
        wide = chunk.to(torch.int64)
        total, square = total + int(wide.sum()), square + int(wide.square().sum())
    variance = n * square - total**2  # in Python integers: exact
    if not variance:
        raise DataError(
            explain("the clips cannot be normalised", expected="sound", got="one value only", where=arrays.source)
        )
    return (total / n / FULL_SCALE,), (variance**0.5 / n / FULL_SCALE,)
