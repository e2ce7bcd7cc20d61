"""Say on standard error how far a slow task is: nothing in the first two seconds, then what is being done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO

Say = Callable[[str], None]
QUIET_SECONDS = 2.0
LINE_SECONDS = 5.0


def say_nothing(text: str) -> None:
    """For tasks whose progress nobody asked for."""


@contextmanager
def progress(what: str, show: bool = True, clock: Callable[[], float] = time.monotonic) -> Iterator[Say]:
    """Give a function to say what is being done now.

    On a terminal one line changes in place and goes in the end, where `rich` is installed; elsewhere there is a line
    at most every five seconds. Everything is written when something is said: no thread runs beside, which would count
    as processor time of what is being measured.

    Args:
        what: The task.
        show: False says nothing.
        clock: Seconds since some moment.
    """
    if not show or sys.stderr is None:
        yield say_nothing
        return
    view = _InPlace(what) if sys.stderr.isatty() and find_spec("rich") else _Lines(what, sys.stderr)
    begun = clock()

    def say(text: str) -> None:
        seconds = clock() - begun
        if seconds >= QUIET_SECONDS:
            view.show(text, seconds)

    try:
        yield say
    finally:
        view.close()


class _Lines:
    """For files, pipes and terminals without `rich`."""

    def __init__(self, what: str, stream: TextIO) -> None:
        self.what, self.stream = what, stream
        self.last = -LINE_SECONDS

    def show(self, text: str, seconds: float) -> None:
        if seconds - self.last >= LINE_SECONDS:
            self.last = seconds
            print(f"{self.what}: {text} ({seconds:.0f} s)", file=self.stream, flush=True)

    def close(self) -> None:
        """Lines stay."""


class _InPlace:
    """One line of `rich` on a terminal."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.shown: Any = None
        self.task: Any = None

    def show(self, text: str, seconds: float) -> None:
        if self.shown is None:
            self._start()
        self.shown.update(self.task, description=f"{self.what}: {text}")
        self.shown.refresh()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        self.shown = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self.shown.start()
        self.task = self.shown.add_task("", total=None)

    def close(self) -> None:
        if self.shown is not None:
            self.shown.stop()
