"""The folder of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

from epitorch.errors import InputError, explain

RESULTS, CHECKPOINT, LOGS, LIGHTNING, LOG = "results.json", "checkpoint", "logs", "lightning", "train.log"


def refuse_used(out: Path, overwrite: bool) -> None:
    """Raise InputError if the folder holds results that may not be replaced, or is no folder."""
    if out.exists() and not out.is_dir():
        raise InputError(explain("the output is not a folder", expected="a folder", got="a file", where=str(out)))
    if (out / RESULTS).exists() and not overwrite:
        raise InputError(
            explain(
                "this folder has results already",
                expected=f"a folder without {RESULTS}",
                got=str(out / RESULTS),
                fix="choose another folder, or pass --overwrite (overwrite=True)",
            )
        )


def clear(out: Path) -> None:
    """Make the folder and remove what an earlier run left in it."""
    # results.json goes first: no moment shows it beside files of the new run
    for name in (RESULTS, LOG, CHECKPOINT, LOGS, LIGHTNING):
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
