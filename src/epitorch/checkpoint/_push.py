"""Publishing models and runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from epitorch.checkpoint._data import EpitomeDtype, ModelInput
from epitorch.checkpoint._hub import PushReport, check_repo_id, publish
from epitorch.checkpoint._pretrained import save_pretrained
from epitorch.checkpoint._save import load_checkpoint, save_checkpoint

_MESSAGE = "Upload by epitorch"


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    backbone: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    dtype: EpitomeDtype | None = None,
    learner: bool = False,
    example_input: Tensor | tuple[Any, ...] | None = None,
    input: ModelInput | None = None,
    metrics: Mapping[str, Any] | None = None,
    private: bool = False,
    revision: str | None = None,
    message: str = _MESSAGE,
    token: str | None = None,
) -> PushReport:
    """Save a model as `save_pretrained` does and upload the three files in one commit.

    Args:
        model: As for `save_pretrained`, and so all up to `metrics`.
        repo_id: `OWNER/NAME`; made if missing.
        backbone: See there.
        arguments: See there.
        dtype: See there.
        learner: See there.
        example_input: See there.
        input: See there.
        metrics: See there.
        private: Make a new repository private.
        revision: Branch; made if missing. Default: main.
        message: Of the commit.
        token: Of the Hub; default the one that `hf auth login` stored.

    Returns:
        Where it is.

    Raises:
        CheckpointError: As for `save_pretrained`.
        HubError: If the Hub refuses or cannot be reached.
    """
    check_repo_id(repo_id)
    with TemporaryDirectory() as folder:
        save_pretrained(
            model,
            folder,
            backbone=backbone,
            arguments=arguments,
            dtype=dtype,
            learner=learner,
            example_input=example_input,
            input=input,
            metrics=metrics,
        )
        return publish(Path(folder), repo_id, private=private, revision=revision, message=message, token=token)


def push_checkpoint(
    folder: str | Path,
    repo_id: str,
    *,
    dtype: EpitomeDtype | None = None,
    learner: bool = False,
    private: bool = False,
    revision: str | None = None,
    message: str = _MESSAGE,
    token: str | None = None,
    allow_factory: bool = False,
) -> PushReport:
    """Check a checkpoint or run by loading it, and upload it with its results.

    Args:
        folder: Of the checkpoint, or of its run.
        repo_id: As for `push_to_hub`, and so all that follow.
        dtype: See `save_pretrained`.
        learner: See there.
        private: See `push_to_hub`.
        revision: See there.
        message: See there.
        token: See there.
        allow_factory: As for `load_checkpoint`.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        HubError: If the Hub refuses or cannot be reached.
    """
    check_repo_id(repo_id)
    loaded = load_checkpoint(folder, allow_factory=allow_factory)
    with TemporaryDirectory() as made:
        save_checkpoint(made, loaded.model, loaded.config, learner=learner, dtype=dtype)
        return publish(Path(made), repo_id, private=private, revision=revision, message=message, token=token)
