"""Wrong arguments and inputs: one family of errors that say what was asked, expected and got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import epitorch
from epitorch.errors import ConversionError, EpitorchError, ShapeError
from epitorch.nn import (
    EpitomeConv1d,
    EpitomeConv2d,
    EpitomeConv3d,
    EpitomeConvTranspose1d,
    EpitomeConvTranspose2d,
    EpitomeLayer,
    EpitomeLinear,
)

Make = Callable[[], EpitomeLayer]


def conv(*args: Any, **options: Any) -> Make:
    arguments: dict[str, Any] = {"epitome_shape": (4, 6, 3, 3), **options}
    return lambda: EpitomeConv2d(*(args or (6, 8, 3)), **arguments)


def missing(words: tuple[str, ...], error: Exception) -> list[str]:
    """Words that the message lacks."""
    return [word for word in words if word not in str(error)]


def linear(*args: Any, **options: Any) -> Make:
    return lambda: EpitomeLinear(*args, **options)


CONSTRUCTORS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "zero-in-channels": (conv(0, 8, 3), ("EpitomeConv2d", "in_channels", "0")),
    "negative-out-channels": (conv(6, -8, 3), ("EpitomeConv2d", "out_channels", "-8")),
    "zero-kernel": (conv(6, 8, 0), ("EpitomeConv2d", "kernel_size", "0")),
    "negative-kernel": (conv(6, 8, (3, -1)), ("EpitomeConv2d", "kernel_size", "-1")),
    "fractional-channels": (conv(6, 8.0, 3), ("EpitomeConv2d", "out_channels", "8.0")),
    "zero-stride": (conv(stride=0), ("EpitomeConv2d", "stride", "0")),
    "negative-dilation": (conv(dilation=-1), ("EpitomeConv2d", "dilation", "-1")),
    "negative-padding": (conv(padding=-1), ("EpitomeConv2d", "padding", "-1")),
    "zero-groups": (conv(groups=0), ("EpitomeConv2d", "groups", "0")),
    "groups-do-not-divide-in": (conv(groups=4), ("EpitomeConv2d", "in_channels", "groups")),
    "groups-do-not-divide-out": (conv(6, 8, 3, groups=3), ("EpitomeConv2d", "out_channels", "groups")),
    "same-with-stride": (conv(padding="same", stride=2), ("EpitomeConv2d", "same")),
    "unknown-padding-word": (conv(padding="full"), ("EpitomeConv2d", "full")),
    "unknown-padding-mode": (conv(padding_mode="mirror"), ("EpitomeConv2d", "mirror")),
    "kernel-of-another-rank": (conv(6, 8, (3, 3, 3)), ("EpitomeConv2d", "kernel_size", "(3, 3, 3)")),
    "zero-epitome": (conv(epitome_shape=(4, 0, 3, 3)), ("epitome shape", "(4, 0, 3, 3)")),
    "negative-epitome": (conv(epitome_shape=(-4, 6, 3, 3)), ("epitome shape", "(-4, 6, 3, 3)")),
    "fractional-epitome": (conv(epitome_shape=(4.5, 6, 3, 3)), ("epitome shape", "4.5")),
    "epitome-with-too-few-sizes": (conv(epitome_shape=(4, 6)), ("epitome", "4 sizes", "2 sizes")),
    "epitome-with-too-many-sizes": (conv(epitome_shape=(4, 6, 3, 3, 3)), ("epitome", "4 sizes", "5 sizes")),
    "epitome-not-a-sequence": (conv(epitome_shape=4), ("epitome", "4")),
    "epitome-missing": (conv(epitome_shape=None), ("epitome", "None")),
    "flat-epitome-with-a-kernel": (conv(flatten_kernel=True), ("epitome", "2 sizes", "4 sizes")),
    "block-out-too-long": (conv(block_out=5), ("block_out", "1 to 4", "5")),
    "block-in-too-long": (conv(block_in=7), ("block_in", "1 to 6", "7")),
    "zero-block": (conv(block_in=0), ("block_in", "1 to 6", "0")),
    "fractional-block": (conv(block_out=2.0), ("block_out", "2.0")),
    "group-length-does-not-divide": (conv(group_length=3), ("group_length", "divisor of 4", "3")),
    "zero-group-length": (conv(group_length=0), ("group_length", "0")),
    "negative-group-length": (conv(group_length=-2), ("group_length", "-2")),
    "unknown-spatial-starts": (conv(spatial_starts="both"), ("spatial_starts", "in | out | grid", "both")),
    "unknown-channel-starts": (conv(channel_starts="pair"), ("channel_starts", "separable | grid", "pair")),
    "unknown-index": (conv(index="learned"), ("index", "learner | direct | fixed", "learned")),
    "momentum-of-one": (conv(momentum=1.0), ("momentum", "1.0")),
    "negative-momentum": (conv(momentum=-0.1), ("momentum", "-0.1")),
    "transposed-one-size": (
        lambda: EpitomeConvTranspose1d(4, 6, 3, epitome_shape=(4,)),
        ("epitome shape", "at least two sizes", "(4,)"),
    ),
    "transposed-groups": (
        lambda: EpitomeConvTranspose2d(6, 8, 3, groups=4, epitome_shape=(6, 2, 3, 3)),
        ("EpitomeConvTranspose2d", "groups"),
    ),
    "transposed-padding-mode": (
        lambda: EpitomeConvTranspose2d(6, 8, 3, padding_mode="reflect", epitome_shape=(6, 4, 3, 3)),
        ("EpitomeConvTranspose2d", "zeros"),
    ),
    "linear-zero": (linear(0, 4, epitome_shape=(2, 2)), ("in_features", "0")),
    "linear-negative": (linear(4, -4, epitome_shape=(2, 2)), ("out_features", "-4")),
    "linear-epitome-rank": (linear(4, 4, epitome_shape=(2, 2, 1)), ("epitome", "2 sizes", "3 sizes")),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_wrong_arguments(name: str) -> None:
    make, words = CONSTRUCTORS[name]
    with pytest.raises(EpitorchError) as caught:
        make()
    assert missing((*words, "expected", "got"), caught.value) == []


INPUTS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "conv1d-rank": (lambda: EpitomeConv1d(6, 8, 3, epitome_shape=(4, 6, 3)), (2, 6, 5, 5)),
    "conv2d-rank": (conv(), (2, 2, 6, 5, 5)),
    "conv2d-rank-too-low": (conv(), (6, 5)),
    "conv2d-channels": (conv(), (2, 5, 5, 5)),
    "conv2d-unbatched-channels": (conv(), (5, 5, 5)),
    "conv3d-rank": (lambda: EpitomeConv3d(6, 8, 3, epitome_shape=(4, 6, 3, 3, 3)), (6, 5, 5)),
    "transposed": (lambda: EpitomeConvTranspose2d(6, 8, 3, epitome_shape=(6, 4, 3, 3)), (2, 8, 5, 5)),
    "linear-features": (linear(6, 8, epitome_shape=(4, 6)), (2, 5)),
    "linear-scalar": (linear(6, 8, epitome_shape=(4, 6)), ()),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_wrong_input(name: str, train: bool) -> None:
    make, shape = INPUTS[name]
    layer = make().train(train)
    layer.qualified_name = "blocks.2.conv"
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with pytest.raises(EpitorchError) as caught:
        layer(torch.zeros(shape))
    assert missing(("blocks.2.conv", "expected", "6", "got", str(shape)), caught.value) == []
    for key, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_a_layer_outside_a_model_is_named_by_its_class() -> None:
    with pytest.raises(EpitorchError, match="EpitomeConv2d"):
        conv()()(torch.zeros(2, 5, 5, 5))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda starts: starts.pop("in"), ("'in'",)),
        (lambda starts: starts.update(depth=torch.zeros(2)), ("'depth'",)),
        (lambda starts: starts.update(out=torch.zeros(3)), ("(3,)", "(2,)")),
        (lambda starts: starts.update(spatial=torch.zeros(2)), ("'spatial': (2,)", "(2, 1)")),
        (lambda starts: starts.update(out=torch.tensor([0.5, float("inf")])), ("out", "finite")),
    ],
    ids=["missing", "superfluous", "shape", "spatial-rank", "infinite"],
)
def test_set_starts_checks_axes_shapes_and_values(change: Any, words: tuple[str, ...]) -> None:
    layer = EpitomeConv2d(6, 8, 3, epitome_shape=(4, 3, 4, 3))
    layer.qualified_name = "stem"
    starts = {axis: value.clone() for axis, value in layer.starts().items()}
    change(starts)
    before = {axis: value.clone() for axis, value in layer.starts().items()}
    with pytest.raises(EpitorchError) as caught:
        layer.set_starts(starts)
    assert missing((*words, "stem", "expected", "got"), caught.value) == []
    for axis, value in layer.starts().items():
        torch.testing.assert_close(value, before[axis], rtol=0, atol=0)


@pytest.mark.parametrize("size", [(3, 9), (7, 20), (7,), (7, 9, 9, 9, 9)])
def test_output_size_out_of_reach(size: tuple[int, ...]) -> None:
    layer = EpitomeConvTranspose2d(6, 8, 3, stride=2, padding=1, epitome_shape=(6, 4, 3, 3))
    with pytest.raises(EpitorchError) as caught:
        layer(torch.zeros(2, 6, 4, 5), output_size=size)
    assert missing(("EpitomeConvTranspose2d", "expected", "got", str(size)), caught.value) == []


@pytest.mark.parametrize("size", [10**12, 10**18], ids=["too much memory", "more than addresses"])
def test_an_epitome_that_no_memory_holds(size: int) -> None:
    with pytest.raises(ShapeError, match=r"no memory for this epitome(.|\n)*give a smaller epitome_shape"):
        EpitomeConv2d(8, 16, 3, epitome_shape=(size, 800, 3, 3))
    model = nn.Sequential(nn.Conv2d(8, 16, 3))
    with pytest.raises(ConversionError, match="0: there is no memory for this epitome"):
        epitorch.convert_(model, epitorch.Plan({"0": epitorch.LayerPlan((size, 800, 3, 3))}))
    assert type(model[0]) is nn.Conv2d
