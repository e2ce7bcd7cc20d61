"""What a Ray task does: start the process of a run, wait for it, stop it when the task is cancelled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from epitorch.sweeps.jobs import busy

GRACE = 60.0  # seconds for a run to write its state after SIGTERM
POLL = 0.2
STOPPED = 128 + signal.SIGTERM
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def execute(command: Sequence[str], folder: str, log: str, directory: str, threads: int) -> int:
    """Make one run in a process of its own.

    Args:
        command: Arguments of `epitorch`.
        folder: Of the run; if another process is at work there, its end is waited for.
        log: File for what the run prints; it is appended to.
        directory: To work in: the paths are seen from there, as are those in recipes.
        threads: For arithmetic.

    Returns:
        The exit code, negative if a signal ended it.
    """
    stop = stop_file(Path(directory, folder))
    while busy(Path(directory, folder)) and not stop.exists():
        time.sleep(POLL)
    if stop.exists():
        return STOPPED
    # Ray may work from another folder and with another search path than the process that asks
    places = dict.fromkeys(os.path.abspath(path) for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    environment.update(dict.fromkeys(_THREADS, str(threads)))
    call = [sys.executable, "-m", "epitorch.sweeps.child", str(os.getpid()), *command]
    with Path(directory, log).open("ab") as file:
        # a session of its own: Ctrl-C in the terminal reaches the sweep alone, which then stops its runs in order
        process = subprocess.Popen(
            call,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not stop.exists():
                time.sleep(POLL)
        finally:
            _stop(process)
    return process.returncode


def stop_file(folder: Path) -> Path:
    """Return the file beside a run's folder that asks all runs there to stop.

    Cancelling a task in Ray is not enough: one that is just starting misses it.
    """
    return folder.parent / ".stop"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
