"""Networks side by side: what is reported, not how fast it was."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import epitorch
from epitorch.bench import BenchReport, _bench, _peak, bench
from epitorch.cli import main
from epitorch.errors import ExportError, InputError
from epitorch.models.resolve import build_model
from epitorch.timing import Times

X = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPITORCH_CACHE", str(tmp_path / "cache"))


def dense() -> nn.Module:
    return build_model("epitorch:digits_cnn").eval()


def epitome() -> nn.Module:
    model = dense()
    epitorch.convert_(model, epitorch.plan(model, X, ratio=2, index="fixed"))
    return model.eval()


def test_two_runtimes_two_batches() -> None:
    pytest.importorskip("onnxruntime")
    models = {"dense": dense(), "epitome": epitome()}
    report = bench(
        models, X, runtimes=("torch", "onnxruntime"), batches=(1, 2), strategy="reuse", rounds=2, memory=False
    )
    keys = [(row.runtime, row.batch, row.model) for row in report.rows]
    assert keys == [(r, b, m) for r in ("torch", "onnxruntime") for b in (1, 2) for m in models]
    costs = {name: epitorch.count(model, X) for name, model in models.items()}
    for row in report.rows:
        assert (row.params, row.madds) == (costs[row.model].params, costs[row.model].madds)
        assert row.milliseconds > 0
        assert row.quartiles[0] <= row.milliseconds <= row.quartiles[1]
        assert row.throughput == pytest.approx(1e3 * row.batch / row.milliseconds)
        assert (row.speedup == 1.0) or row.model == "epitome"
    assert {row.runs_as for row in report.rows if row.model == "dense"} == {"as it is"}
    assert all("product_map" in row.runs_as or "folded" in row.runs_as for row in report.rows if row.model == "epitome")
    assert json.loads(json.dumps(report.to_dict()))["versions"].keys() == {"torch", "onnxruntime"}
    assert report.failures == ()


def fixed_times(seconds: dict[str, tuple[float, ...]]) -> Any:
    return lambda calls, **_: {name: Times(seconds[name]) for name in calls}


def test_ratios_are_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench, "alternate", fixed_times({"a": (1.0, 10.0, 1.0), "b": (0.5, 5.0, 0.25)}))
    report = bench({"a": dense(), "b": dense()}, X, runtimes=("torch",), rounds=3, memory=False)
    first, second = report.rows
    assert (first.speedup, second.speedup, second.speedup_quartiles) == (1.0, 2.0, (2.0, 3.0))
    assert second.milliseconds == 500.0
    assert second.throughput == 2.0
    lines = str(report).splitlines()
    assert lines[2].split()[:5] == ["torch", "1", "b", "500.000", "375.000-2750.000"]
    assert "1 thread(s), 3 rounds in turns, wall" in lines[3]


def test_what_a_runtime_refuses_is_listed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right, broken = _bench.load, dense()
    broken.classifier = nn.Linear(3, 3)  # type: ignore[assignment]

    def load(net: nn.Module, *arguments: Any) -> Any:
        if any(isinstance(layer, nn.Dropout) for layer in net.modules()):
            raise ExportError("cannot be traced")
        return right(net, *arguments)

    monkeypatch.setattr(_bench, "load", load)
    models = {"a": nn.Sequential(dense(), nn.Dropout()).eval(), "b": dense()}
    report = bench(models, X, runtimes=("torch",), rounds=1, memory=False)
    assert [row.model for row in report.rows] == ["b"]
    assert report.failures == ("a in torch, batch 1: cannot be traced",)
    assert "not measured: a in torch" in str(report)


def test_peak_memory_grows_with_the_network(tmp_path: Path) -> None:
    x = torch.randn(1, 2000)
    small = _peak.peak_bytes("torch", nn.Linear(2000, 10).eval(), (x,), tmp_path)
    large = _peak.peak_bytes("torch", nn.Linear(2000, 20_000).eval(), (x,), tmp_path)
    assert small is not None
    assert large is not None
    assert large - small > 100e6  # 160 MB of weights


@pytest.mark.parametrize(
    ("models", "options", "words"),
    [
        ({}, {}, "nothing to measure"),
        ({"a": 3}, {}, "no model"),
        ({"a": nn.Identity()}, {"batches": (0,)}, "batch is not valid"),
        ({"a": nn.Identity()}, {"threads": True}, "threads is not valid"),
        ({"a": nn.Identity()}, {"threads": 2, "processor_time": True}, "processor time adds up"),
        ({"a": nn.Identity()}, {"batches": 4}, "batches is not valid"),
        ({"a": nn.Identity()}, {"runtimes": ()}, "runtimes is not valid"),
        ({"a": nn.Identity()}, {"rounds": 1.5}, "rounds is not valid"),
        ({"a": nn.Identity()}, {"strategy": "fast"}, "auto"),
        ({"a": nn.Identity()}, {"runtimes": ("tflite",)}, "torch | onnxruntime | openvino"),
    ],
)
def test_bad_input(models: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        bench(models, X, **options)
    assert words in str(caught.value)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "bench.json"
    assert main(shlex.split(f"plan epitorch:digits_cnn --input 1,1,8,8 --ratio 2 --out {plan}")) == 0
    capsys.readouterr()
    command = f"bench epitorch:digits_cnn recipe:digits/narrow --plan {plan} --input 1,1,8,8 --runtime torch --rounds 1"
    assert main(shlex.split(f"{command} --strategy dense --no-memory --json --out {out}")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    names = [row["model"] for row in printed["rows"]]
    assert names == ["epitorch:digits_cnn", "recipe:digits/narrow", f"epitorch:digits_cnn by {plan}"]
    assert isinstance(printed["rows"][0]["peak"], type(None))
    assert main(shlex.split("bench epitorch:digits_cnn --input 1,1,8,8 --runtime tflite")) == 2
    assert "runtime is not known" in capsys.readouterr().err


def test_a_model_that_fails_in_its_own_code_is_listed() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("of its own")

    report = bench({"a": Broken(), "b": dense()}, X, runtimes=("torch", "torch"), rounds=1)
    assert [row.model for row in report.rows] == ["b"]
    assert "of its own" in report.failures[0]


def test_what_cannot_be_pickled_has_no_peak() -> None:
    class Local(nn.Linear):
        pass

    (row,) = bench({"a": Local(8, 8)}, X, runtimes=("torch",), rounds=1).rows
    assert row.peak is None


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("epitorch:digits_cnn epitorch:digits_cnn", 2, "named twice"),
        ("epitorch:digits_cnn --out .", 2, "the report has no place"),
        ("epitorch:digits_cnn --out no/such/file.json", 2, "the report has no place"),
        ("epitorch:digits_cnn --strategy fast", 2, "auto | "),
        ("epitorch:digits_cnn --input 1,4,8,8", 1, "nothing could be measured"),
    ],
)
def test_commands_that_cannot_be(
    command: str,
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = "" if "--input" in command else "--input 1,1,8,8"
    assert main(shlex.split(f"bench {command} {shape} --runtime torch --rounds 1 --no-memory")) == code
    assert words.removesuffix(" | ") in capsys.readouterr().err


def test_report_is_plain() -> None:
    assert BenchReport((), {"threads": 1, "rounds": 2}).to_dict() == {
        "threads": 1,
        "rounds": 2,
        "rows": [],
        "failures": [],
    }
