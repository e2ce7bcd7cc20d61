"""Exporting in int8 what a name stands for, calibrated on training images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epitorch.checkpoint import CheckpointConfig, load_checkpoint
from epitorch.errors import InputError, explain
from epitorch.export import Int8Report, export_int8


@dataclass(frozen=True)
class Calibration:
    """Images that the ranges of activations come from.

    Args:
        data: Where they come from.
        images: How many.
        seed: Which of those were drawn.
    """

    data: str
    images: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"calibration: {self.images} images drawn with seed {self.seed} from {self.data}"


def export_int8_named(
    name: str,
    to: str,
    out: Path,
    calibration: str | None,
    *,
    images: int = 128,
    seed: int = 0,
    strategy: str | None = None,
    dynamic: str | None = None,
    opset: int | None = None,
    allow_factory: bool = False,
) -> tuple[Int8Report, Calibration]:
    """Export a checkpoint's network in int8.

    Args:
        name: Folder of the checkpoint, or of its run.
        to: As for `epitorch.export.export_int8`.
        out: See there.
        calibration: The data that it was trained on: held-out training images are drawn, never test images.
        images: How many.
        seed: Which ones.
        strategy: As for `export_int8`; None is its default.
        dynamic: Likewise.
        opset: As for `export_int8`.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: As for `export_int8`, or if the checkpoint knows no images or there are fewer than asked for.
        DataError: If the data are missing or do not fit the model.
    """
    if calibration is None:
        raise InputError(
            explain(
                "int8 needs images to calibrate on",
                expected="--calibration: the data that the network was trained on",
                got="none",
            )
        )
    checkpoint = load_checkpoint(name, allow_factory=allow_factory)
    inputs, drawn = calibration_images(calibration, checkpoint.config, name, images, seed)
    words: Any = to, strategy or "size", dynamic or "batch"  # checked there
    report = export_int8(
        checkpoint.model, inputs[:1], inputs, words[0], out, strategy=words[1], dynamic=words[2], opset=opset
    )
    return report, drawn


def calibration_images(
    data: str, config: CheckpointConfig, name: str, number: int, seed: int
) -> tuple[Tensor, Calibration]:
    """Draw held-out training images, as the model gets them.

    Args:
        data: As for training.
        config: Of the checkpoint: its recipe says how they are read and which were held out.
        name: Of the checkpoint, for messages.
        number: How many.
        seed: Which ones.

    Returns:
        The images, shape (number, C, H, W) or (number, 1, samples), and where they come from.

    Raises:
        InputError: If there are fewer, or the checkpoint knows no images.
        DataError: If the data are missing or do not fit the model.
    """
    from epitorch.training.data_kinds import make_loader, normalization
    from epitorch.training.evaluation import check_images

    known = config.input
    if known is None:
        got, expected = "a converted model", "a trained one"
        raise InputError(explain("this checkpoint knows no images", expected=expected, got=got, where=name))
    heldout = _heldout(data, config, number)
    check_images(heldout, known)
    if len(heldout) < number:
        raise InputError(
            explain(
                "too few images to calibrate on",
                expected=f"{number} that training held out",
                got=len(heldout),
                where=heldout.source,
                fix=f"--calibration-images {len(heldout)}",
            )
        )
    batch, _ = next(iter(make_loader(heldout, number, torch.device("cpu"), shuffle=True, seed=seed)))
    return normalization(known)(batch), Calibration(heldout.source, number, seed)


def _heldout(data: str, config: CheckpointConfig, number: int) -> Any:
    """The images that training held out; where the checkpoint does not say which, a part of the training split."""
    from epitorch.training.data import load_images, split_holdout
    from epitorch.training.data_audio import load_sound_training
    from epitorch.training.data_images import HOLDOUT_SEED
    from epitorch.training.data_kinds import kind_in, load_split

    kind = kind_in(config.recipe)
    if kind.sound is not None:
        return load_sound_training(data, kind.sound, kind.holdout)[1]
    if kind.images is not None:
        return load_split(data, "heldout", kind)
    return split_holdout(load_images(data, "train"), kind.holdout or number, HOLDOUT_SEED)[1]
