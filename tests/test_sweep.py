"""A fast part of the sweep over torchvision and timm, and that the sweep notices what goes wrong."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import epitorch
from epitorch import LayerPlan, Plan

ROOT = Path(__file__).resolve().parents[1]
NAMES = [
    "timm:test_efficientnet",  # depthwise, squeeze and excite
    "timm:test_nfnet",  # weight standardisation
    "timm:test_vit",
    "timm:test_convnext",
    "timm:ghostnet_050",
    "torchvision:squeezenet1_1",
    "torchvision:mobilenet_v3_small",
    "torchvision:shufflenet_v2_x0_5",
]


@pytest.fixture(scope="module")
def sweep() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("sweep")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("name", NAMES)
def test_models_convert_at_half_their_parameters(sweep: ModuleType, name: str) -> None:
    pytest.importorskip(name.partition(":")[0])
    row = sweep.check(name)
    assert (row["verdict"], row["problem"]) == ("passed", None)
    assert row["params_after"] <= row["params"] / 2
    assert row["coverage"] >= 0.95


class _Subject:
    """A network that is fine, to be spoilt."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(512, 8)]
        self.build = lambda: nn.Sequential(*(type(m)(*_arguments(m)) for m in layers))
        self.inputs = ((torch.randn(2, 3, 8, 8),),)
        self.train = lambda model, inputs: model(*inputs)
        self.settle = False


def _arguments(module: Any) -> tuple[Any, ...]:
    if isinstance(module, nn.Conv2d):
        return module.in_channels, module.out_channels, 3
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()


def _wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epitorch, "plan", lambda *_, **__: Plan({"2": LayerPlan((24, 32, 3, 3))}))


def _wrong_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    deploy = epitorch.deploy

    def spoilt(*arguments: Any, **options: Any) -> nn.Module:
        net: Any = deploy(*arguments, **options)
        with torch.no_grad():
            net[4].bias.add_(1.0)
        return net

    monkeypatch.setattr(epitorch, "deploy", spoilt)


def _wrong_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    to_dense_ = epitorch.to_dense_

    def spoilt(model: nn.Module) -> nn.Module:
        dense: Any = to_dense_(model)
        with torch.no_grad():
            dense[4].bias.add_(1.0)
        return dense

    monkeypatch.setattr(epitorch, "to_dense_", spoilt)


@pytest.mark.parametrize(
    ("spoil", "step"),
    [(None, None), (_wrong_plan, "parameters"), (_wrong_deployment, "deploy"), (_wrong_dense, "to_dense")],
)
def test_what_goes_wrong_is_noticed(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, spoil: Any, step: str | None
) -> None:
    monkeypatch.setattr(sweep, "subject", lambda _: _Subject())
    if spoil:
        spoil(monkeypatch)
    row = sweep.check("timm:none")
    assert (row["verdict"], row["step"]) == (("passed" if spoil is None else "failed"), step)
    table = sweep._table([row], {"passed": 0, "nothing": 0, "failed": 1})
    assert ("failed: " in table.splitlines()[-1]) is (spoil is not None)


def test_a_model_without_layers_says_so(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = _Subject()
    subject.build = lambda: nn.Sequential(nn.BatchNorm2d(3))
    monkeypatch.setattr(sweep, "subject", lambda _: subject)
    row = sweep.check("timm:none")
    assert (row["verdict"], row["step"]) == ("nothing", None)
    assert "no convolution" in row["problem"]
