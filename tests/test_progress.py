"""What slow tasks say on standard error, and when they say nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epitorch import deploy
from epitorch.bench import bench
from epitorch.nn import EpitomeLinear
from epitorch.progress import progress


def clock(*seconds: float) -> Any:
    """A clock that shows these, one after the other."""
    values: Iterator[float] = iter(seconds)
    return lambda: next(values)


def test_nothing_in_the_first_two_seconds_then_a_line_every_five(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("task", clock=clock(10, 11.9, 12, 16.9, 17.1)) as say:
        for text in "abcd":
            say(text)
    got = capsys.readouterr()
    assert got.err == "task: b (2 s)\ntask: d (7 s)\n"
    assert got.out == ""


def test_silence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress("task", show=False, clock=clock(0, 9)) as say:
        say("a")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", None)  # a program without a console
    with progress("task", clock=clock(0, 9)) as say:
        say("a")


def on_a_terminal(code: str, *blocked: str) -> str:
    """What a program writes to standard error if that is a terminal; `blocked` modules are not there."""
    main, other = pty.openpty()
    hide = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}));"
    if blocked:
        hide += "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n in sys.modules and"
        hide += " sys.modules[n] is None else f(n, *a);"
    subprocess.run([sys.executable, "-c", hide + code], stderr=other, check=True, stdout=subprocess.DEVNULL)
    os.close(other)
    seen = os.read(main, 100_000).decode()
    os.close(main)
    return seen


TASK = """
from epitorch.progress import progress
times = iter([0, 3, 4, 5])
with progress("task", clock=lambda: next(times)) as say:
    for text in ("[b]one[/b]", "two", "three"):
        say(text)
"""


@pytest.mark.skipif(not Path("/dev/ptmx").exists(), reason="no pseudo-terminals")
def test_on_a_terminal_one_line_changes_in_place() -> None:
    pytest.importorskip("rich")
    seen = on_a_terminal(TASK)
    assert "task: [b]one[/b]" in seen
    assert "task: three" in seen
    assert "\x1b[" in seen


@pytest.mark.skipif(not Path("/dev/ptmx").exists(), reason="no pseudo-terminals")
def test_a_terminal_without_rich_gets_lines() -> None:
    assert on_a_terminal(TASK, "rich").splitlines() == ["task: [b]one[/b] (3 s)"]


def test_deploy_and_bench_say_what_they_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epitorch.progress.QUIET_SECONDS", -1.0)
    monkeypatch.setattr("epitorch.progress.LINE_SECONDS", -1.0)
    layer, x = EpitomeLinear(8, 64, epitome_shape=(8, 8)).eval(), torch.randn(2, 8)
    deploy(layer, x, "auto")
    said = capsys.readouterr().err
    assert "deploy: timing layer 1 of 1" in said
    assert "deploy: making network 2 of 3, folded" in said
    bench({"one": layer}, x, runtimes=("torch",), rounds=1, memory=False)
    said = capsys.readouterr().err
    assert "bench: one in torch, batch 1: timing layer 1 of 1" in said
    assert "bench: all in torch, batch 1: timing 1 rounds" in said
    deploy(layer, x, "auto", progress=False)
    bench({"one": layer}, x, runtimes=("torch",), rounds=1, memory=False, progress=False)
    assert capsys.readouterr().err == ""
