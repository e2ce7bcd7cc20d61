"""EfficientNet: which layers the plan takes, sizes against arithmetic and the paper, and grouped squeeze-excitation."""

from __future__ import annotations

from collections import Counter
from math import sqrt
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import epitorch
from epitorch.errors import ConversionError, InputError
from epitorch.models.efficientnet import efficientnet, efficientnet_plan, group_squeeze_excitation_
from epitorch.models.inverted import scaled
from epitorch.plans import planned_params

IMAGE = torch.zeros(1, 3, 224, 224)


def on_meta(variant: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return efficientnet(variant, **options)


@pytest.mark.parametrize("variant, blocks, printed", [("b0", 15, "3.92"), ("b1", 21, "5.46")])
def test_the_two_1x1_of_each_expansion_give_the_printed_size(variant: str, blocks: int, printed: str) -> None:
    model = on_meta(variant)
    plan = efficientnet_plan(model, 0.5)
    modules: dict[str, Any] = dict(model.named_modules())
    by_hand = sum(p.numel() for p in model.parameters())
    for name, layer in plan.layers.items():
        out, inputs, *_ = modules[name].weight.shape
        shape = (out // 2, inputs) if name.endswith("conv_pw") else (out, inputs // 2)
        assert layer.epitome_shape == (*shape, 1, 1)
        by_hand -= out * inputs // 2 - 2  # half of the weight, and a start for each of two blocks
    assert Counter(name.rpartition(".")[2] for name in plan.layers) == {"conv_pw": blocks, "conv_pwl": blocks}
    assert planned_params(model, plan) == by_hand
    assert f"{by_hand / 1e6:.2f}" == printed


def test_what_stays_has_a_reason() -> None:
    model = on_meta("b0")
    plan = efficientnet_plan(model, 0.5)
    assert Counter(plan.left.values()) == {
        "depthwise": 16,
        "squeeze_excitation": 32,
        "no_expansion": 1,
        "stem": 1,
        "last_conv": 1,
        "classifier": 1,
    }
    weights = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    assert set(plan.layers) | set(plan.left) == weights
    both = efficientnet_plan(model, 0.5, last_conv=True, classifier=0.25)
    assert set(both.layers) - set(plan.layers) == {"conv_head", "classifier"}
    assert both.layers["classifier"].epitome_shape == (1000, 320)


def test_torchvisions_network_has_the_same_plan() -> None:
    with torch.device("meta"):
        theirs = torchvision.models.efficientnet_b0()
    plan = efficientnet_plan(theirs, 0.5)
    ours = efficientnet_plan(on_meta("b0"), 0.5)
    assert [layer.epitome_shape for layer in plan.layers.values()] == [
        layer.epitome_shape for layer in ours.layers.values()
    ]
    assert list(plan.left.values()).count("squeeze_excitation") == 32


def test_a_converted_network_gives_what_its_dense_weights_give() -> None:
    torch.manual_seed(0)
    model = efficientnet("b0", 7).eval()
    epitorch.convert_(model, efficientnet_plan(model, 0.5))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = model(x)
        folded = epitorch.to_dense_(model)(x)
        model.blocks[3][0].conv_pw.weight.neg_()  # type: ignore[index, union-attr]  # negative control
        other = model(x)
    assert wanted.shape == (2, 7)
    torch.testing.assert_close(folded, wanted)
    assert not torch.allclose(other, wanted, rtol=1e-3, atol=1e-4)


# ---- front_heavy ----


def test_front_heavy_keeps_less_in_front_and_more_at_the_end() -> None:
    model = on_meta("b0")
    plan = efficientnet_plan(model, 0.5, policy="front_heavy")
    names, modules = list(plan.layers), dict(model.named_modules())
    for i, name in enumerate(names):
        axis = i % 2
        dense: Any = modules[name]
        share = 0.5 ** (1.5 - i / (len(names) - 1))
        assert plan.layers[name].epitome_shape[axis] == scaled(share, dense.weight.shape[axis])
    assert planned_params(model, plan) > planned_params(model, efficientnet_plan(model, 0.5))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"(?s)policy is unknown.*uniform \| front_heavy"):
        efficientnet_plan(on_meta("b0"), 0.5, policy="sideways")  # type: ignore[arg-type]


# ---- grouped squeeze-excitation ----


def test_grouped_squeeze_gives_the_size_of_the_later_model() -> None:
    """Its published size is 3.11 M: 1x1 convolutions and the last one halved, squeeze-excitation grouped."""
    model = on_meta("b0", grouped_squeeze=True)
    assert f"{planned_params(model, efficientnet_plan(model, 0.5, last_conv=True)) / 1e6:.2f}" == "3.11"
    assert planned_params(on_meta("b0"), efficientnet_plan(on_meta("b0"), 0.5, last_conv=True)) > 3_700_000


def test_each_squeezed_channel_sees_its_own_inputs_only() -> None:
    torch.manual_seed(0)
    model = timm.create_model("efficientnet_b0", num_classes=3)
    names = group_squeeze_excitation_(model)
    assert len(names) == 32
    squeeze: Any = model.blocks[1][0].se  # 96 channels, 4 squeezed
    assert (squeeze.conv_reduce.groups, squeeze.conv_reduce.weight.shape) == (4, (4, 24, 1, 1))
    assert squeeze.conv_expand.weight.shape == (96, 1, 1, 1)
    means = torch.randn(1, 96, 1, 1)
    changed = means.clone()
    changed[:, :24] += 1
    with torch.no_grad():
        before, after = (squeeze.conv_expand(squeeze.conv_reduce(value)) for value in (means, changed))
    assert not torch.allclose(before[:, :24], after[:, :24])
    torch.testing.assert_close(before[:, 24:], after[:, 24:])
    assert model.eval()(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def test_new_convolutions_are_drawn_as_timm_draws_them() -> None:
    torch.manual_seed(0)
    model = efficientnet("b1", grouped_squeeze=True)
    convs: list[Any] = [module for name, module in model.named_modules() if name.endswith("conv_expand")]
    # variance 2 / fan-out, the fan-out being that of one group
    drawn = torch.cat([conv.weight.flatten() * sqrt(conv.out_channels / conv.groups / 2) for conv in convs])
    assert drawn.numel() > 10_000
    assert abs(drawn.std().item() - 1) < 0.03
    assert all(not conv.bias.any() for conv in convs)


def test_costs_of_the_option_are_counted() -> None:
    plain, grouped = (epitorch.count(on_meta("b0", grouped_squeeze=flag), IMAGE.to("meta")) for flag in (False, True))
    assert (plain.params, grouped.params) == (5_288_548, 4_679_268)
    assert 0 < plain.madds - grouped.madds < 1_000_000


# ---- refusals ----


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "tf_efficientnetv2_b0",
            r"(?s)is for MobileNetV2 and EfficientNet.*outside of its blocks: conv_stem, .*\.\.\.",
        ),
        ("mobilenetv3_small_050", r"(?s)is for MobileNetV2 and EfficientNet.*epitorch\.plan"),
        ("mixnet_s", r"(?s)blocks\.1\.0: this block has no form.*1x1, depthwise, 1x1"),
        ("resnet18", r"(?s)is for MobileNetV2 and EfficientNet.*got: +ResNet"),
    ],
)
def test_other_networks_are_refused_by_name(name: str, said: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ConversionError, match=said):
        efficientnet_plan(model, 0.5)


def test_grouping_is_refused_where_there_is_nothing_or_it_does_not_divide() -> None:
    with pytest.raises(ConversionError, match="nothing to group"):
        group_squeeze_excitation_(timm.create_model("efficientnet_lite0"))
    squeeze = nn.Module()
    squeeze.conv_reduce, squeeze.conv_expand = nn.Conv2d(10, 4, 1), nn.Conv2d(4, 10, 1)
    model = nn.Sequential(squeeze)
    with pytest.raises(ConversionError, match=r"(?s)0: this squeeze-excitation cannot be grouped.*multiple of its 4"):
        group_squeeze_excitation_(model)
    assert squeeze.conv_reduce.groups == 1
    with pytest.raises(InputError, match="did you mean 'b0'"):
        efficientnet("b00")
