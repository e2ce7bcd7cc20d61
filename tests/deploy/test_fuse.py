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
import torchvision
from torch import Tensor, nn

import epitorch
from epitorch import deploy
from epitorch.deploy import FusionReport, fuse, native_available
from epitorch.deploy._fused_match import is_inverted_residual
from epitorch.deploy.fused import FusedChain, FusedConv, FusedInvertedResidual
from epitorch.deploy.reuse_layers import ReuseConv
from epitorch.errors import InputError
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan
from epitorch.nn import EpitomeLayer

timm: Any = pytest.importorskip("timm")


def relative(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max())


def epitome(
    build: Callable[[], nn.Module],
    c: float,
    where: str,
    group_length: int | None = None,
    plan: Callable[[nn.Module], epitorch.Plan] | None = None,
) -> nn.Module:
    """A network with drawn batch-norm statistics and starts all over the circle."""
    model = build()
    made = plan(model) if plan else mobilenetv2_plan(model, c, index="direct", group_length=group_length)
    epitorch.convert_(model, made)
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
        (lambda block: setattr(block, "use_res_connect", 1), "another inverted residual than those of MobileNet"),
    ],
)
def test_what_a_stage_does_not_compute_is_left(change: Callable[[Any], object], reason: str) -> None:
    assert left(change).startswith(reason)


def test_a_block_without_an_epitome_is_left() -> None:
    net: Any = deploy(small_mobilenet().eval(), torch.randn(1, 3, 32, 32))
    fast: Any = fuse(net)
    reasons = {layer.reason for layer in fast.fusion.layers if layer.name != "features.1"}
    assert "no epitome" in reasons


# ---- squeeze-excitation ----


def squeezed(name: str) -> nn.Module:
    """A network with squeeze-excitation whose blocks are on epitomes."""
    if name.startswith("torchvision:"):
        build = getattr(torchvision.models, name.partition(":")[2])
        return epitome(lambda: build(num_classes=7), 0.25, "between", plan=block_plan)
    return epitome(lambda: timm.create_model(name, num_classes=7), 0.25, "between", plan=block_plan)


def block_plan(model: nn.Module) -> epitorch.Plan:
    """First and last 1x1 of the blocks, a quarter of each."""
    layers = {}
    for name, block in model.named_modules():
        if not is_inverted_residual(block):
            continue
        convs = {f"{name}.{part}": m for part, m in block.named_modules() if isinstance(m, nn.Conv2d)}
        (first, conv), *_, (last, project) = convs.items()
        if conv.groups == 1:
            layers[first] = epitorch.LayerPlan((conv.out_channels // 4, conv.in_channels, 1, 1), index="direct")
            layers[last] = epitorch.LayerPlan((project.out_channels, project.in_channels // 4, 1, 1), index="direct")
    return epitorch.Plan(layers)


@pytest.mark.parametrize(
    "name, stages",
    [
        ("efficientnet_b0", 18),
        ("mobilenetv3_small_100", 13),
        ("torchvision:mobilenet_v3_small", 13),
        ("torchvision:efficientnet_b0", 18),
    ],
)
def test_squeeze_excitation(name: str, stages: int) -> None:
    torch.manual_seed(0)
    model, x = squeezed(name), torch.randn(2, 3, 64, 40)
    with torch.no_grad():
        net: Any = deploy(model, x[:1], "reuse")
        fast: Any = fuse(net)
        expected = net(x)
        assert relative(expected, fast(x)) < 1e-4
        assert len(fast.fusion.fused) == len(fast.fusion.layers) == stages
        gated = [m for m in fast.modules() if isinstance(m, FusedInvertedResidual) and m.settings.squeeze is not None]
        for stage in gated:  # negative control
            getattr(stage, f"tensor_{len(stage.stage.tensors()) - 1}").sub_(1)
            stage.refresh()
        assert relative(expected, fast(x)) > 1e-3


def fused_after(change: Callable[[Any], object]) -> Any:
    """EfficientNet's row of the third block after a change to its squeeze-excitation; both networks agree."""
    net: Any = deploy(squeezed("efficientnet_b0"), torch.randn(1, 3, 32, 32), "reuse")
    change(net.blocks[1][0])
    net.eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        fast: Any = fuse(net)
        assert relative(net(x), fast(x)) < 1e-4
    (row,) = [layer for layer in fast.fusion.layers if layer.name == "blocks.1.0"]
    return row


def layers_squeeze(**options: Any) -> nn.Module:
    return timm.layers.SEModule(96, rd_channels=6, **options).eval()


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda block: setattr(block, "se", layers_squeeze()), ""),
        (lambda block: setattr(block, "se", layers_squeeze(gate_layer="hard_sigmoid")), ""),
        (lambda block: setattr(block.se, "gate", nn.Hardsigmoid()), ""),
        (lambda block: setattr(block, "se", layers_squeeze(add_maxpool=True)), "another squeeze-excitation"),
        (lambda block: setattr(block, "se", layers_squeeze(norm_layer=nn.BatchNorm2d)), "another squeeze-excitation"),
        (lambda block: setattr(block, "se", timm.layers.EcaModule(96).eval()), "another squeeze-excitation"),
        (lambda block: setattr(block.se, "gate", nn.Tanh()), "squeeze-excitation with SiLU and Tanh"),
        (lambda block: setattr(block.se, "act1", nn.GELU()), "squeeze-excitation with GELU and Sigmoid"),
        (lambda block: block.se.register_forward_hook(lambda *_: None), "forward hooks"),
    ],
)
def test_other_gates(change: Callable[[Any], object], reason: str) -> None:
    row = fused_after(change)
    assert row.reason.startswith(reason)
    assert bool(row.reason) == bool(reason)


def test_a_squeeze_on_epitomes() -> None:
    model = timm.create_model("efficientnet_b0", num_classes=3)
    plan = mobilenetv2_plan(model, 0.25, index="direct").layers
    inner = {
        "blocks.1.0.se.conv_reduce": epitorch.LayerPlan((4, 48, 1, 1), index="direct"),
        "blocks.1.0.se.conv_expand": epitorch.LayerPlan((48, 4, 1, 1), index="direct"),
    }
    epitorch.convert_(model, epitorch.Plan(dict(plan) | inner))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        net: Any = deploy(model.eval(), x, "reuse")
        assert type(net.blocks[1][0].se.conv_reduce) is ReuseConv
        fast: Any = fuse(net, x)
        assert relative(net(x), fast(x)) < 1e-4
    assert not any(layer.reason for layer in fast.fusion.layers)


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
