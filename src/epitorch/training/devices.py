"""Where to train or evaluate."""

from __future__ import annotations

import torch

from epitorch.errors import InputError, explain


def choose_device(accelerator: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`.

    Raises:
        InputError: If the word is unknown, or there is no CUDA device.
    """
    if accelerator not in ("auto", "cpu", "cuda"):
        raise InputError(explain("unknown accelerator", expected="auto | cpu | cuda", got=repr(accelerator)))
    available = torch.cuda.is_available()
    if accelerator == "cuda" and not available:
        raise InputError(
            explain("there is no CUDA device", expected="a CUDA device", got="none that torch can use", fix="use cpu")
        )
    return torch.device("cuda", 0) if available and accelerator != "cpu" else torch.device("cpu")
