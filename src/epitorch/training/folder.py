"""The folder of a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from epitorch._files import write_atomic
from epitorch.errors import InputError, explain

RESULTS, CHECKPOINT, LOGS, LIGHTNING, LOG = "results.json", "checkpoint", "logs", "lightning", "train.log"
STATE = "lightning/last.ckpt"
RUN = "run.json"
STARTS = "starts.json"

_OURS = (RESULTS, LOG, CHECKPOINT, LOGS, LIGHTNING, RUN, STARTS)


@dataclass(frozen=True)
class Identity:
    """What an unfinished run must have in common with a new one that is to go on with it."""

    recipe_sha256: str
    seed: int
    max_steps: int | None
    data: str
    fold: int | None = None


def unfinished(out: Path, identity: Identity, overwrite: bool) -> bool:
    """Say whether the folder holds an unfinished run of this identity, to go on with or, without a state, to repeat.

    Raises:
        InputError: If the folder cannot be written, or holds something else that may not be replaced.
    """
    same = not overwrite and not os.path.lexists(out / RESULTS) and _began(out) == asdict(identity)
    refuse_used(out, overwrite or same)
    return same


def begin(out: Path, identity: Identity) -> None:
    """Write down which run this folder is for."""
    write_atomic(out / RUN, (json.dumps(asdict(identity), indent=1) + "\n").encode())


def _began(out: Path) -> object:
    try:
        return json.loads((out / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def refuse_used(out: Path, overwrite: bool) -> None:
    """Raise InputError if the folder cannot be written, or holds results or a checkpoint that may not be replaced."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        got = "no permission to write" if existing.is_dir() else "a file"
        raise InputError(
            explain(f"cannot write to the output {out}", expected="a folder", got=f"{got}: {existing}", where="--out")
        )
    used = [out / name for name in _OURS if os.path.lexists(out / name)]
    if used and not overwrite:
        raise InputError(
            explain(
                "this folder has an earlier run",
                expected=f"a folder without {', '.join(_OURS)}, or an unfinished run of this recipe, fold, seed, data",
                got=", ".join(map(str, used)),
                fix="choose another folder, or pass --overwrite (overwrite=True)",
            )
        )


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Make the folder; inside, no other run may write into it.

    Raises:
        InputError: If another run is at work there, or the folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            explain("cannot make the output folder", expected="a folder that can be made", got=error, where=str(out))
        ) from error
    lock = FileLock(out / ".lock", timeout=0)  # the system lets go of it when the process ends, however it ends
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(
            explain(
                "another run is at work in this folder",
                expected="a folder of its own for each run",
                got=str(out),
                fix="wait for it to end, or choose another folder",
            )
        ) from error
    try:
        yield
    finally:
        lock.release()


def clear(out: Path) -> None:
    """Remove what an earlier run left in the folder."""
    # results.json goes first: no moment shows it beside files of the new run
    for name in _OURS:
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
