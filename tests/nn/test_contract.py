"""The contract over a grid of layers: dimensions, groups, padding, kinds of starts, compressed axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reference
from contract import CLOSE, LayerCase, LayerContract


def conv2d(name: str, shape: tuple[int, ...], torch_options: dict[str, Any] | None = None, **epitome: Any) -> LayerCase:
    """6 -> 8 channels, 3x3."""
    named = {"epitome_shape": shape, **epitome}
    return LayerCase(name, "Conv2d", (6, 8, 3), (2, 6, 7, 6), named, torch_options or {})


class TestConv2dAxes(LayerContract):
    """Each axis compressed alone, and together, in all kinds of starts."""

    cases = (
        conv2d("all-in", (3, 4, 5, 4)),
        conv2d("nothing", (8, 6, 3, 3)),
        conv2d("out", (4, 6, 3, 3)),
        conv2d("out-last-block-cut", (3, 6, 3, 3)),
        conv2d("in", (8, 3, 3, 3)),
        conv2d("in-last-block-cut", (8, 4, 3, 3)),
        conv2d("out-in", (3, 4, 3, 3)),
        conv2d("short-blocks", (5, 4, 3, 3), block_out=3, block_in=2),
        conv2d("short-blocks-uncompressed", (8, 6, 4, 3), block_out=3, block_in=4, spatial_starts="grid"),
        conv2d("spatial-in", (8, 6, 5, 4), block_in=3),
        conv2d("spatial-out", (8, 6, 5, 4), block_out=3, spatial_starts="out"),
        conv2d("one-spatial-axis", (8, 6, 3, 5), block_out=4, spatial_starts="out"),
        conv2d("spatial-smaller", (8, 6, 2, 2), block_in=3),
        conv2d("spatial-length-1", (8, 6, 1, 2), block_in=3),
        conv2d("spatial-one-start", (8, 6, 4, 4)),
        conv2d("all-out", (3, 4, 5, 4), spatial_starts="out"),
        conv2d("all-grid", (3, 4, 5, 4), spatial_starts="grid"),
        conv2d("out-spatial-in", (3, 6, 4, 4), block_in=3),
        conv2d("in-spatial-out", (8, 4, 4, 4), block_out=3, spatial_starts="out"),
        conv2d("spatial-shift", (3, 4, 3, 3), spatial_shift=True),
        conv2d("one-filter", (1, 6, 5, 5), spatial_starts="out"),
        conv2d("one-channel", (8, 1, 5, 5)),
        conv2d("expansion", (10, 7, 5, 5), block_out=8),
    )


class TestConv2dChannelGrid(LayerContract):
    """Channel starts for each pair of blocks."""

    cases = (
        conv2d("out", (4, 6, 3, 3), channel_starts="grid"),
        conv2d("in", (8, 4, 3, 3), channel_starts="grid"),
        conv2d("in-own-shift", (8, 6, 3, 3), block_out=3, channel_starts="grid"),
        conv2d("both", (3, 4, 3, 3), channel_starts="grid"),
        conv2d("both-blocks", (5, 4, 3, 3), block_out=3, block_in=2, channel_starts="grid"),
        conv2d("one-channel", (4, 1, 3, 3), channel_starts="grid"),
        conv2d("spatial-in", (3, 4, 4, 3), channel_starts="grid"),
        conv2d("spatial-out", (3, 4, 4, 3), channel_starts="grid", spatial_starts="out"),
        conv2d("spatial-grid", (3, 4, 4, 5), channel_starts="grid", spatial_starts="grid"),
        conv2d("super-index", (6, 4, 3, 3), channel_starts="grid", group_length=2),
    )


class TestConv2dSuperIndex(LayerContract):
    """Starts on a grid of multiples of the group length."""

    cases = (
        conv2d("out", (4, 6, 3, 3), group_length=2),
        conv2d("in", (8, 4, 3, 3), group_length=2),
        conv2d("short-block", (6, 6, 3, 3), group_length=3, block_out=4),
        conv2d("out-in-spatial", (4, 4, 4, 4), group_length=2),
        conv2d("one-is-plain", (4, 4, 3, 3), group_length=1),
    )


class TestConv2dTorchOptions(LayerContract):
    """Everything that torch's convolution takes."""

    cases = (
        conv2d("stride", (3, 4, 3, 3), {"stride": 2}),
        conv2d("stride-pair", (3, 4, 3, 3), {"stride": (1, 2), "padding": (2, 1)}),
        conv2d("dilation", (3, 4, 3, 3), {"dilation": (2, 1), "padding": 2}),
        conv2d("same", (3, 4, 3, 3), {"padding": "same", "dilation": 2}),
        conv2d("valid", (3, 4, 3, 3), {"padding": "valid", "stride": 2}),
        conv2d("reflect", (3, 4, 3, 3), {"padding": 1, "padding_mode": "reflect"}),
        conv2d("replicate", (3, 4, 3, 3), {"padding": (2, 1), "padding_mode": "replicate", "stride": 2}),
        conv2d("circular", (3, 4, 3, 3), {"padding": "same", "padding_mode": "circular"}),
        conv2d("no-bias", (3, 4, 3, 3), {"bias": False}),
        conv2d("groups", (3, 2, 3, 3), {"groups": 2}),
        conv2d("groups-grid", (3, 2, 4, 3), {"groups": 2}, channel_starts="grid", spatial_starts="out"),
        LayerCase(
            "depthwise",
            "Conv2d",
            (6, 6, 3),
            (2, 6, 5, 5),
            {"epitome_shape": (4, 1, 3, 3)},
            {"groups": 6, "padding": 1},
        ),
        LayerCase(
            "depthwise-spatial",
            "Conv2d",
            (6, 12, 3),
            (2, 6, 5, 5),
            {"epitome_shape": (1, 1, 6, 6), "spatial_starts": "out"},
            {"groups": 6},
        ),
        LayerCase("pointwise", "Conv2d", (6, 12, 1), (2, 6, 4, 4), {"epitome_shape": (4, 6, 1, 1)}),
        LayerCase("unbatched", "Conv2d", (6, 8, 3), (6, 7, 6), {"epitome_shape": (3, 4, 3, 3)}),
    )


