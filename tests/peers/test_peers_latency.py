"""Networks are timed side by side; one that cannot run is told and the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.peers import latency
from benchmarks.peers.jobs import RESULT, Job, jobs_of
from benchmarks.peers.parts import PARTS, smoke

import epitorch
from epitorch.errors import InputError
from epitorch.models.resolve import build_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters: the library's own tests see them


def finish(job: Job, *, network: bool = True) -> None:
    job.folder.mkdir(parents=True)
    (job.folder / RESULT).write_text(json.dumps({"identity": job.identity(), "status": "done"}))
    if network:
        torch.manual_seed(0)
        model = build_model("epitorch:resnet20", dict(job.part.arguments))
        epitorch.save_pretrained(model.eval(), job.folder / "final")


def test_networks_are_timed_in_turn(tmp_path: Path) -> None:
    for package in ("onnxruntime", "onnxscript", "openvino"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    jobs = jobs_of(smoke(PARTS["a"]), "DATA", tmp_path, smoke=True)
    named = {job.name: job for job in jobs}
    finish(named["dense-own-seed0"])
    finish(named["width-params-0.5-seed0"])
    finish(named["cp-params-0.5-seed0"], network=False)
    finish(named["kmeans-bytes-0.125-seed0"])
    report = json.loads(latency.time_all(jobs, tmp_path / "results", rounds=2).read_text())
    timed = [(row["method"], row["runtime"]) for row in report["rows"]]
    assert timed == [(m, r) for r in ("onnxruntime", "openvino") for m in ("dense", "width")]
    assert all(row["milliseconds"] > 0 and row["runtime_file_bytes"] > 900_000 for row in report["rows"])
    assert report["rows"][0]["speedup_over_dense"] == 1
    assert [(row["method"], row["runtime"]) for row in report["failures"]] == [("cp", r) for r in latency.RUNTIMES]
    assert "CheckpointError" in report["failures"][0]["error"]
    assert report["threads"] == 1


def test_nothing_finished_is_told(tmp_path: Path) -> None:
    jobs = jobs_of(smoke(PARTS["a"]), "DATA", tmp_path, smoke=True)
    with pytest.raises(InputError, match="no network is finished"):
        latency.time_all(jobs, tmp_path / "results")
