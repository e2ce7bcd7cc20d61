"""Two processes that train together, started by torchrun and by Lightning: the same as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import quiet, rank_free_recipe
from safetensors.torch import load_file
from two_processes import Keep

from epitorch.errors import DataError, InputError
from epitorch.results import load_results
from epitorch.training.run import train

SCRIPT = str(Path(__file__).parent / "two_processes.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# float32; one process sums a batch of 128 images, two sum 64 each and add: the same numbers to rounding
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def start(out: Path, launcher: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    kept = ("PATH", "HOME", "PYTHONPATH", "EPITORCH_CACHE", "TMPDIR", "LANG")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return subprocess.run(
        [sys.executable, *launcher, SCRIPT, str(out), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )


def alone(out: Path, **options: Any) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(
            rank_free_recipe(**options), "digits", out, accelerator="cpu", console=quiet(), callbacks=[Keep(out)]
        )
    finally:
        torch.set_num_threads(threads)


def kept(out: Path, rank: int) -> dict[str, Any]:
    return torch.load(out.with_suffix(f".rank{rank}.pt"), weights_only=True)


TORCHRUN_CASE: dict[str, Any] = {
    "index": "learner",
    "peak_lr": 0.03,
    "start_lr": 1.0,
    "epitome": {"freeze_last_epochs": 1},
}
LIGHTNING_CASE: dict[str, Any] = {
    "index": "direct",
    "peak_lr": 0.03,
    "start_lr": 0.3,
    "accumulate": 2,
    "ema_decay": 0.8,
}


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("torchrun") / "two"
    done = start(out, TORCHRUN, **TORCHRUN_CASE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("accuracy") == 2  # both have the result, one writes it
    return out


def assert_equals_one_process(out: Path, folder: Path, options: dict[str, Any]) -> None:
    """The two processes' run in `out` against one process's."""
    first, second = kept(out, 0), kept(out, 1)
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)  # routing maps too
    assert any("routing_map" in name for name in first["state"])
    expected, single = alone(folder / "one", **options), kept(folder / "one", 0)
    torch.testing.assert_close(torch.cat([first["first"], second["first"]]), single["first"], rtol=0, atol=0)
    torch.testing.assert_close(first["state"], single["state"], **TOLERANCE)
    (result,) = load_results(out / "results.json")
    assert result.environment["processes"] == 2
    assert result.loss["train"] == pytest.approx(expected.loss["train"], rel=1e-4)
    assert result.accuracy.heldout == pytest.approx(expected.accuracy.heldout, abs=0.011)  # one of 100 images
    final = load_file(out / "checkpoint" / "model.safetensors")
    torch.testing.assert_close(final, load_file(folder / "one" / "checkpoint" / "model.safetensors"), **TOLERANCE)


def test_torchrun_gives_the_single_process_result(by_torchrun: Path, tmp_path: Path) -> None:
    assert_equals_one_process(by_torchrun, tmp_path, TORCHRUN_CASE)


def test_half_of_each_batch_would_show(by_torchrun: Path, tmp_path: Path) -> None:
    """The negative control of the tolerance."""
    alone(tmp_path / "half", **{**TORCHRUN_CASE, "batch_size": 64})
    half, two = kept(tmp_path / "half", 0)["state"], kept(by_torchrun, 0)["state"]
    assert not torch.allclose(half["conv2.epitome"], two["conv2.epitome"], rtol=1e-2, atol=1e-3)
    assert not torch.allclose(
        half["conv2.routing_map.out_starts"], two["conv2.routing_map.out_starts"], rtol=1e-3, atol=1e-4
    )


def test_lightning_s_own_launcher_gives_the_single_process_result(tmp_path: Path) -> None:
    done = start(tmp_path / "two", [], devices=2, **LIGHTNING_CASE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_equals_one_process(tmp_path / "two", tmp_path, LIGHTNING_CASE)


def test_two_processes_go_on_where_they_were_ended(by_torchrun: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    assert start(out, TORCHRUN, kill=14, **TORCHRUN_CASE).returncode != 0
    assert (out / "lightning" / "last.ckpt").is_file()
    assert not (out / "results.json").exists()
    done = start(out, TORCHRUN, **TORCHRUN_CASE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "goes on with the unfinished run" in (out / "train.log").read_text()
    for rank in range(2):
        torch.testing.assert_close(kept(out, rank)["state"], kept(by_torchrun, rank)["state"], rtol=0, atol=0)
    (result,), (whole,) = (load_results(folder / "results.json") for folder in (out, by_torchrun))
    assert result.loss["heldout"] == whole.loss["heldout"]
    assert result.loss["train"] == pytest.approx(whole.loss["train"], rel=1e-6)  # summed in another order


# ---- refused ----


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a multiple of the 3 processes"):
        train(rank_free_recipe(), "digits", tmp_path / "out", accelerator="cpu", devices=3, console=quiet())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"devices": -1}, {"nodes": -2}])
def test_numbers_of_processes_out_of_range(options: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not valid"):
        train(rank_free_recipe(), "digits", tmp_path / "out", accelerator="cpu", console=quiet(), **options)  # type: ignore[arg-type]