class TestConv2dFlat(LayerContract):
    """One epitome matrix for the weight viewed as `(C_out, C_in/groups * prod K)`."""

    cases = (
        conv2d("both", (3, 20), flatten_kernel=True),
        conv2d("in", (8, 9), flatten_kernel=True),
        conv2d("grid", (4, 27), flatten_kernel=True, channel_starts="grid"),
        conv2d("groups", (3, 10), {"groups": 2, "padding": 1}, flatten_kernel=True),
    )


class TestConv1d(LayerContract):
    """One spatial axis."""

    cases = (
        LayerCase("both", "Conv1d", (6, 8, 3), (2, 6, 9), {"epitome_shape": (3, 4, 3)}, {"padding": 1}),
        LayerCase(
            "condensed-filter",
            "Conv1d",
            (4, 8, 5),
            (2, 4, 9),
            {"epitome_shape": (1, 4, 20), "spatial_starts": "out"},
            {"stride": 2},
        ),
        LayerCase("all-in", "Conv1d", (6, 8, 3), (2, 6, 9), {"epitome_shape": (3, 4, 5)}, {"dilation": 2}),
        LayerCase(
            "grid",
            "Conv1d",
            (6, 8, 3),
            (2, 6, 9),
            {"epitome_shape": (3, 2, 5), "spatial_starts": "grid", "channel_starts": "grid"},
            {"groups": 2, "padding": 1, "padding_mode": "circular"},
        ),
        LayerCase("flat", "Conv1d", (6, 8, 3), (2, 6, 9), {"epitome_shape": (3, 7), "flatten_kernel": True}),
    )


class TestConv3d(LayerContract):
    """Three spatial axes."""

    cases = (
        LayerCase("both", "Conv3d", (4, 6, 2), (2, 4, 3, 4, 3), {"epitome_shape": (4, 3, 2, 2, 2)}, {"padding": 1}),
        LayerCase("all-in", "Conv3d", (4, 4, 2), (2, 4, 3, 3, 3), {"epitome_shape": (3, 3, 3, 2, 4)}),
        LayerCase(
            "all-out",
            "Conv3d",
            (2, 4, (1, 3, 2)),
            (2, 2, 3, 4, 3),
            {"epitome_shape": (3, 2, 2, 3, 3), "spatial_starts": "out", "channel_starts": "grid"},
            {"padding": "same", "padding_mode": "replicate"},
        ),
        LayerCase(
            "depthwise-grid",
            "Conv3d",
            (4, 4, 2),
            (2, 4, 3, 3, 3),
            {"epitome_shape": (3, 1, 3, 3, 2), "spatial_starts": "grid"},
            {"groups": 4, "stride": (1, 2, 1)},
        ),
        LayerCase("flat", "Conv3d", (4, 6, 2), (2, 4, 3, 3, 3), {"epitome_shape": (4, 10), "flatten_kernel": True}),
    )


