"""What times and sizes speak for, and what a cache keeps: no clock is read here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch.cost.formulas import STRATEGIES
from epitorch.errors import InputError
from epitorch.nn import EpitomeConv2d
from epitorch.plans import LayerPlan, Plan
from epitorch.tuning import _layers, _networks
from epitorch.tuning._cache import TimingCache
from epitorch.tuning._deploy import pick, stored
from epitorch.tuning._layers import LayerTimer, applicable, record_inputs, runs_as
from epitorch.tuning._runtimes import Running


def layer(**options: Any) -> EpitomeConv2d:
    return EpitomeConv2d(8, 16, 3, padding=1, epitome_shape=(8, 4, 3, 3), index="fixed", **options).eval()


@pytest.mark.parametrize(
    ("seconds", "objective", "slowdown", "chosen"),
    [
        ({"folded": 1.0, "product_map": 0.5, "both": 0.7}, "latency", 1.0, ("product_map", "fastest here")),
        ({"folded": 1.0, "product_map": 0.99}, "latency", 1.0, ("folded", "nothing is faster than folding")),
        ({"folded": 1.0, "product_map": 3.0}, "latency", 5.0, ("folded", "nothing is faster than folding")),
        ({"folded": 1.0, "product_map": 0.9, "both": 0.8}, "size", 1.0, ("both", "smallest that is fast enough")),
        ({"folded": 1.0, "product_map": 1.4}, "size", 1.0, ("folded", "smallest that is fast enough")),
        ({"folded": 1.0, "product_map": 1.4}, "size", 1.5, ("product_map", "smallest that is fast enough")),
    ],
)
def test_choice(seconds: Any, objective: Any, slowdown: float, chosen: tuple[str, str]) -> None:
    assert pick(layer(), seconds, objective, slowdown) == chosen


def test_a_layer_that_can_only_be_folded_says_why() -> None:
    assert pick(layer(channel_starts="grid"), {"folded": 1.0}, "latency", 1.0) == (
        "folded",
        "channel starts on pairs of blocks",
    )


def test_what_a_strategy_stores() -> None:
    assert stored(layer(), "folded") == 16 * 8 * 9
    assert stored(layer(), "both") == 8 * 4 * 9 + 2 + 2


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)
    )
    plans = {"1": LayerPlan((8, 16, 3, 3), index="fixed"), "3": LayerPlan((16, 16, 3, 3), index="fixed")}
    epitorch.convert_(net, Plan(plans))
    return net.eval()


X = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))


class Timed:
    """Measures nothing: says how long a strategy took, and counts how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.asked = 0

        def alternate(calls: dict[str, Any], **_: Any) -> dict[str, Any]:
            self.asked += 1
            for call in calls.values():
                call()
            return {name: epitorch.timing.Times((seconds.get(name, 9.0),)) for name in calls}  # type: ignore[attr-defined]

        monkeypatch.setattr(_layers, "alternate", alternate)
        monkeypatch.setattr(_networks, "alternate", alternate)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EPITORCH_CACHE", str(tmp_path))
    return tmp_path / "timings.json"


