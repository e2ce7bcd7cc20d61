"""What a sweep says while it works: a bar on a terminal, plain lines elsewhere; all on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Reporter:
    """Tells which runs begin and end, how many are left, and about how long they will take.

    Args:
        total: Runs of the sweep.
        before: Of these, the runs that were finished before.
        at_a_time: Asked when the time left is estimated.
        console: To write to.
        clock: In seconds.
    """

    def __init__(
        self,
        total: int,
        before: int,
        at_a_time: Callable[[], int],
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._ended, self._at_a_time, self._clock = total, before, at_a_time, clock
        self._console = console
        self._begun: dict[str, float] = {}
        self._took: list[float] = []
        self._bar: tuple[Progress, TaskID] | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar, where the console is a terminal."""
        self.say(f"{self._total} runs, {self._ended} finished before")
        if not self._console.is_terminal:
            yield
            return
        columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console, transient=True) as progress:
            self._bar = progress, progress.add_task("", total=self._total, completed=self._ended)
            try:
                yield
            finally:
                self._bar = None

    def say(self, line: str) -> None:
        """Print a line, with the time where it may go to a log."""
        stamp = "" if self._console.is_terminal else time.strftime("%Y-%m-%d %H:%M:%S ")
        self._console.print(f"{stamp}{line}", markup=False, highlight=False, soft_wrap=True)

    def begun(self, name: str) -> None:
        """A run begins."""
        self._begun[name] = self._clock()
        if self._bar is None:
            self.say(f"begun {name}")
        self._update()

    def ended(self, name: str, problem: str | None) -> None:
        """A run has ended, with what went wrong if something did."""
        took = self._clock() - self._begun.pop(name)
        self._ended += 1
        if problem is None:
            self._took.append(took)
        state = f"done {name} in {took:.0f} s" if problem is None else f"failed {name}: {problem}"
        self.say(f"{state}; {self._rest()}")
        self._update()

    def _rest(self) -> str:
        left = self._total - self._ended
        if not left or not self._took:
            return f"{left} left"
        at_a_time = min(self._at_a_time(), left)
        seconds = sum(self._took) / len(self._took) * left / at_a_time
        return f"{left} left, about {_duration(seconds)}"

    def _update(self) -> None:
        if self._bar is not None:
            progress, task = self._bar
            running = escape(", ".join(self._begun))
            progress.update(task, completed=self._ended, description=f"{self._rest()}; {running}")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
