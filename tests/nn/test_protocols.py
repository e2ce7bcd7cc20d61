"""What torch and its users do to modules from outside: reset, meta memory, frozen parameters, failed loads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epitorch.errors import StartsError
from epitorch.nn import EpitomeConv2d, EpitomeConv3d, EpitomeLinear


def conv(index: str = "learner") -> EpitomeConv2d:
    return EpitomeConv2d(8, 16, 1, epitome_shape=(4, 8, 1, 1), index=index)


@pytest.mark.parametrize("index", ["learner", "direct", "fixed"])
def test_resetting_every_module_gives_a_fresh_layer(index: str) -> None:
    layer = conv(index)
    layer.set_starts({"out": torch.tensor([3.0, 3.0, 3.0, 3.0])})
    layer.freeze_routing()
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    expected = torch.tensor([0.25 if index == "learner" else 0.0, 1.0, 2.0, 3.0])
    torch.testing.assert_close(layer.starts()["out"].detach(), expected)
    assert not layer.routing_map.is_frozen
    if index == "learner":
        torch.testing.assert_close(layer.learner(torch.randn(2, 8, 3, 3))["out"].detach(), expected)


def test_meta_memory_is_filled_by_a_reset() -> None:
    layer = EpitomeConv2d(8, 16, 1, epitome_shape=(4, 8, 1, 1), device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    torch.testing.assert_close(layer.starts()["out"], torch.tensor([0.25, 1.0, 2.0, 3.0]))
    assert not bool(layer.routing_map.frozen)
    assert layer(torch.randn(2, 8, 3, 3)).isfinite().all()


def test_frozen_starts_stay_frozen_under_loading_and_thawing() -> None:
    layer = conv("direct")
    state = layer.state_dict()
    layer.requires_grad_(False)
    layer.load_state_dict(state)
    layer.freeze_routing()
    layer.unfreeze_routing()
    assert not any(p.requires_grad for p in layer.parameters())
    trained = conv("direct")
    trained.freeze_routing()
    assert not trained.routing_map["out"].requires_grad
    trained.unfreeze_routing()
    assert trained.routing_map["out"].requires_grad


def test_a_failed_strict_load_leaves_the_learner() -> None:
    other = EpitomeConv2d(8, 16, 1, epitome_shape=(8, 8, 1, 1))
    other.drop_learner()
    layer = conv()
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(other.state_dict())
    assert layer.learner is not None


def test_snapping_starts_that_are_not_finite_is_refused() -> None:
    layer = conv("fixed")
    with torch.no_grad():
        layer.starts()["out"][1] = float("nan")
    with pytest.raises(StartsError, match="not a finite number"):
        layer.snap_routing()
    assert not layer.routing_map.is_frozen


@pytest.mark.parametrize("space", [(1, 4, 4), (4, 1, 1), (4, 3, 3)])
def test_single_samples_of_a_3d_pointwise_layer(space: tuple[int, ...]) -> None:
    layer = EpitomeConv3d(4, 8, 1, epitome_shape=(4, 4, 1, 1, 1), index="fixed").eval()
    for x in (torch.randn(4, *space), torch.randn(2, 4, *space)):
        for given in (x, x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x):
            torch.testing.assert_close(layer(given), layer.to_dense()(given), atol=1e-5, rtol=1e-5)


def test_to_dense_keeps_the_flags_of_weight_and_bias_apart() -> None:
    layer = EpitomeLinear(8, 8, epitome_shape=(4, 8))
    layer.bias.requires_grad_(False)
    dense = layer.to_dense()
    assert isinstance(dense, nn.Linear)
    assert (dense.weight.requires_grad, dense.bias.requires_grad) == (True, False)