class TestConvTranspose(LayerContract):
    """Storage order `(in, out/groups, *K)`; the epitome and the names follow the meaning of the axes."""

    cases = (
        LayerCase("1d", "ConvTranspose1d", (6, 8, 3), (2, 6, 5), {"epitome_shape": (4, 3, 3)}),
        LayerCase(
            "1d-spatial-in",
            "ConvTranspose1d",
            (6, 8, 3),
            (2, 6, 5),
            {"epitome_shape": (4, 3, 5)},
            {"stride": 2},
        ),
        LayerCase(
            "2d-output-padding",
            "ConvTranspose2d",
            (6, 8, 3),
            (2, 6, 4, 3),
            {"epitome_shape": (4, 3, 3, 3), "block_out": 2},
            {"stride": 2, "padding": 1, "output_padding": 1},
        ),
        LayerCase(
            "2d-groups",
            "ConvTranspose2d",
            (6, 8, 3),
            (2, 6, 4, 3),
            {"epitome_shape": (4, 3, 4, 3), "spatial_starts": "out"},
            {"groups": 2, "dilation": 2},
        ),
        LayerCase(
            "2d-grid",
            "ConvTranspose2d",
            (6, 8, 3),
            (2, 6, 4, 3),
            {"epitome_shape": (4, 3, 4, 5), "spatial_starts": "grid", "channel_starts": "grid"},
            {"bias": False},
        ),
        LayerCase(
            "2d-super-index",
            "ConvTranspose2d",
            (6, 8, 2),
            (2, 6, 3, 3),
            {"epitome_shape": (4, 4, 2, 2), "group_length": 2},
        ),
        LayerCase(
            "2d-flat",
            "ConvTranspose2d",
            (6, 8, 3),
            (2, 6, 4, 3),
            {"epitome_shape": (20, 3), "flatten_kernel": True},
            {"groups": 2, "stride": 2, "output_padding": 1},
        ),
        LayerCase(
            "3d",
            "ConvTranspose3d",
            (4, 4, 2),
            (2, 4, 2, 3, 2),
            {"epitome_shape": (3, 3, 3, 2, 2)},
            {"padding": 1},
        ),
    )


class TestLinear(LayerContract):
    """No spatial axes; any number of leading ones."""

    cases = (
        LayerCase("out", "Linear", (6, 8), (3, 6), {"epitome_shape": (3, 6)}),
        LayerCase("in", "Linear", (6, 8), (3, 6), {"epitome_shape": (8, 4)}),
        LayerCase("both", "Linear", (6, 8), (2, 3, 6), {"epitome_shape": (3, 4)}, {"bias": False}),
        LayerCase("blocks", "Linear", (6, 8), (6,), {"epitome_shape": (5, 4), "block_out": 3, "block_in": 2}),
        LayerCase("grid", "Linear", (6, 8), (3, 6), {"epitome_shape": (3, 4), "channel_starts": "grid"}),
        LayerCase("super-index", "Linear", (6, 8), (3, 6), {"epitome_shape": (4, 4), "group_length": 2}),
    )


LOOPED = (
    LayerCase("1d-stride", "Conv1d", (4, 6, 3), (4, 9), {"epitome_shape": (4, 3, 4)}, {"stride": 2, "bias": False}),
    LayerCase(
        "2d-groups",
        "Conv2d",
        (4, 6, 2),
        (4, 5, 4),
        {"epitome_shape": (4, 2, 2, 2)},
        {"groups": 2, "bias": False},
    ),
    LayerCase(
        "2d-dilation",
        "Conv2d",
        (3, 4, 2),
        (3, 5, 4),
        {"epitome_shape": (3, 2, 3, 2)},
        {"dilation": 2, "bias": False},
    ),
)


@pytest.mark.parametrize("case", LOOPED, ids=[case.name for case in LOOPED])
def test_output_equals_a_convolution_in_loops(case: LayerCase) -> None:
    layer, x = case.build(), case.input()
    weight = case.slow_weight(layer.epitome, layer.starts())
    named = {key: value for key, value in case.options.items() if key != "bias"}
    y = torch.from_numpy(reference.convolve(x.numpy(), weight.numpy(), **named))
    torch.testing.assert_close(layer(x).detach(), y, **CLOSE)
    assert not torch.allclose(layer(x + 1), y)
