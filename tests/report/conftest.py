"""A few tiny runs on the digits, trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_cases import train_tiny


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs dense, narrow and epitome (two epochs, learned starts)."""
    folder = tmp_path_factory.mktemp("runs")
    epitome: dict[str, Any] = {
        "index": "learner",
        "layers": {
            "conv2": {"epitome_shape": [4, 4, 3, 3]},
            "conv3": {"epitome_shape": [8, 4, 4, 4], "spatial_starts": "out"},
        },
    }
    train_tiny("tiny/dense", [8, 8, 16], None, folder / "dense")
    train_tiny("tiny/narrow", [4, 4, 8], None, folder / "narrow")
    train_tiny("tiny/epitome", [8, 8, 16], epitome, folder / "epitome")
    return folder
