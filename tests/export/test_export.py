"""`export`: files that their runtimes run to the trained model's numbers, that store each epitome once, or no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch.deploy import ParityError, deploy
from epitorch.errors import ExportError, InputError
from epitorch.export import TARGETS
from epitorch.export._onnx import run_onnx
from epitorch.export._openvino import run_openvino
from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLayer, EpitomeLinear
from epitorch.plans import LayerPlan, Plan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
RUN: dict[str, Callable[[Path, Any], list[list[Tensor]]]] = {"onnx": run_onnx, "openvino": run_openvino}
SLACK = 64 * 1024


def moved(model: nn.Module) -> nn.Module:
    """Starts anywhere on the circle, running statistics and affine parameters of a trained network; eval mode."""
    for layer in model.modules():
        if isinstance(layer, EpitomeLayer):
            sizes = layer.spec.start_sizes
            starts = layer.starts().items()
            layer.set_starts({axis: torch.rand_like(value) * max(sizes[axis]) for axis, value in starts})
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight, layer.bias, layer.running_mean):
                assert tensor is not None
                nn.init.normal_(tensor, 0.5, 0.2)
            assert layer.running_var is not None
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return model.eval()


def two_axes() -> nn.Module:
    return nn.Sequential(
        EpitomeConv2d(3, 16, 3, padding=1, epitome_shape=(6, 3, 3, 3)),  # product map
        nn.BatchNorm2d(16),
        nn.ReLU(),
        EpitomeConv2d(16, 16, 3, stride=2, epitome_shape=(16, 6, 3, 3)),  # wrapping
        nn.BatchNorm2d(16),
        EpitomeConv2d(16, 24, 1, bias=False, epitome_shape=(8, 8, 1, 1), group_length=2),  # both
        nn.BatchNorm2d(24),
        EpitomeConvTranspose2d(24, 8, 2, stride=2, epitome_shape=(12, 4, 2, 2)),
    )


def made_in_the_graph() -> nn.Module:
    return nn.Sequential(
        EpitomeConv2d(3, 32, 3, padding=1, epitome_shape=(16, 3, 3, 3), channel_starts="grid"),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        EpitomeConv2d(32, 32, 3, epitome_shape=(16, 16, 5, 5), spatial_starts="out"),
        EpitomeConv2d(32, 16, 3, epitome_shape=(4, 16, 4, 4)),  # product map of a kernel with spatial starts
        EpitomeConv2d(16, 32, 1, groups=2, epitome_shape=(4, 8, 1, 1)),  # each group has a copy of the filters
    )


def fine() -> nn.Module:
    return nn.Sequential(
        EpitomeConv2d(3, 300, 1, epitome_shape=(12, 3, 1, 1), block_out=1),
        nn.ReLU(),
        EpitomeConv2d(300, 8, 1, epitome_shape=(8, 12, 1, 1), block_in=1),
    )


def one_axis() -> nn.Module:
    return nn.Sequential(EpitomeConv1d(4, 16, 3, epitome_shape=(8, 4, 3)), nn.ReLU(), EpitomeConv1d(16, 4, 3, epitome_shape=(4, 4, 3)))


def linear() -> nn.Module:
    return nn.Sequential(EpitomeLinear(8, 32, epitome_shape=(8, 8)), nn.ReLU(), EpitomeLinear(32, 6, epitome_shape=(6, 8)))


NETS = {
    "two_axes": (two_axes, (3, 9, 9)),
    "made_in_the_graph": (made_in_the_graph, (3, 9, 9)),
    "fine": (fine, (3, 4, 4)),
    "one_axis": (one_axis, (4, 12)),
    "linear": (linear, (8,)),
}


@pytest.mark.parametrize("name", NETS)
def test_both_runtimes_agree_with_the_trained_model(name: str, tmp_path: Path) -> None:
    make, shape = NETS[name]
    model = moved(make())
    for target, run in RUN.items():
        out = tmp_path / f"net{TARGETS[target].suffix}"
        report = epitorch.export(model, torch.randn(2, *shape), target, out, strategy="size")  # type: ignore[arg-type]
        assert report.difference < 1e-5
        assert report.bytes == sum(file.stat().st_size for file in tmp_path.glob(f"net.{'*' if target == 'openvino' else 'onnx'}") if target == "onnx" or file.suffix != ".onnx")
        batches = [(torch.randn(n, *shape),) for n in (1, 3)]
        for (x,), (got,) in zip(batches, run(out, batches), strict=True):
            with torch.no_grad():
                torch.testing.assert_close(got, model(x), atol=1e-4, rtol=1e-4)
    assert_small(tmp_path / "net.onnx", model, torch.randn(2, *shape), slack=10_000)


def assert_small(file: Path, model: nn.Module, x: Tensor, slack: int = SLACK) -> None:
    """Every epitome is an initializer once, no larger tensor is stored, and no operator is of a domain of its own."""
    proto = onnx.load(file)
    sizes = sorted(int(np.prod(tensor.dims)) for tensor in proto.graph.initializer)
    stored = 4 * epitorch.count(model, x).params
    assert file.stat().st_size <= 1.03 * stored + slack
    assert 4 * sum(sizes) <= 1.03 * stored + slack
    assert {node.domain for node in proto.graph.node} == {""}
    assert [entry.domain for entry in proto.opset_import] == [""]
    epitomes = [layer.epitome.numel() for layer in model.modules() if isinstance(layer, EpitomeLayer)]
    for size in set(epitomes):
        assert sizes.count(size) >= epitomes.count(size)
    names = [tensor.name for tensor in proto.graph.initializer if "epitome" in tensor.name or "original" in tensor.name]
    assert len(names) == len(set(names)) == len(epitomes)


def test_reuse_and_dense_store_what_they_run() -> None: ...


@pytest.mark.parametrize("starts", ["whole", "fractional"])
def test_resnet18_with_both_axes_halved(starts: str, tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=10)
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d) and name != "conv1"}
    plan = {name: LayerPlan((c.out_channels // 2, c.in_channels // 2, *c.kernel_size)) for name, c in convolutions.items()}
    epitorch.convert_(model, Plan(plan))
    moved(model)
    if starts == "whole":
        for layer in model.modules():
            if isinstance(layer, EpitomeLayer):
                layer.snap_routing()
    x, out = torch.randn(2, 3, 32, 32), tmp_path / "resnet.onnx"
    epitorch.export(model, x, "onnx", out, strategy="size")
    assert_small(out, model, x)
    operators = [node.op_type for node in onnx.load(out).graph.node]
    assert ("Mul" in operators) == (starts == "fractional")
    assert operators.count("Split") == 40 - 1  # the first layer's input is not wrapped... 
    batch = (torch.randn(3, 3, 32, 32),)
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(out, [batch])[0][0], model(*batch), atol=1e-4, rtol=1e-4)
