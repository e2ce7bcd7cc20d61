"""The folder of a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from epitorch.errors import InputError, explain

RESULTS, CHECKPOINT, LOGS, LIGHTNING, LOG = "results.json", "checkpoint", "logs", "lightning", "train.log"

_OURS = (RESULTS, LOG, CHECKPOINT, LOGS, LIGHTNING)


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
                expected=f"a folder without {', '.join(_OURS)}",
                got=", ".join(map(str, used)),
                fix="choose another folder, or pass --overwrite (overwrite=True)",
            )
        )


def clear(out: Path) -> None:
    """Make the folder and remove what an earlier run left in it."""
    # results.json goes first: no moment shows it beside files of the new run
    for name in _OURS:
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            explain("cannot make the output folder", expected="a folder that can be made", got=error, where=str(out))
        ) from error
