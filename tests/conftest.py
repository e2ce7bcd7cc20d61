"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("contract")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same seed and leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def global_state_kept() -> Iterator[None]:
    """The library leaves the default dtype, the thread count and grad mode alone."""
    before = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    yield
    assert (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()) == before


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoded images of test data do not go to the user's cache."""
    before = os.environ.get("EPITORCH_CACHE")
    os.environ["EPITORCH_CACHE"] = before or str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["EPITORCH_CACHE"]


@pytest.fixture(scope="session")
def cifar10_dir() -> Path:
    """CIFAR-10 as parquet: `$EPITORCH_DATA/cifar10`, else `shared/data/cifar10` beside the repository."""
    root = os.environ.get("EPITORCH_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(root) / "cifar10"
    if not folder.is_dir():
        pytest.skip(f"no CIFAR-10 at {folder}; set EPITORCH_DATA to the folder that holds cifar10/")
    return folder


@pytest.fixture(scope="session")
def esc10_dir() -> Path:
    """ESC-10 in the layout of ESC-50: `$EPITORCH_DATA/esc10`, else `shared/data/esc10` beside the repository."""
    root = os.environ.get("EPITORCH_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(root) / "esc10"
    if not folder.is_dir():
        pytest.skip(f"no ESC-10 at {folder}; set EPITORCH_DATA to the folder that holds esc10/")
    return folder


@pytest.fixture(scope="session")
def imagenet_sample_dir() -> Path:
    """1,000 images of ImageNet: `$EPITORCH_DATA/imagenet1k-sample`, else `shared/data/...` beside the repository."""
    root = os.environ.get("EPITORCH_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(root) / "imagenet1k-sample"
    if not folder.is_dir():
        pytest.skip(f"no sample of ImageNet at {folder}; set EPITORCH_DATA to the folder that holds imagenet1k-sample/")
    return folder
