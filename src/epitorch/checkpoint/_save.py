"""Writing and reading a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from epitorch.checkpoint import _folder
from epitorch.checkpoint._build import Factory, load_state, rebuild
from epitorch.checkpoint._card import card
from epitorch.checkpoint._config import config_to_bytes
from epitorch.checkpoint._data import FACTORY, WEIGHTS, Checkpoint, CheckpointConfig, EpitomeDtype, Stored
from epitorch.checkpoint._guard import limits
from epitorch.checkpoint._source import remember
from epitorch.checkpoint._tensors import check_old_hash, pack, unpack, widened
from epitorch.errors import CheckpointError, explain


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    config: CheckpointConfig,
    *,
    learner: bool = True,
    dtype: EpitomeDtype | None = None,
) -> Path:
    """Write a checkpoint: `model.safetensors`, `config.json` and `README.md`, replaced together.

    Args:
        folder: Made if missing; other files in it are left alone.
        model: The model; its tensors are copied to the CPU.
        config: What rebuilds it.
        learner: Keep index learners where the model has them.
        dtype: Of the stored epitomes, as for `save_pretrained`.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the model is a deployed one, or cannot be written.
    """
    folder = Path(folder)
    if hasattr(model, "deployment"):
        raise CheckpointError(
            explain(
                "a deployed network is not a checkpoint",
                expected="the trained model, from which `deploy` makes it again",
                got=type(model).__name__,
                where=str(folder),
            )
        )
    packed = pack(model, learner=learner, epitomes=dtype)
    content = config_to_bytes(config, packed.stored)
    _folder.write(folder, weights=packed.data, config=content, card=card(model, config, packed.stored))
    return folder


def load_checkpoint(
    folder: str | Path,
    *,
    allow_factory: bool = False,
    factory: Factory | None = None,
    max_bytes: int | None = None,
) -> Checkpoint:
    """Rebuild a model from a checkpoint, strictly.

    Args:
        folder: The folder with the files, or a run's folder that has it as `checkpoint/`.
        allow_factory: Also build a model whose name is `package.module:factory`: that runs code which the checkpoint
            names, so allow it for files that you trust.
        factory: Build the model with this function of the stored arguments, whatever its name.
        max_bytes: Room for the tensors that are made to build it; default 1 GiB, or 16 times the file of weights if
            that is more.

    Returns:
        Model (eval mode, CPU) and configuration.

    Raises:
        CheckpointError: If a file is missing or damaged, the format is newer, the network is out of proportion to its
            file, or the tensors are not those of the model; the model is named, and the first that do not fit.
    """
    folder = _folder.inner(_folder.named(folder))
    config, stored, data = _folder.read(folder)
    path = folder / WEIGHTS
    tensors = unpack(data, path)
    if stored is None:
        check_old_hash(data, tensors, path)
    bounds = limits(len(data), len(tensors), max_bytes)
    model = rebuild(config, folder, bounds, allow_factory=allow_factory, factory=factory)
    load_state(model, widened(model, tensors, stored or Stored("", 0), path), stored, path, config.model)
    # a name that the file gave for what the caller's own function built must not be imported when it is saved again
    remember(model, config if factory is None else replace(config, model=f"{FACTORY}{type(model).__name__}"))
    return Checkpoint(model.eval(), config)
