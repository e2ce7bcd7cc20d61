"""Time several tasks side by side: A B C, A B C, ... so that what the machine does meanwhile meets all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from epitorch.errors import InputError, explain

Clock = Callable[[], float]


def busy_clock(threads: int) -> Clock:
    """The clock that other processes disturb least: this process's processor time, for one thread; else the wall's."""
    return time.process_time if threads == 1 else time.perf_counter


@dataclass(frozen=True)
class Times:
    """Of one task, one entry for each round.

    Args:
        seconds: Of one call.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """In seconds."""
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """In seconds; the same twice where there is one round."""
        return _quartiles(self.seconds)

    def speedup_over(self, other: Times) -> Ratio:
        """How many times faster than `other`, round by round: both ran one after the other."""
        return Ratio(tuple(b / a for a, b in zip(self.seconds, other.seconds, strict=True)))


@dataclass(frozen=True)
class Ratio:
    """Ratios of two tasks, one for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure."""
        return median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Its spread."""
        return _quartiles(self.rounds)


def _quartiles(values: tuple[float, ...]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=4, method="inclusive")
    return cuts[0], cuts[2]


def alternate(
    tasks: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    warmup: int = 3,
    least: float = 0.002,
    clock: Clock = time.perf_counter,
) -> dict[str, Times]:
    """Run the tasks in turn, `rounds` times.

    A task that takes less than `least` is called several times in a row in each round, as often as the slowest
    warm-up call says, and the mean counts.

    Args:
        tasks: By name.
        rounds: How often each is timed, at least 1.
        warmup: Calls of each before, at least 1.
        least: Seconds that one measurement should take.
        clock: Seconds since some moment.

    Returns:
        Times by name, in the order of `tasks`.

    Raises:
        InputError: If a number is too small.
    """
    if rounds < 1 or warmup < 1:
        raise InputError(explain("too few rounds", expected="at least 1", got=f"rounds={rounds}, warmup={warmup}"))
    calls = {}
    for name, task in tasks.items():
        first = [_mean_of(task, 1, clock) for _ in range(warmup)][-1]
        calls[name] = max(1, round(least / max(first, 1e-9)))
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            found[name].append(_mean_of(task, calls[name], clock))
    return {name: Times(tuple(seconds)) for name, seconds in found.items()}


def _mean_of(task: Callable[[], object], calls: int, clock: Clock) -> float:
    begun = clock()
    for _ in range(calls):
        task()
    return (clock() - begun) / calls


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads, and put the old number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
