"""The folder of a checkpoint: three files that change together.

The weights and the card are first written beside their places. Renaming the new `config.json` into place is the
moment at which the new checkpoint holds: it carries the hash of the file of weights, and a reader takes the file of
that hash, in its place or waiting beside it. So at every moment the folder is the old checkpoint or the new, whole.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path

from epitorch._files import write_atomic
from epitorch.checkpoint._build import first
from epitorch.checkpoint._config import MAX_BYTES, config_from_bytes, damaged
from epitorch.checkpoint._data import CARD, CONFIG, FILES, WEIGHTS, CheckpointConfig, Stored
from epitorch.errors import CheckpointError, InputError, explain

_TRIES = 3  # another process may be saving


def waiting(folder: Path, name: str) -> Path:
    """Where a file waits until its configuration is in place."""
    return folder / f".{name}.next"


def write(folder: Path, *, weights: bytes, config: bytes, card: str) -> None:
    """Replace the checkpoint in a folder, whole; other files there are left alone."""
    write_atomic(waiting(folder, WEIGHTS), weights)
    write_atomic(waiting(folder, CARD), card.encode())
    write_atomic(folder / CONFIG, config)
    finish(folder)


def check_free(folder: Path) -> None:
    """Raise InputError if the folder is a file, or files of a checkpoint's names in it are something else's."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputError(explain("a model cannot be saved here", expected="a folder", got=f"a file: {there}"))
    taken = [name for name in FILES if os.path.lexists(folder / name)]
    if taken and not _is_ours(folder / CONFIG):
        raise InputError(
            explain(
                "saving here would replace other files",
                expected="a new folder, or one with an older checkpoint",
                got=", ".join(taken),
                where=str(folder),
                fix="choose another folder, or take these files away",
            )
        )


def _is_ours(config: Path) -> bool:
    try:
        content = json.loads(config.read_bytes()) if config.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"format", "model"} <= set(content)


def finish(folder: Path) -> None:
    """Move files that wait to their places, and remove what a killed save left."""
    for name in (WEIGHTS, CARD):
        if waiting(folder, name).exists():
            os.replace(waiting(folder, name), folder / name)
    for name in FILES:
        for left in folder.glob(f".*{name}.*tmp"):
            left.unlink(missing_ok=True)


def named(source: str | Path) -> Path:
    """The path that was given; `Path("")` would be the working folder.

    Raises:
        CheckpointError: If there is no name.
    """
    if isinstance(source, str) and not source.strip():
        raise CheckpointError(explain("the checkpoint has no name", expected="a folder", got=repr(source)))
    return Path(source)


def inner(path: Path) -> Path:
    """The folder itself, or `checkpoint/` in the folder of a run."""
    below = path / "checkpoint"
    return below if not (path / CONFIG).exists() and below.is_dir() else path


def read(folder: Path) -> tuple[CheckpointConfig, Stored | None, bytes]:
    """Read configuration and weights that belong together.

    Raises:
        CheckpointError: If a file is missing or damaged, or the weights are not those of the configuration.
    """
    for attempt in range(_TRIES):
        text = _bytes(folder / CONFIG, MAX_BYTES)
        config, stored = config_from_bytes(text, folder / CONFIG)
        try:
            return config, stored, _weights(folder, stored)
        except CheckpointError:
            if attempt == _TRIES - 1 or _bytes(folder / CONFIG, MAX_BYTES) == text:
                raise  # nobody has changed the folder meanwhile
    raise damaged(folder, "files that change all the time")


def _weights(folder: Path, stored: Stored | None) -> bytes:
    path = folder / WEIGHTS
    if stored is None:
        return _bytes(path)
    for candidate in (waiting(folder, WEIGHTS), path):
        if candidate.is_file() and candidate.stat().st_size == stored.bytes:
            data = candidate.read_bytes()
            if sha256(data).hexdigest() == stored.sha256:
                return data
    _check_there(path)
    got = f"{path.stat().st_size:,} bytes, not those whose hash {CONFIG} states"
    raise damaged(path, got, f"the {stored.bytes:,} bytes that belong to {CONFIG}")


def _bytes(path: Path, limit: int | None = None) -> bytes:
    _check_there(path)
    if limit is not None and path.stat().st_size > limit:
        raise damaged(path, f"{path.stat().st_size:,} bytes", f"at most {limit:,}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _no_folder(path: Path) -> str:
    return "a file" if path.is_file() else "no such folder"


def _check_there(path: Path) -> None:
    if path.is_file():
        return
    there = first(sorted(p.name for p in path.parent.iterdir())) if path.parent.is_dir() else _no_folder(path.parent)
    raise CheckpointError(
        explain(
            f"there is no checkpoint here: {path.name} is missing",
            expected=f"a folder with {CONFIG} and {WEIGHTS}",
            got=there or "an empty folder",
            where=str(path.parent),
        )
    )
