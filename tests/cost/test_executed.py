"""The executed figure against an operator-by-operator count of whole deployed networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import epitorch
from epitorch.cost import count
from epitorch.deploy.reuse_layers import ReuseLayer
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan
from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLayer
from epitorch.plans import LayerPlan, Plan
from operator_count import Operators


def executed(net: nn.Module, example: Tensor) -> tuple[int, int]:
    """Multiply-adds and interpolation of every call of a convolution, linear or reuse layer."""
    calls: list[tuple[nn.Module, Any]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: calls.append((module, args)))
        for module in net.modules()
        if isinstance(module, ReuseLayer | nn.Conv2d | nn.ConvTranspose2d | nn.Linear)
    ]
    with torch.no_grad():
        net(example)
        for handle in handles:
            handle.remove()
        with Operators() as operators:
            for module, args in calls:
                module(*args)
    return operators.multiply_adds, operators.interpolation


def halved(model: nn.Module, *, grid: bool = False) -> nn.Module:
    """Every ungrouped layer with enough channels at half its filters and two thirds of its inputs, starts anywhere."""
    layers = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Conv2d | nn.Linear) and getattr(module, "groups", 1) == 1 and weight.shape[1] >= 8:
            shape = (weight.shape[0] // 2, 2 * weight.shape[1] // 3, *weight.shape[2:])
            layers[name] = LayerPlan(shape, index="fixed", channel_starts="grid" if grid else "separable")
    epitorch.convert_(model, Plan(layers))
    return scattered(model)


def scattered(model: nn.Module) -> nn.Module:
    """Random starts, every third of them whole."""
    for layer in model.modules():
        if isinstance(layer, EpitomeLayer):
            layer.set_starts({axis: some_whole(7 * torch.rand_like(value)) for axis, value in layer.starts().items()})
    return model.eval()


def some_whole(starts: Tensor) -> Tensor:
    flat = starts.flatten()
    flat[::3] = flat[::3].floor()
    return flat.view_as(starts)


def mobilenet() -> nn.Module:
    model = mobilenetv2(10, cifar=True, stem_stride=2)
    epitorch.convert_(model, mobilenetv2_plan(model, 0.18, last_conv=True, classifier=0.5, index="direct"))
    return scattered(model)


def torchvisions(name: str) -> Callable[[], nn.Module]:
    return lambda: halved(torchvision.models.get_model(name, weights=None))


def wsnet() -> nn.Module:
    """Windows of one long filter; a plane of windows, wrapped first; starts for every pair of blocks; transposed."""
    out: dict[str, Any] = {"spatial_starts": "out", "index": "fixed"}
    layers = [
        EpitomeConv1d(96, 64, 9, stride=2, padding=4, epitome_shape=(1, 96, 40), **out),
        nn.ReLU(),
        nn.Unflatten(-1, (4, 4)),
        EpitomeConv2d(64, 192, 3, padding=1, epitome_shape=(4, 16, 5, 4), **out),
        EpitomeConv2d(192, 96, 3, epitome_shape=(2, 96, 4, 5), spatial_starts="grid", index="fixed"),
        EpitomeConvTranspose2d(96, 192, 3, epitome_shape=(96, 4, 5, 4), **out),
    ]
    return scattered(nn.Sequential(nn.Flatten(1, 2), *layers))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mobilenetv2-0.18": mobilenet,
    "wsnet": wsnet,
    "resnet18": torchvisions("resnet18"),
    "efficientnet_b0": torchvisions("efficientnet_b0"),
    "shufflenet_v2_x0_5": torchvisions("shufflenet_v2_x0_5"),
    "squeezenet1_1": torchvisions("squeezenet1_1"),
    "squeezenet1_1, folded": lambda: halved(torchvision.models.squeezenet1_1(weights=None), grid=True),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_executed_equals_the_operators_of_the_deployed_network(name: str) -> None:
    model, example = BUILDERS[name](), torch.randn(1, 3, 32, 32)
    cost = count(model, example)
    net: Any = epitorch.deploy(model, example)
    multiply_adds, interpolation = executed(net, example)
    assert cost.madds == multiply_adds + interpolation
    assert cost.madds_interpolation == interpolation
    assert (interpolation == 0) == ("folded" in name)
    assert cost.uncounted == cost.operators == ()
    reused = {layer.name: layer.madds for layer in cost.layers if layer.kind.startswith("Epitome")}
    assert reused == {layer.name: layer.madds for layer in net.deployment.layers}
    with torch.no_grad():  # negative control: other starts, other work
        for layer in model.modules():
            if isinstance(layer, EpitomeLayer):
                layer.snap_routing()
    assert (count(model, example).madds < cost.madds) == ("folded" not in name)


def test_the_windows_run_on_diagonals() -> None:
    net: Any = epitorch.deploy(wsnet(), torch.randn(1, 3, 32, 32))
    assert [layer.strategy for layer in net.deployment.layers] == [
        "integral",
        "wrapped_integral",
        "integral",
        "integral",
    ]
    assert all(layer.madds < layer.madds_dense for layer in net.deployment.layers)


@pytest.mark.parametrize("name", ["mobilenetv2-0.18", "resnet18", "wsnet"])
def test_a_deployed_network_counts_as_the_trained_one(name: str) -> None:
    model, example = BUILDERS[name](), torch.randn(2, 3, 32, 32)
    cost, deployed = count(model, example), count(epitorch.deploy(model, example), example)
    assert deployed.madds == cost.madds
    assert deployed.madds_interpolation == cost.madds_interpolation > 0
    assert (deployed.params, deployed.params_epitome, deployed.params_routing) == (
        cost.params,
        cost.params_epitome,
        cost.params_routing,
    )
    dense = count(epitorch.deploy(model, example, strategy="dense"), example)  # negative control
    assert (dense.madds, dense.madds_interpolation) == (cost.madds_dense, 0)
    assert dense.madds != cost.madds


@pytest.mark.parametrize("form", ["separable", "partial"])
def test_an_input_without_a_batch_is_one_sample_of_a_deployed_network_too(form: Any) -> None:
    image = torch.randn(3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1))
    epitorch.convert_(model, epitorch.plan(model, image[None], ratio=6, form=form, axes="out"))
    deployed = epitorch.deploy(model, image[None], strategy="reuse")
    assert not any(isinstance(module, nn.Conv2d) for module in deployed)
    assert count(deployed, image).madds == count(deployed, image[None]).madds == count(model, image).madds
