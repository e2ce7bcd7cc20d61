"""What the command line does with a model's name, as functions."""

from __future__ import annotations

from pathlib import Path

import torch

from epitorch.checkpoint import load_checkpoint
from epitorch.cost import Cost, count
from epitorch.errors import EpitorchError, InputError, explain
from epitorch.models.resolve import build_model


def count_named(name: str, input_shape: tuple[int, ...] | None = None, *, allow_factory: bool = False) -> Cost:
    """Count the parameters and multiply-adds of a model or checkpoint.

    Args:
        name: A model as `build_model` takes it, or the folder of a checkpoint.
        input_shape: Shape of the input; default (1, 3, 224, 224), for a checkpoint that of its images.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: If there is no such model, or it does not take an input of this shape.
    """
    if Path(name).is_dir():
        checkpoint = load_checkpoint(name, allow_factory=allow_factory)
        model, usual = checkpoint.model, (1, *checkpoint.config.input.shape)
    else:
        with torch.random.fork_rng(devices=[]):
            model, usual = build_model(name), (1, 3, 224, 224)
    shape = input_shape or usual
    try:
        return count(model, torch.zeros(shape))
    except EpitorchError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise InputError(
            explain(
                f"'{name}' does not take an input of shape {shape}",
                expected="an input that the model runs on",
                got=str(error).splitlines()[0],
                fix="give its shape with --input, such as --input 1,1,8,8",
            )
        ) from error
