"""What is in the state, what counts as a parameter, and which states load into which layers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import epitorch.nn as epi
from epitorch.nn import EpitomeConv2d, EpitomeLayer, EpitomeLinear

KINDS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Linear")
INDEXES = ("learner", "direct", "fixed")
MAP_KEYS = [
    "epitome",
    "bias",
    "routing_map.out_starts",
    "routing_map.in_starts",
    "routing_map.spatial_starts",
    "routing_map.frozen",
]


def conv(index: str = "learner", **options: Any) -> EpitomeConv2d:
    arguments: dict[str, Any] = {"epitome_shape": (5, 3, 4, 3), "padding": 1, **options}
    return EpitomeConv2d(6, 12, 3, index=index, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_positional_arguments_are_torchs(kind: str) -> None:
    """Names and order of torch's constructor, then keyword-only arguments; only the shape must be given."""
    own = list(inspect.signature(getattr(epi, f"Epitome{kind}")).parameters.values())
    theirs = list(inspect.signature(getattr(nn, kind)).parameters.values())
    assert [(p.name, p.default) for p in own[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    rest = own[len(theirs) :]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in rest)
    assert {p.name: p.default for p in rest} == {
        "epitome_shape": inspect.Parameter.empty,
        "block_out": None,
        "block_in": None,
        "spatial_starts": "in",
        "channel_starts": "separable",
        "index": "learner",
        "group_length": None,
        "flatten_kernel": False,
        "momentum": 0.97,
        "spatial_shift": False,
    }
    assert issubclass(getattr(epi, f"Epitome{kind}"), EpitomeLayer)


@pytest.mark.parametrize("index", INDEXES)
def test_keys_of_the_state(index: str) -> None:
    keys = list(conv(index).state_dict())
    assert sorted(key for key in keys if not key.startswith("learner.")) == sorted(MAP_KEYS)
    assert any(key.startswith("learner.") for key in keys) == (index == "learner")


def test_only_direct_starts_are_parameters() -> None:
    names = {index: {name for name, _ in conv(index).named_parameters()} for index in INDEXES}
    starts = {"routing_map.out_starts", "routing_map.in_starts", "routing_map.spatial_starts"}
    assert names["fixed"] == {"epitome", "bias"}
    assert names["direct"] == {"epitome", "bias"} | starts
    assert {name for name in names["learner"] if not name.startswith("learner.")} == {"epitome", "bias"}


def test_a_layer_without_starts_has_no_learner() -> None:
    layer = EpitomeConv2d(6, 6, 3, epitome_shape=(6, 6, 3, 3))
    assert layer.learner is None
    assert layer.starts() == {}
    assert sorted(layer.state_dict()) == ["bias", "epitome", "routing_map.frozen"]


def test_routing_map_reads_like_a_dict() -> None:
    layer = conv("direct")
    assert dict(layer.routing_map.items()).keys() == {"out", "in", "spatial"}
    assert layer.routing_map["in"].tolist() == layer.starts()["in"].tolist()
    assert isinstance(layer.routing_map["in"], nn.Parameter)
    with pytest.raises(KeyError):
        EpitomeLinear(4, 4, epitome_shape=(4, 2)).routing_map["out"]


def test_names_inside_a_model() -> None:
    model = nn.Sequential(nn.Identity(), conv("fixed"))
    assert {"1.routing_map.out_starts", "1.routing_map.frozen", "1.epitome"} <= set(model.state_dict())


@pytest.mark.parametrize("index", INDEXES)
def test_generated_weights_are_not_in_the_state(index: str) -> None:
    """Neither before nor after use, in either mode: no tensor of the weight's size is kept."""
    layer = conv(index)
    for mode in (True, False):
        layer.train(mode)(torch.randn(2, 6, 5, 5))
        assert layer.weight.numel() > layer.epitome.numel()
        kept = [*layer.state_dict().values(), *layer.buffers(), *layer.parameters()]
        assert layer.weight.numel() not in {tensor.numel() for tensor in kept}


def test_a_state_with_a_learner_does_not_load_into_a_layer_without() -> None:
    deployed = conv()
    deployed.drop_learner()
    with pytest.raises(RuntimeError, match=r"learner\."):
        deployed.load_state_dict(conv().state_dict())


def test_a_state_that_lost_its_learner_but_is_not_frozen_does_not_load() -> None:
    state = {key: value for key, value in conv().state_dict().items() if not key.startswith("learner.")}
    with pytest.raises(RuntimeError, match=r"learner\."):
        conv().load_state_dict(state)
    state["routing_map.frozen"] = torch.tensor(True)
    conv().load_state_dict(state)


def test_a_missing_start_is_reported() -> None:
    state = {key: value for key, value in conv("fixed").state_dict().items() if key != "routing_map.in_starts"}
    with pytest.raises(RuntimeError, match=r"routing_map\.in"):
        conv("fixed").load_state_dict(state)


def test_a_state_of_another_shape_does_not_load() -> None:
    with pytest.raises(RuntimeError, match="epitome"):
        conv("fixed").load_state_dict(conv("fixed", epitome_shape=(4, 3, 4, 3)).state_dict())


def test_deployed_and_loaded_in_a_model_on_the_way_back_to_training() -> None:
    """A deployed layer trains on with its map; nothing is left that would move it."""
    layer = conv()
    layer.drop_learner()
    before = {axis: value.clone() for axis, value in layer.starts().items()}
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    epitome = layer.epitome.detach().clone()
    layer.train()(torch.randn(2, 6, 5, 5)).square().mean().backward()
    optimiser.step()
    assert not torch.equal(layer.epitome, epitome)
    for axis, value in layer.starts().items():
        torch.testing.assert_close(value, before[axis], rtol=0, atol=0)


@pytest.mark.parametrize("trainable", [True, False])
def test_to_dense_keeps_mode_dtype_and_trainability(trainable: bool) -> None:
    layer = conv(dtype=torch.bfloat16).requires_grad_(trainable).eval()
    dense = layer.to_dense()
    assert dense.weight.dtype == dense.bias.dtype == torch.bfloat16
    assert dense.training is False
    assert dense.weight.requires_grad is dense.bias.requires_grad is trainable
    assert layer.train().to_dense().training is True
    assert dense.weight.data_ptr() != layer.epitome.data_ptr()


def test_to_dense_shares_no_memory() -> None:
    layer = EpitomeConv2d(6, 6, 3, epitome_shape=(6, 6, 3, 3))
    dense = layer.to_dense()
    before = layer.weight.detach().clone()
    with torch.no_grad():
        dense.weight.zero_()
        dense.bias.fill_(7)
    torch.testing.assert_close(layer.weight, before)
    assert not (layer.bias == 7).any()


def test_the_weight_property_is_differentiable() -> None:
    layer = conv("direct")
    assert layer.weight.shape == (12, 6, 3, 3)
    layer.weight.square().sum().backward()
    assert layer.epitome.grad.abs().max() > 0
    assert layer.routing_map["spatial"].grad.abs().max() > 0


def test_repr_shows_torchs_arguments_and_the_epitome() -> None:
    text = repr(conv("direct", stride=2, dilation=2, groups=2, padding_mode="circular", bias=False))
    for word in ("6, 12", "stride=(2, 2)", "dilation=(2, 2)", "groups=2", "circular", "bias=False"):
        assert word in text
    assert "(5, 3, 4, 3)" in text
    assert "direct" in text
    assert "in_features=4" in repr(EpitomeLinear(4, 8, epitome_shape=(2, 4)))


def test_repr_shows_which_starts_there_are() -> None:
    text = repr(EpitomeLinear(12, 8, epitome_shape=(4, 12), block_in=3, channel_starts="grid_out", group_length=2))
    assert "epitome_shape=(4, 12), index=learner, block_in=3, channel_starts=grid_out, group_length=2" in text
    assert "block" not in repr(EpitomeLinear(4, 8, epitome_shape=(2, 4)))  # the default


def test_repr_shows_what_is_not_the_default() -> None:
    layer = epi.EpitomeConvTranspose1d(4, 6, 3, stride=2, output_padding=1, epitome_shape=(2, 3, 3), momentum=0.9)
    assert "output_padding=(1,)" in repr(layer)
    assert "momentum=0.9" in repr(layer)
    usual = epi.EpitomeConvTranspose1d(4, 6, 3, epitome_shape=(2, 3, 3))
    fixed = epi.EpitomeConvTranspose1d(4, 6, 3, epitome_shape=(2, 3, 3), momentum=0.9, index="fixed")
    assert all(word not in repr(usual) for word in ("output_padding", "momentum"))
    assert "momentum" not in repr(fixed)  # nothing learns a map
