"""Alternating measurement on a clock that the test moves."""

from __future__ import annotations

import pytest
import torch

from epitorch.errors import InputError
from epitorch.timing import Ratio, Times, alternate, torch_threads


class Machine:
    """Tasks that take a set time each, on a clock of its own; the whole machine may slow down."""

    def __init__(self) -> None:
        self.now, self.slowness, self.log = 0.0, 1.0, []  # type: ignore[var-annotated]

    def clock(self) -> float:
        return self.now

    def task(self, name: str, seconds: float):  # type: ignore[no-untyped-def]
        def run() -> None:
            self.log.append(name)
            self.now += seconds * self.slowness

        return run


def test_tasks_take_turns_and_short_ones_repeat() -> None:
    machine = Machine()
    tasks = {"slow": machine.task("s", 4.0), "fast": machine.task("f", 0.5)}
    times = alternate(tasks, rounds=2, warmup=1, least=1.0, clock=machine.clock)
    assert machine.log == ["s", "f", *["s", "f", "f"] * 2]
    assert times == {"slow": Times((4.0, 4.0)), "fast": Times((0.5, 0.5))}


def test_a_slow_spell_of_the_machine_leaves_the_ratio_alone() -> None:
    machine = Machine()
    slow_down = iter([1.0, 1.0, 5.0, 1.0])

    def first() -> None:
        machine.slowness = next(slow_down)
        machine.task("a", 1.0)()

    times = alternate({"a": first, "b": machine.task("b", 2.0)}, rounds=3, warmup=1, least=0, clock=machine.clock)
    assert times["a"].seconds == (1.0, 5.0, 1.0)
    assert times["a"].speedup_over(times["b"]) == Ratio((2.0, 2.0, 2.0))
    assert times["b"].speedup_over(times["a"]).median == 0.5


def test_median_and_quartiles() -> None:
    assert Times((5.0, 1.0, 3.0, 2.0, 4.0)).median == 3.0
    assert Times((5.0, 1.0, 3.0, 2.0, 4.0)).quartiles == (2.0, 4.0)
    assert Ratio((2.0,)).quartiles == (2.0, 2.0)


@pytest.mark.parametrize("options", [{"rounds": 0}, {"warmup": 0}])
def test_no_round_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="too few rounds"):
        alternate({"a": list}, **options)


def fail_with_threads(count: int) -> None:
    with torch_threads(count):
        raise KeyError(torch.get_num_threads())


def test_the_number_of_threads_comes_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError) as caught:
        fail_with_threads(before + 1)
    assert caught.value.args == (before + 1,)
    assert torch.get_num_threads() == before
