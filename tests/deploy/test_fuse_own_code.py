"""`fuse` leaves code that is not the library's own: subclasses, hooks, replaced forwards, code that walks children."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_fuse import epitome, relative, small_mobilenet
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.ops.misc import Conv2dNormActivation

from epitorch import deploy
from epitorch.deploy import ParityError, _fused_pass, fuse, native_available, native_problem
from epitorch.deploy._fused_native import NativeChain
from epitorch.deploy.fused import FusedChain, FusedConv, FusedInvertedResidual, FusedStage
from epitorch.deploy.reuse_layers import ReuseConv

timm: Any = pytest.importorskip("timm")
native = pytest.mark.skipif(not native_available(), reason=native_problem() or "there")


@pytest.fixture(scope="module")
def deployed() -> Any:
    torch.manual_seed(0)
    return deploy(epitome(small_mobilenet, 0.2, "between"), torch.randn(1, 3, 32, 32), "reuse")


@pytest.fixture
def net(deployed: Any) -> Any:
    return copy.deepcopy(deployed)


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def agrees(net: Any) -> Any:
    """The fused network, which computes the same as the unfused one."""
    with torch.no_grad():
        fast: Any = fuse(net)
        assert relative(net(images()), fast(images())) < 1e-4
    return fast


# ---- blocks ----


class Doubled(InvertedResidual):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OnlyNamed(InvertedResidual):
    pass


class DoubledConv(ReuseConv):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DropPath(nn.Module):
    """Named as timm's, but it does something."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Backwards(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class BackwardsTriple(Conv2dNormActivation):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def become(module: Any, kind: type) -> None:
    module.__class__ = kind


def double(module: Any) -> None:
    """Replace a module's forward on the instance."""
    forward = type(module).forward
    module.forward = types.MethodType(lambda self, x: 2 * forward(self, x), module)


def twice(_: Any, inputs: Any, output: Tensor | None = None) -> Any:
    return 2 * inputs[0] if output is None else 2 * output


BLOCKS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a subclass with a forward": (lambda b: become(b, Doubled), "another inverted residual"),
    "a subclass": (lambda b: become(b, OnlyNamed), "another inverted residual"),
    "forward replaced": (double, "a forward of its own"),
    "forward of the body": (lambda b: double(b.conv), "a forward of its own"),
    "forward of a triple": (lambda b: double(b.conv[0]), "a forward of its own"),
    "forward of an activation": (lambda b: double(b.conv[0][2]), "a forward of its own"),
    "hook on an activation": (lambda b: b.conv[0][2].register_forward_hook(twice), "forward hooks"),
    "hook on a norm": (lambda b: b.conv[3].register_forward_hook(twice), "forward hooks"),
    "hook on a triple": (lambda b: b.conv[1].register_forward_pre_hook(twice), "forward hooks"),
    "backward hook": (lambda b: b.conv[1][0].register_full_backward_hook(lambda *_: None), "backward hooks"),
    "backward pre-hook": (lambda b: b.register_full_backward_pre_hook(lambda *_: None), "backward hooks"),
    "a body that is no plain sequence": (lambda b: become(b.conv, Backwards), "another inverted residual"),
    "a triple with a forward": (lambda b: become(b.conv[1], BackwardsTriple), "another inverted residual"),
    "an epitome layer with a forward": (lambda b: become(b.conv[0][0], DoubledConv), "DoubledConv instead"),
    "an activation in training mode": (lambda b: b.conv[0][2].train(), "training mode"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_with_code_of_their_own_are_left(net: Any, name: str) -> None:
    change, reason = BLOCKS[name]
    change(net.features[4])
    fast = agrees(net)
    (row,) = [layer for layer in fast.fusion.layers if layer.reason]
    assert row.name == "features.4"
    assert row.reason.startswith(reason)
    assert type(fast.features[4]) is type(net.features[4])


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda b: become(b, type("InvertedResidual", (type(b),), {"forward": lambda s, x: s.conv_pw(x)})), "another"),
        (lambda b: setattr(b, "drop_path", DropPath()), "drop path"),
        (lambda b: setattr(b, "se", DropPath()), "another squeeze-excitation"),
        (lambda b: b.bn2.act.register_forward_hook(twice), "forward hooks"),
        (lambda b: setattr(b.bn2, "drop", DropPath()), "dropout"),
        (lambda b: double(b.bn1), "a forward of its own"),
    ],
)
def test_timms_blocks_too(change: Callable[[Any], object], reason: str) -> None:
    model = epitome(lambda: timm.create_model("mobilenetv2_100", num_classes=3), 0.3, "between")
    net: Any = deploy(model, images(), "reuse")
    block = net.blocks[2][1]
    change(block)
    fast: Any = fuse(net.eval())
    (row,) = [layer for layer in fast.fusion.layers if layer.reason]
    assert row.name == "blocks.2.1"
    assert row.reason.startswith(reason)
    with torch.no_grad():
        x = torch.randn(1, 32, 8, 8)
        assert torch.equal(block(x), fast.blocks[2][1](x))


def test_a_norm_with_an_activation_of_its_own_is_left(net: Any) -> None:
    from timm.layers.norm_act import BatchNormAct2d

    norm = BatchNormAct2d(144, act_layer=nn.SiLU).eval()
    net.features[3].conv[0][1] = norm
    (row,) = [layer for layer in agrees(net).fusion.layers if layer.reason]
    assert row.reason == "two activations"


