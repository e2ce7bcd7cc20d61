"""What is compared on which network, data and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Part:
    """One comparison.

    Args:
        name: Letter.
        title: For the report.
        base: Name of the dense network.
        arguments: Of its factory.
        recipe: Sections of its recipe but `model` and the epochs; empty where nothing is trained.
        epochs: All of them, for every method.
        start_epochs: Of those, how many train the dense network that methods of "half" begin from.
        tuning: What the recipe's training has instead in the epochs after that.
        skip: Layers that methods working layer by layer leave as they are.
        budgets: Names of them.
        seeds: Of the runs; without training, of the images.
        methods: Names, in the report's order.
        left_out: Why the other methods are not in it.
        init: How convolutions are drawn that are not the dense network's own.
        calibration: Training inputs that calibrate.
        measured: Without training, images that are measured.
        image: Shape of an image.
    """

    name: str
    title: str
    base: str
    arguments: Mapping[str, Any]
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epochs: int = 0
    start_epochs: int = 0
    tuning: Mapping[str, Any] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1)
    left_out: Mapping[str, str] = field(default_factory=dict)
    init: str | None = None
    calibration: int = 256
    measured: int = 0
    image: tuple[int, ...] = (3, 32, 32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        sound = self.recipe.get("sound")
        return self.image if sound is None else (1, round(sound["clip_seconds"] * sound["sample_rate"]))

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return self.epochs > 0


_EPITOMES = (
    "wsnet",
    "epitome",
    "epitome-positions",
    "epitome-fixed",
    "epitome-warm",
    "epitome-distil",
    "epitome-warm-distil",
)
_PARTIAL = "epitome-partial"
_PEERS = ("torch-pruning", "torch-pruning-hidden", "tucker", "tucker-positions", "cp")
_FILES = ("kmeans", "int8", "width-int8", "epitome-int8", "epitome-positions-int8")
_BYTES = ("bytes-0.25", "bytes-0.125")
_NO_BLOCKS = "the network has no residual blocks"
_IS_WIDTH = "hidden channels alone are narrowed on MobileNetV2"
_CIFAR = {"holdout": 5000, "crop_padding": 4, "flip": True}

_RESNET = Part(
    name="a",
    title="ResNet-20 on CIFAR-10",
    base="epitorch:resnet20",
    arguments={"num_classes": 10, "stem_stride": 2},
    recipe={
        "data": _CIFAR,
        "training": {
            "batch_size": 128,
            "optimizer": "sgd",
            "schedule": "one_cycle",
            "peak_lr": 0.4,  # docs/experiments.md: narrowing wants it, epitomes do not mind
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "channels_last": True,
        },
    },
    epochs=6,
    start_epochs=4,
    tuning={"peak_lr": 0.2, "warmup": 0.1},
    skip=("conv1", "fc"),
    budgets=("params-0.5", "params-0.25", *_BYTES),
    methods=("dense", "width", "width-positions", *_EPITOMES, _PARTIAL, *_PEERS, *_FILES),
    left_out={"width-hidden": _IS_WIDTH},
    init="kaiming_fan_out",
)
_UNTRAINED = "needs training"
_LITE0 = Part(
    name="b",
    title="EfficientNet-Lite0 with ImageNet weights, without training",
    base="benchmarks.peers.networks:lite0",
    arguments={},
    skip=("_conv_stem",),
    budgets=("params-0.8", "params-0.5", "params-0.25", *_BYTES),
    methods=(
        "dense",
        "wsnet",
        "epitome",
        "epitome-positions",
        "torch-pruning",
        "tucker",
        "kmeans",
        "int8",
        "epitome-int8",
        "epitome-positions-int8",
    ),
    left_out={
        **dict.fromkeys(
            (
                "width",
                "width-positions",
                "width-hidden",
                "epitome-fixed",
                _PARTIAL,
                "epitome-distil",
                "width-int8",
                "tucker-positions",
            ),
            _UNTRAINED,
        ),
        **dict.fromkeys(("epitome-warm", "epitome-warm-distil"), "every epitome starts warm here, and none is trained"),
        "torch-pruning-hidden": "torch-pruning leaves what the shortcuts add whole already",
        "cp": "the compressed layers are 1x1, where CP is the same two layers as tucker",
    },
    calibration=200,
    measured=400,
    image=(3, 224, 224),
)
_SOUND = Part(
    name="c",
    title="The 8-layer 1-D network on ESC-10",
    base="epitorch:soundnet8",
    arguments={"num_classes": 10},
    recipe={
        "data": {"holdout": 40},
        "sound": {
            "sample_rate": 22050,
            "clip_seconds": 5,
            "crop_seconds": 1.5,
            "gain_db": 6,
            "subset": "esc10",
            "fold": 1,
        },
        "training": {"batch_size": 32, "peak_lr": 0.01, "nesterov": True, "weight_decay": 5e-4},
    },
    epochs=30,
    start_epochs=20,
    tuning={"peak_lr": 0.005, "warmup": 0.1},
    skip=("conv1",),
    budgets=("params-0.5", "params-0.25", "params-0.125", *_BYTES),
    methods=(
        "dense",
        "width",
        "width-positions",
        *_EPITOMES,
        "torch-pruning",
        "tucker",
        "tucker-positions",
        "cp",
        *_FILES,
    ),
    left_out={
        "width-hidden": _IS_WIDTH,
        "torch-pruning-hidden": _NO_BLOCKS,
        _PARTIAL: "every layer is one long filter that is shared along its taps",
    },
    calibration=32,
)
_MOBILE = Part(
    name="d",
    title="MobileNetV2 on CIFAR-10",
    base="epitorch:mobilenetv2",
    arguments={"num_classes": 10, "cifar": True, "stem_stride": 2},
    recipe={
        "data": _CIFAR,
        "training": {
            "batch_size": 128,
            "optimizer": "sgd",
            "schedule": "one_cycle",
            "peak_lr": 0.1,
            "momentum": 0.9,
            "weight_decay": 5e-4,
        },
    },
    epochs=4,
    start_epochs=2,
    tuning={"peak_lr": 0.05, "warmup": 0.1},
    skip=("features.0.0", "classifier.1"),
    budgets=("params-0.25",),
    methods=(
        "dense",
        "width",
        "width-positions",
        "width-hidden",
        "wsnet",
        "epitome",
        "epitome-positions",
        _PARTIAL,
        "epitome-warm",
        "epitome-warm-distil",
        "torch-pruning",
        "tucker",
        "tucker-positions",
        "int8",
        "epitome-int8",
        "epitome-positions-int8",
    ),
    left_out={
        **dict.fromkeys(("epitome-fixed", "epitome-distil", "kmeans", "width-int8"), "only the main methods"),
        "torch-pruning-hidden": "torch-pruning works on the whole network",
        "cp": "nearly all weights are in 1x1 layers, where CP is the same two layers as tucker",
    },
    init="kaiming_fan_out",
)
PARTS = {part.name: part for part in (_RESNET, _LITE0, _SOUND, _MOBILE)}

# Part e: everything on a GPU, with schedules that train to the end.
_ALL_BUDGETS = ("params-0.5", "params-0.25", "params-0.125", "madds-0.5", "madds-0.25", *_BYTES)
_FULL: dict[str, dict[str, Any]] = {
    "a": {"epochs": 60, "start_epochs": 40, "arguments": {"num_classes": 10}},
    "c": {"epochs": 60, "start_epochs": 40},
    "d": {"epochs": 60, "start_epochs": 40, "arguments": {"num_classes": 10, "cifar": True}},
}


def part_named(name: str, *, full: bool = False) -> Part:
    """Return a part; with `full` the one for a GPU: all methods, all budgets, three seeds, 60 epochs."""
    part = PARTS[name]
    if not full or not part.trains:
        return part
    tops = {key for key, why in part.left_out.items() if why == "only the main methods"}
    methods = (*part.methods, *sorted(tops))
    left_out = {key: why for key, why in part.left_out.items() if key not in tops}
    changed = {"methods": methods, "left_out": left_out, "budgets": _ALL_BUDGETS, "seeds": (0, 1, 2)}
    return replace(part, name=f"{name}-full", title=f"{part.title}, full schedule", **changed, **_FULL[name])


def smoke(part: Part) -> Part:
    """The same part for two steps on a tiny set."""
    recipe = {key: dict(value) for key, value in part.recipe.items()}
    if recipe:
        recipe["data"]["holdout"] = 40 if "sound" in recipe else 64
        recipe["training"]["batch_size"] = 16
    if "sound" in recipe:
        recipe["sound"] |= {"sample_rate": 8000, "clip_seconds": 0.5, "crop_seconds": 0.4}
    return replace(
        part,
        recipe=recipe,
        epochs=2 if part.trains else 0,
        start_epochs=1 if part.trains else 0,
        budgets=tuple(name for name in part.budgets if name in ("params-0.5", "bytes-0.125")) or part.budgets,
        seeds=(0,),
        calibration=16,
        measured=16 if part.measured else 0,
    )