@pytest.mark.parametrize(
    ("seconds", "network", "strategies"),
    [
        ({"folded": 1.0, "product_map": 0.5, "both": 0.6, "as chosen": 0.1}, "as chosen", ["product_map"] * 2),
        ({"folded": 1.0, "product_map": 0.7, "both": 0.6, "as chosen": 0.1}, "as chosen", ["product_map", "both"]),
        ({"folded": 0.1, "as chosen": 0.5}, "folded", ["folded", "folded"]),
        ({"folded": 0.3, "product_map": 0.1, "as chosen": 0.5}, "folded", ["folded", "folded"]),
        ({"folded": 1.0, "product_map": 0.1, "as chosen": 0.98}, "folded", ["folded", "folded"]),
    ],
)
def test_the_fastest_is_taken_layer_by_layer_then_as_a_whole(
    seconds: dict[str, float], network: str, strategies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Timed(monkeypatch, seconds)
    net = epitorch.deploy(model(), X, "auto")
    report: Any = net.deployment
    assert (report.network, [row.strategy for row in report.layers]) == (network, strategies)
    assert dict(report.networks).keys() == {"as chosen", "folded"}
    assert dict(report.layers[0].seconds)["folded"] == seconds["folded"]
    assert "measured" in str(report)
    with torch.no_grad():
        torch.testing.assert_close(net(X), model()(X), rtol=1e-4, atol=1e-4)


def test_times_are_kept_by_layer_input_and_runtime(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(monkeypatch, {"folded": 1.0})
    epitorch.deploy(model(), X, "auto")
    assert timed.asked == 3  # two layers that differ, and the networks
    assert len(json.loads(cache.read_text())) == 2
    epitorch.deploy(model(), X, "auto")
    assert timed.asked == 4  # the networks again
    epitorch.deploy(model(), X[:1], "auto", objective="size")
    assert timed.asked == 6  # another batch


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b'{"a": {"folded": "x"}}', b"\xff\xfe", b'{"a": {"folded": -1}}', b'{"a": {}}', b"[" * 100_000],
)
def test_a_damaged_cache_is_an_empty_one(content: bytes, cache: Path) -> None:
    cache.write_bytes(content)
    kept = TimingCache()
    assert kept.get("a") is None
    kept.put("b", {"folded": 1.0})
    kept.save()
    assert TimingCache().get("b") == {"folded": 1.0}


def test_a_cache_without_room_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = TimingCache(tmp_path / "file" / "timings.json")
    kept.put("b", {"folded": 1.0})
    kept.save()
    assert kept.get("b") == {"folded": 1.0}


def test_by_the_cost_model_mixing_costs_more_than_it_computes() -> None:
    net = epitorch.deploy(model(), X, "auto", measure=False)
    assert {row.reason for row in net.deployment.layers} == {"cost model"}  # type: ignore[union-attr]
    pointwise = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 48, 1)).eval()
    epitorch.convert_(pointwise, Plan({"1": LayerPlan((7, 8, 1, 1), index="fixed")}))
    folded = epitorch.deploy(pointwise, X, "auto", measure=False).deployment.layers[0]  # type: ignore[union-attr]
    reused = epitorch.deploy(pointwise, X).deployment.layers[0]  # type: ignore[union-attr]
    assert (folded.strategy, reused.strategy) == ("folded", "product_map")


def test_a_strategy_that_the_runtime_refuses_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(net: nn.Module, *_: Any) -> Running:
        if getattr(net, "strategy", "folded") != "folded":
            raise InputError("no")
        return Running(lambda: None, 0)

    monkeypatch.setattr(_layers, "load", load)
    made = layer()
    timer = LayerTimer("torch", 1, Path(), TimingCache(Path("/nonexistent/timings.json")))
    geometry = epitorch.cost.formulas.Geometry(100, 100)  # type: ignore[attr-defined]
    assert set(timer.seconds(made, geometry, torch.randn(1, 8, 10, 10))) == {"folded"}