def test_an_attribute_that_a_norm_does_not_use_changes_nothing(net: Any) -> None:
    net.features[3].conv[3].act = nn.SiLU().eval()
    assert not [layer for layer in agrees(net).fusion.layers if layer.reason]


# ---- what stands around them ----


class Sums(nn.Module):
    """Walks the children of its body."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features: Any = features

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for number, layer in enumerate(self.features):
            x = layer(x)
            total = total + (number + 1) * x.mean()
        return total + self.features[:2](images()).square().mean() + len(self.features)


def test_code_that_walks_the_children_sees_the_same(net: Any) -> None:
    walking = Sums(net.features).eval()
    fast: Any = fuse(walking)
    with torch.no_grad():
        assert relative(walking(images()), fast(images())) < 1e-4
        assert relative(walking(images()), fast(1.5 * images())) > 1e-4
    assert len(fast.features) == 19
    assert type(fast.features[3:5]) is FusedChain
    assert [name for name, _ in fast.features.named_children()] == [name for name, _ in net.features.named_children()]


def test_every_child_and_slice_computes_the_same(net: Any) -> None:
    fast: Any = fuse(net)
    x = y = images()
    with torch.no_grad():
        for number, layer in enumerate(net.features):
            before = y
            x, y = layer(x), fast.features[number](y)
            assert relative(x, y) < 1e-4
            assert relative(x, fast.features[: number + 1](images())) < 1e-4
            assert relative(x, fast.features[number](2 * before)) > 1e-3
        got = IntermediateLayerGetter(fast.features, {"3": "a", "17": "b"})(images())
        for name, end in (("a", 4), ("b", 18)):
            assert relative(net.features[:end](images()), got[name]) < 1e-4


@pytest.mark.parametrize("spoil", [lambda f: become(f, Backwards), double])
def test_a_sequence_with_a_forward_of_its_own_stays(net: Any, spoil: Callable[[Any], object]) -> None:
    spoil(net.features)
    fast = agrees(net)
    assert type(fast.features) is type(net.features)
    assert type(fast.features[2]) is FusedInvertedResidual


def test_hooks_on_a_sequence_still_run(net: Any) -> None:
    net.features.register_forward_hook(twice)
    assert type(agrees(net).features) is FusedChain


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stem: become(stem, BackwardsTriple),
        double,
        lambda stem: double(stem[1]),
        lambda stem: stem[2].register_forward_hook(twice),
        lambda stem: stem.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
        lambda stem: stem.register_full_backward_hook(lambda *_: None),
    ],
)
def test_a_stem_with_code_of_its_own_stays(net: Any, spoil: Callable[[Any], object]) -> None:
    spoil(net.features[0])
    assert not isinstance(agrees(net).features[0], FusedStage)


def test_a_network_of_another_class_keeps_its_pairs() -> None:
    model = epitome(lambda: timm.create_model("mobilenetv2_100", num_classes=3), 0.3, "between")
    net: Any = deploy(model, images(), "reuse")
    assert type(agrees(net).conv_stem) is FusedConv

    def forward_features(self: Any, x: Tensor) -> Tensor:
        x = self.bn1(self.conv_stem(x).abs())
        return self.bn2(self.conv_head(self.blocks(x)))

    net.__class__ = type("EfficientNet", (type(net),), {"forward_features": forward_features})
    fast = agrees(net)
    assert type(fast.conv_stem) is nn.Conv2d
    assert isinstance(fast.blocks[2][1], FusedInvertedResidual)


# ---- calls of the kernel ----


def calls(net: Any, patch: pytest.MonkeyPatch) -> list[int]:
    """How many stages each call of the kernel ran."""
    found: list[int] = []
    run = NativeChain.__call__

    def counted(self: NativeChain, x: Tensor) -> Tensor:
        found.append(len(self._outline))
        return run(self, x)

    with patch.context() as inner, torch.no_grad():
        inner.setattr(NativeChain, "__call__", counted)
        net(images())
    return found


@native
def test_a_chain_is_one_call(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast: Any = fuse(net)
    assert calls(fast, monkeypatch) == [19]
    handle = fast.features[7].register_forward_hook(twice)
    net.features[7].register_forward_hook(twice)
    assert calls(fast, monkeypatch) == [7, 1, 11]
    with torch.no_grad():
        assert relative(net(images()), fast(images())) < 1e-4
    handle.remove()
    assert calls(fast, monkeypatch) == [19]
    assert calls(copy.deepcopy(fast), monkeypatch) == calls(pickle.loads(pickle.dumps(fast)), monkeypatch) == [19]
    seen: list[str] = []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__)):
        assert calls(fast, monkeypatch) == [1] * 19
    assert seen.count("FusedInvertedResidual") == 17


@native
def test_inner_chains_run_in_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = epitome(lambda: timm.create_model("mobilenetv2_100", num_classes=3), 0.3, "between")
    fast: Any = fuse(deploy(model, images(), "reuse"))
    assert [len(stage) for stage in fast.blocks] == [len(stage) for stage in model.blocks]  # type: ignore[union-attr]
    assert calls(fast, monkeypatch) == [1, 17, 1]


# ---- the example ----


def test_the_example_is_compared(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(fuse(net, images()).features) is FusedChain
    assert type(fuse(net, (images(),)).features) is FusedChain
    original = _fused_pass.block_stage
    monkeypatch.setattr(_fused_pass, "block_stage", lambda block: original(block).map(lambda value: value * 1.1))
    fuse(net)
    with pytest.raises(ParityError):
        fuse(net, images())
