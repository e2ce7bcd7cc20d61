"""An 8-layer convolutional network on raw sound, and its epitome plans as WSNet configures them."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Literal

from torch import Tensor, nn

from epitorch.errors import ConversionError, InputError, explain, suggest
from epitorch.plans import LayerPlan, Plan

# filters, kernel, pooling after it; every convolution has stride 2 and a padding of half its kernel
_LAYERS = ((16, 64, 8), (32, 32, 8), (64, 16, 1), (128, 8, 1), (256, 4, 4), (512, 4, 1), (1024, 4, 1))
_LAST_KERNEL = 8
_SHORTEST = 2048  # samples; less leaves nothing to pool

Index = Literal["learner", "direct", "fixed"]

# Layer number to (S, C): the weights are cut to 1/S along the filters and to 1/C along the input channels.
PRINTED = {1: (8, 1), 2: (4, 1), 3: (2, 2), 4: (1, 2), 5: (1, 4), 6: (1, 8), 7: (1, 8), 8: (1, 8)}
FOURFOLD = {**PRINTED, 6: (1, 4), 7: (1, 4), 8: (1, 4)}
CONFIGURATIONS: Mapping[str, Mapping[int, tuple[int, int]]] = {"4x": FOURFOLD, "printed": PRINTED}


class SoundNet8(nn.Sequential):
    """Eight convolutions over a waveform, shape (N, 1, samples) -> (N, classes); any length from 2048 samples.

    The scores of all positions of the last layer are averaged.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return class scores."""
        if input.dim() != 3 or input.shape[1] != 1 or input.shape[2] < _SHORTEST:
            raise InputError(
                explain(
                    "soundnet8 cannot take this input",
                    expected=f"waveforms of shape (N, 1, samples), samples >= {_SHORTEST}",
                    got=f"shape {tuple(input.shape)}",
                    where="soundnet8",
                )
            )
        return super().forward(input).mean(-1)


def soundnet8(num_classes: int = 50) -> SoundNet8:
    """Return the 8-layer network of SoundNet's convolutions, for mono sound at about 22.05 kHz.

    The first seven convolutions, `conv1` to `conv7`, are followed by batch norm and ReLU, the first, second and fifth
    by max pooling as well; `conv8` has a filter of length 8 for each class.

    Args:
        num_classes: Number of classes.

    Raises:
        InputError: If that is not a whole number above 0.
    """
    if type(num_classes) is not int or num_classes < 1:
        raise InputError(
            explain(
                "this network cannot be built",
                expected="num_classes, a whole number above 0",
                got=repr(num_classes),
                where="soundnet8",
            )
        )
    net, channels = SoundNet8(), 1
    for i, (filters, kernel, pool) in enumerate(_LAYERS, start=1):
        net.add_module(f"conv{i}", nn.Conv1d(channels, filters, kernel, stride=2, padding=kernel // 2, bias=False))
        net.add_module(f"norm{i}", nn.BatchNorm1d(filters))
        net.add_module(f"relu{i}", nn.ReLU(inplace=True))
        if pool > 1:
            # ceil_mode: a short crop keeps its last, partly filled window
            net.add_module(f"pool{i}", nn.MaxPool1d(pool, ceil_mode=True))
        channels = filters
    last = nn.Conv1d(channels, num_classes, _LAST_KERNEL, stride=2, padding=_LAST_KERNEL // 2)
    net.add_module(f"conv{len(_LAYERS) + 1}", last)
    return net


def soundnet8_plan(
    model: nn.Module,
    config: str = "4x",
    *,
    further: float = 1.0,
    index: Index = "learner",
    momentum: float = 0.97,
) -> Plan:
    """Plan the epitomes of `soundnet8` in WSNet's configuration, with starts that are learned.

    A layer with `S` and `C` has one long filter of `filters * kernel / S` positions over `inputs / C` channels: its
    filter `r` is the window that starts at `r * kernel / S`, and repeats along the input channels. Starts begin half a
    step further along (the epitome is a circle, so this turns it and changes nothing else) and so lie off 0, which no
    sigmoid reaches. Epitomes with C > 1 have starts for their C input blocks too.

    Args:
        model: From `soundnet8`, before converting.
        config: `printed` has S and C as the paper's table prints them, 7.1 times fewer parameters with 10 classes;
            `4x` has C = 4 in the last three layers, which gives the ratio that the table states.
        further: Divide the length of every epitome by this: the paper's extended table.
        index: How starts are learned.
        momentum: Of the routing map.

    Returns:
        The plan; a layer with S = C = 1 stays dense.

    Raises:
        ConversionError: If the model is no `soundnet8`, `config` is unknown or `further` is below 1.
    """
    layers = _layers(model)
    table = _configuration(config)
    if not further >= 1:
        raise ConversionError(
            explain("cannot divide the epitomes by this", expected="further, 1 or more", got=repr(further))
        )
    plans = {
        f"conv{i}": _one_layer(layers[f"conv{i}"], cut, further, index, momentum)
        for i, cut in table.items()
        if cut != (1, 1) or further > 1
    }
    return Plan(plans)


def wsnet_plan(model: nn.Module, config: str = "4x") -> Plan:
    """Plan WSNet itself: the shapes of `soundnet8_plan`, starts fixed, input channels repeated without a shift.

    Args:
        model: From `soundnet8`, before converting.
        config: `4x` or `printed`, see `soundnet8_plan`.

    Raises:
        ConversionError: As `soundnet8_plan`.
    """
    plan = soundnet8_plan(model, config, index="fixed")
    # A group as long as the axis: every start is a shift by whole turns.
    return Plan({name: _unshifted(layer) for name, layer in plan.layers.items()})


def _unshifted(layer: LayerPlan) -> LayerPlan:
    return LayerPlan(
        layer.epitome_shape, spatial_starts="out", index="fixed", group_length=layer.epitome_shape[1], momentum=0.0
    )


def _one_layer(conv: nn.Conv1d, cut: tuple[int, int], further: float, index: Index, momentum: float) -> LayerPlan:
    along, across = cut
    kernel = conv.kernel_size[0]
    length = max(kernel, ceil(conv.out_channels * kernel / along / further))
    shape = (1, conv.in_channels // across, length)
    # as long as the kernel it would have no starts, and all filters would be the same
    shift = length == kernel
    return LayerPlan(shape, spatial_starts="out", index=index, momentum=momentum, spatial_shift=shift)


def _configuration(config: str) -> Mapping[int, tuple[int, int]]:
    if config not in CONFIGURATIONS:
        known = list(CONFIGURATIONS)
        asked = f"unknown configuration{suggest(str(config), known)}"
        raise ConversionError(explain(asked, expected=" | ".join(known), got=repr(config)))
    return CONFIGURATIONS[config]


def _layers(model: nn.Module) -> dict[str, nn.Conv1d]:
    modules = dict(model.named_modules())
    names = [f"conv{i}" for i in range(1, len(_LAYERS) + 2)]
    found = {name: modules[name] for name in names if isinstance(modules.get(name), nn.Conv1d)}
    if not isinstance(model, SoundNet8) or len(found) < len(names):
        raise ConversionError(
            explain(
                "this plan is for another model",
                expected="epitorch:soundnet8 with its eight convolutions",
                got=f"{type(model).__name__} with {', '.join(found) or 'none of them'}",
            )
        )
    return found