def test_every_strategy_runs_on_the_recorded_input() -> None:
    net = model()
    inputs = record_inputs(net, (X,))
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {"1": (2, 16, 8, 8), "3": (2, 32, 8, 8)}
    made: Any = net[3]  # type: ignore[index]
    geometry = epitorch.cost.formulas.Geometry(64, 64)  # type: ignore[attr-defined]
    strategies = applicable(made, geometry)
    assert set(strategies) == {"product_map", "wrapping", "both", "folded"}
    assert set(strategies) < set(STRATEGIES)
    with torch.no_grad():
        for strategy in strategies:
            torch.testing.assert_close(runs_as(made, strategy)(inputs["3"]), made(inputs["3"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "automatic"}, "did you mean 'auto'"),
        ({"runtime": "openvin"}, "did you mean 'openvino'"),
        ({"objective": "speed"}, "latency | size"),
        ({"threads": 0}, "threads is not valid"),
        ({"slowdown": 0.5}, "slowdown is not valid"),
        ({"measure": "no"}, "measure is not valid"),
        ({"strategy": "reuse", "runtime": "openvino"}, "no effect with strategy='reuse'"),
        ({"strategy": "dense", "objective": "size"}, "no effect with strategy='dense'"),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        epitorch.deploy(model(), X, **{"strategy": "auto", **options})
    assert words in str(caught.value)


def test_the_network_of_a_runtime_may_be_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    Timed(monkeypatch, {"folded": 1.0, "product_map": 0.5, "reuse, laid out by slices": 0.1})

    def load(net: nn.Module, arguments: tuple[Tensor, ...], *_: Any) -> Running:
        return Running(lambda: net(*arguments), 0)

    monkeypatch.setattr(_networks, "load", load)
    monkeypatch.setattr(_layers, "load", load)
    net = epitorch.deploy(model(), X, "auto", runtime="onnxruntime")
    assert net.deployment.network == "reuse, laid out by slices"  # type: ignore[union-attr]
    assert len(net.deployment.networks) == 6  # type: ignore[union-attr]
    with torch.no_grad():
        torch.testing.assert_close(net(X), model()(X), rtol=1e-4, atol=1e-4)


def test_a_network_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Timed(monkeypatch, {"folded": 0.1})
    right = _networks.deploy_as

    def wrong(*arguments: Any) -> nn.Module:
        net = right(*arguments)
        with torch.no_grad():
            next(net.parameters()).mul_(1.5)
        return net

    monkeypatch.setattr(_networks, "deploy_as", wrong)
    net = epitorch.deploy(model(), X, "auto")
    assert net.deployment.network == "as chosen"  # type: ignore[union-attr]
    assert dict(net.deployment.networks).keys() == {"as chosen"}  # type: ignore[union-attr]


def test_an_entry_of_the_cache_that_lacks_a_strategy_is_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(monkeypatch, {"folded": 1.0})
    epitorch.deploy(model(), X, "auto", objective="size")
    content = json.loads(cache.read_text())
    huge = 10**400
    for entry, damage in zip(content.values(), [{"folded": 1.0}, {"folded": huge}], strict=True):
        entry.clear()
        entry.update(damage)
    cache.write_text(json.dumps(content))
    asked = timed.asked
    epitorch.deploy(model(), X, "auto", objective="size")
    assert timed.asked == asked + 2


class Counting(nn.Module):
    """Counts its calls, takes more than tensors, and makes gradients of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 32), 0
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor, factor: int, options: dict[str, Any] | None = None) -> Tensor:
        self.calls += 1
        y = self.layer(x) * factor
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.square().sum(), leaf)
        return y + slope


def test_timing_leaves_no_trace_in_the_network_and_any_argument_will_do() -> None:
    torch.manual_seed(0)
    made = nn.Sequential()
    made.add_module("net", Counting())
    net: Any = made.net
    epitorch.convert_(net, Plan({"layer": LayerPlan((16, 8), index="fixed")}))
    deployed: Any = epitorch.deploy(net.eval(), (torch.randn(4, 8), 2, {"a": 1}), "auto")
    assert (net.calls, deployed.calls <= 2) == (0, True)
    assert not deployed.mean.is_inference()
    with torch.no_grad():
        x = torch.randn(4, 8)
        torch.testing.assert_close(deployed(x, 3), net(x, 3), rtol=1e-4, atol=1e-4)


def test_an_offer_that_fails_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    Timed(monkeypatch, {"folded": 1.0, "product_map": 0.5})

    def fails(*_: Any, **__: Any) -> nn.Module:
        raise InputError("not this one")

    monkeypatch.setattr(_networks, "lay_out", fails)
    monkeypatch.setattr(_networks, "load", lambda net, arguments, *_: Running(lambda: net(*arguments), 0))
    monkeypatch.setattr(_layers, "load", lambda net, arguments, *_: Running(lambda: net(*arguments), 0))
    report: Any = epitorch.deploy(model(), X, "auto", runtime="openvino").deployment
    assert dict(report.networks).keys() == {"as chosen", "folded"}
