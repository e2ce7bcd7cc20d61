"""Fixtures of the sweeps' tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweep_helpers import FakeCluster, write_sounds, write_tiny_recipes

from epitorch.sweeps import runner


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with tiny recipes; `digits` means the images, and to a recipe for sounds the folder."""
    write_tiny_recipes(tmp_path)
    write_sounds(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Takes Ray's place."""
    made = FakeCluster()
    monkeypatch.setattr(runner, "connected", made.connected)
    return made


@pytest.fixture(scope="session")
def local_ray() -> Iterator[Any]:
    """Ray on this machine, started once for all tests that need it."""
    ray = pytest.importorskip("ray")
    from epitorch.sweeps.cluster import Resources, connected

    before = signal.getsignal(signal.SIGTERM)
    with connected(Resources(jobs=2, cpus=1)) as made:
        yield made
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is before
