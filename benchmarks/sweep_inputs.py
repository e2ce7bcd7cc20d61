"""Models of the sweep and inputs that they take."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_FAMILIES = Path(__file__).parent / "sweep_timm.json"
_SMALL = 96  # side of an image where the model takes any


@dataclass(frozen=True)
class Subject:
    """A model of the sweep: how to build it, what to feed it, how to make a loss of its output in training.

    Args:
        name: `torchvision:NAME` or `timm:NAME`.
        build: Makes it with fresh weights.
        inputs: Positional arguments, tried in this order until the model takes one.
        train: The forward pass whose output is summed and differentiated.
        settle: Re-estimate batch norm after converting: else features grow until no box is left.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[tuple[Any, ...], ...]
    train: Callable[[nn.Module, tuple[Any, ...]], Any]
    settle: bool = False


def torchvision_names() -> list[str]:
    """Every float model of torchvision."""
    from torchvision import models

    return [f"torchvision:{name}" for name in models.list_models() if not name.startswith("quantized_")]


def subject(name: str) -> Subject:
    """Return the subject of a name."""
    source, _, model = name.partition(":")
    return _torchvision(name, model) if source == "torchvision" else _timm(name, model)


def _torchvision(name: str, model: str) -> Subject:
    from torchvision import models

    builder = models.get_model_builder(model)
    kind = builder.__module__.split(".")[2]
    options: dict[str, Any] = {"weights": None}
    if kind in ("detection", "segmentation"):
        options["weights_backbone"] = None
    if kind == "detection":  # in float64: which boxes are kept hangs on the last digit of fresh scores
        # fresh weights are sure of nothing: with the usual threshold there is no output
        options["box_score_thresh" if "rcnn" in model else "score_thresh"] = 0.0
        if not model.startswith("ssd"):
            options |= {"min_size": 128, "max_size": 160}  # not the 800 pixels to which images are enlarged otherwise
        images = [_image(128, seed)[0].double() for seed in (1, 2)]
        return Subject(name, lambda: builder(**options).double(), ((images,),), _detection_loss, settle=True)
    return Subject(name, lambda: builder(**options), _torchvision_inputs(kind, model), _plain)


def _torchvision_inputs(kind: str, model: str) -> tuple[tuple[Any, ...], ...]:
    if kind == "optical_flow":
        return ((_image(128), _image(128, 1)),)
    if kind == "video":
        frames = 14 if model == "s3d" else 16
        sides = (224,) if model.startswith(("mvit", "s3d")) else (64, 112)
        return tuple((torch.randn(2, 3, frames, side, side, generator=_seed(0)),) for side in sides)
    sides = (299,) if model == "inception_v3" else (_SMALL, 128, 224)  # its auxiliary head wants as much in training
    return tuple((_image(side),) for side in sides)


def _timm(name: str, model: str) -> Subject:
    import timm

    def build() -> nn.Module:
        return timm.create_model(model, pretrained=False)

    channels, *size = timm.get_pretrained_cfg(model).input_size if timm.get_pretrained_cfg(model) else (3, 224, 224)
    sides = dict.fromkeys([_SMALL, 112, 128, size[0]])  # 112: patches of 14 pixels
    return Subject(name, build, tuple((_image(side, channels=channels),) for side in sides), _plain)


def _seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _image(side: int, seed: int = 0, channels: int = 3) -> Tensor:
    return torch.rand(2, channels, side, side, generator=_seed(seed))


def _plain(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return model(*inputs)


def _detection_loss(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    box = torch.tensor([[20.0, 20.0, 90.0, 90.0]], dtype=torch.float64)
    target: dict[str, Tensor] = {"boxes": box, "labels": torch.tensor([1])}
    target["masks"] = torch.ones(1, 128, 128, dtype=torch.uint8)
    target["keypoints"] = torch.tensor([[[40.0, 40.0, 1.0]] * 17])
    return model(inputs[0], [dict(target) for _ in inputs[0]])


def timm_names() -> list[str]:
    """The smallest model of each of timm's families, as `sweep_timm.json` has them."""
    return [f"timm:{row['model']}" for row in json.loads(_FAMILIES.read_text())["families"]]


def smallest_of_each_family() -> dict[str, Any]:
    """Count the parameters of every model of timm, without memory for them, and keep the smallest of each family."""
    import timm

    rows = []
    for family in timm.list_modules():
        sizes = {}
        for model in timm.list_models(module=family):
            with torch.device("meta"), contextlib.suppress(Exception):  # some need more than a name, or values
                sizes[model] = sum(p.numel() for p in timm.create_model(model, pretrained=False).parameters())
        smallest = min(sizes, key=lambda model: sizes[model])
        rows.append({"family": family, "model": smallest, "params": sizes[smallest]})
    return {"timm": timm.__version__, "families": rows}


if __name__ == "__main__":  # python benchmarks/sweep_inputs.py: a new timm has other families
    _FAMILIES.write_text(json.dumps(smallest_of_each_family(), indent=1) + "\n")
