"""`fuse`: whole networks against the unfused ones, what is recognised, what is left and why."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch import deploy
from epitorch.deploy import FusionReport, fuse, native_available
from epitorch.deploy.fused import FusedChain, FusedConv, FusedInvertedResidual
from epitorch.errors import InputError
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan
from epitorch.nn import EpitomeLayer

timm: Any = pytest.importorskip("timm")


def relative(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max())


def epitome(build: Callable[[], nn.Module], c: float, where: str, group_length: int | None = None) -> nn.Module:
    """A network with drawn batch-norm statistics and starts all over the circle."""
    model = build()
    epitorch.convert_(model, mobilenetv2_plan(model, c, index="direct", group_length=group_length))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.7, 1.4)
        if isinstance(module, EpitomeLayer):
            sizes = module.spec.start_sizes
            module.set_starts({axis: torch.rand_like(v) * sizes[axis][0] for axis, v in module.starts().items()})
            if where == "whole":
                module.snap_routing()
    return model.eval()


def small_mobilenet() -> nn.Module:
    return mobilenetv2(10, cifar=True, stem_stride=2)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "torchvision": small_mobilenet,
    "mobilenetv2_100": lambda: timm.create_model("mobilenetv2_100", num_classes=7),
    "efficientnet_lite0": lambda: timm.create_model("efficientnet_lite0", num_classes=7),
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    "c, where, group_length", [(0.18, "between", None), (0.35, "whole", None), (0.35, "between", 8)]
)
def test_whole_networks(name: str, c: float, where: str, group_length: int | None) -> None:
    model = epitome(BUILDERS[name], c, where, group_length)
    x = torch.randn(2, 3, 40, 56)
    with torch.no_grad():
        net: Any = deploy(model, x[:1], "reuse")
        fast: Any = fuse(net)
        expected = net(x)
        assert relative(expected, fast(x)) < 1e-4
        assert relative(model(x), fast(x)) < 1e-4
        assert relative(expected, fuse(net.double())(x.double()).float()) < 1e-4
        for layer in fast.modules():  # negative control
            if isinstance(layer, FusedInvertedResidual):
                layer.tensor_0.mul_(1.1)
                layer.refresh()
        assert relative(expected, fast(x)) > 1e-3
    assert len(fast.fusion.fused) == len(fast.fusion.layers) == {"torchvision": 19, "mobilenetv2_100": 19}.get(name, 18)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fast.modules())


def test_what_follows_each_other_is_one_chain() -> None:
    model = epitome(small_mobilenet, 0.2, "between")
    fast: Any = fuse(deploy(model, torch.randn(1, 3, 32, 32)))
    assert type(fast.features) is FusedChain
    assert [type(stage) for stage in fast.features] == [FusedConv, *[FusedInvertedResidual] * 17, FusedConv]


def test_the_network_stays_as_it_was() -> None:
    net: Any = deploy(epitome(small_mobilenet, 0.2, "between"), torch.randn(1, 3, 32, 32))
    x = torch.randn(1, 3, 32, 32)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    expected = net(x)
    fast: Any = fuse(net)
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(net(x), expected)
    assert type(net.features[1]).__name__ == "InvertedResidual"
    assert isinstance(fast.fusion, FusionReport)
    assert copy.deepcopy(fast).fusion == fast.fusion


def test_report_is_a_table() -> None:
    fast: Any = fuse(deploy(epitome(small_mobilenet, 0.2, "between"), torch.randn(1, 3, 32, 32)))
    lines = str(fast.fusion).splitlines()
    assert lines[0].split() == ["layer", "kind", "result"]
    assert lines[1].split() == ["features.1", "InvertedResidual", "fused"]
    assert lines[-2].split() == ["features.0", "Conv2dNormActivation", "fused"]


# ---- what is left ----


def left(change: Callable[[Any], object]) -> str:
    """The reason for which the third block is left after a change, and check that the network still agrees."""
    net: Any = deploy(epitome(small_mobilenet, 0.2, "between"), torch.randn(1, 3, 32, 32))
    change(net.features[3])
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        fast: Any = fuse(net)
        assert relative(net(x), fast(x)) < 1e-4
    (row,) = [layer for layer in fast.fusion.layers if layer.reason]
    assert row.name == "features.3"
    assert len(fast.features) == len(net.features) == 19
    return row.reason


def swap(block: Any, at: int, new: nn.Module) -> None:
    block.conv[1][at] = new.eval()


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda block: block.register_forward_hook(lambda *_: None), "forward hooks"),
        (lambda block: block.conv[2].register_forward_hook(lambda *_: None), "forward hooks"),
        (lambda block: swap(block, 2, nn.GELU()), "activation GELU"),
        (lambda block: swap(block, 1, nn.GroupNorm(4, 144)), "GroupNorm instead of a batch norm"),
        (lambda block: swap(block, 0, nn.Conv2d(144, 144, 3, padding=2, dilation=2, groups=144)), "depthwise kernel"),
        (lambda block: swap(block, 0, nn.Conv2d(144, 144, 3, padding=1, groups=72)), "not a depthwise convolution"),
        (lambda block: setattr(block, "use_res_connect", 1), "another inverted residual than MobileNetV2's"),
    ],
)
def test_what_a_stage_does_not_compute_is_left(change: Callable[[Any], object], reason: str) -> None:
    assert left(change).startswith(reason)


def test_a_block_without_an_epitome_is_left() -> None:
    net: Any = deploy(small_mobilenet().eval(), torch.randn(1, 3, 32, 32))
    fast: Any = fuse(net)
    reasons = {layer.reason for layer in fast.fusion.layers if layer.name != "features.1"}
    assert "no epitome" in reasons


def test_squeeze_excitation_is_left() -> None:
    model = timm.create_model("efficientnet_b0", num_classes=3).eval()
    fast: Any = fuse(deploy(model, torch.randn(1, 3, 32, 32)))
    assert {layer.reason for layer in fast.fusion.layers} == {"squeeze-excitation"}
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("train", [True, False])
def test_only_deployed_networks(train: bool) -> None:
    model = epitome(small_mobilenet, 0.2, "between")
    with pytest.raises(InputError, match="cannot be fused"):
        fuse(model.train(train))


# ---- the build ----


def test_the_hook_says_what_is_missing(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    code = (
        "import sys, types; sys.path.insert(0, sys.argv[1]);"
        "m = types.ModuleType('hatchling.builders.hooks.plugin.interface'); m.BuildHookInterface = object;"
        "sys.modules['hatchling.builders.hooks.plugin.interface'] = m;"
        "import pathlib, hatch_build; print(hatch_build.compile_kernel(pathlib.Path(sys.argv[2])))"
    )
    arguments = [sys.executable, "-c", code, str(root), str(tmp_path)]
    none = subprocess.run(arguments, capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=True)
    assert none.stdout.startswith("no C++ compiler")
    if native_available():
        broken = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert "failed" in broken.stdout or broken.stdout.startswith("no C++ compiler")
