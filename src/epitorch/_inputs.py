"""What a network was trained on: preprocessing and labels, on the model and in the files that leave it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

CHECKPOINT = "_epitorch_checkpoint"  # attribute: the configuration that the model was loaded by


@dataclass(frozen=True)
class ModelInput:
    """What the model was trained on: preprocessing and labels.

    Args:
        shape: `(C, H, W)` of an image, `(1, samples)` of a sound.
        mean: Mean of each channel, taken off; images are on the scale 0 to 1, sounds on -1 to 1.
        std: Standard deviation of each channel, divided by.
        classes: Name of each class; empty where they are not known.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]


def noted_input(model: nn.Module) -> ModelInput | None:
    """Preprocessing of the checkpoint that a model, or what was deployed of it, was loaded from."""
    config = model.__dict__.get(CHECKPOINT)
    return None if config is None else config.input


def input_metadata(known: ModelInput | None, shape: Sequence[int]) -> dict[str, str]:
    """What a file says of its input, as JSON: `epitorch_input` and, where classes have names, `epitorch_labels`.

    Args:
        known: Preprocessing; None says nothing.
        shape: Of the example that the file was made with, without the batch: the size to give images.
    """
    if known is None or tuple(shape[:1]) != known.shape[:1]:
        return {}
    scale = [0, 1] if len(known.shape) == 3 else [-1, 1]
    said = {"shape": list(shape), "range": scale, "mean": list(known.mean), "std": list(known.std)}
    labels = {"epitorch_labels": json.dumps(list(known.classes), ensure_ascii=False)} if known.classes else {}
    return {"epitorch_input": json.dumps(said), **labels}
