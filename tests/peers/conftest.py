"""The comparison with peers is no package: it is imported from the repository's root."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.peers.tiny import tiny_images

    return tiny_images(tmp_path_factory.mktemp("tiny"), train=128, test=32)
