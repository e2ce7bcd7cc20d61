"""Mixup and cutmix, from timm."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from epitorch.errors import InputError, explain, require
from epitorch.training.recipe_training import TrainingSection

Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def make_mix(section: TrainingSection, classes: int, batch: int) -> Mix | None:
    """Return what mixes a batch with itself, reversed; None where the recipe does not ask for it.

    Args:
        section: Label smoothing is part of the labels that it makes.
        classes: Number of classes.
        batch: Images of a batch on this process.

    Returns:
        A function of images (N, C, H, W), which it changes, and labels (N,); it gives images and labels (N, classes).

    Raises:
        InputError: If the batch cannot be paired.
    """
    if not section.mixup and not section.cutmix:
        return None
    if batch % 2:
        raise InputError(
            explain(
                "mixup pairs the images of a batch",
                expected="an even number of images per batch and process",
                got=batch,
                where="training.batch_size",
            )
        )
    return require("timm.data", "models").Mixup(
        mixup_alpha=section.mixup,
        cutmix_alpha=section.cutmix,
        prob=section.mix_prob,
        switch_prob=section.mix_switch,
        mode=section.mix_mode,
        label_smoothing=section.label_smoothing,
        num_classes=classes,
    )
