"""Checkpoints without pickle: `model.safetensors`, `config.json` and `README.md` in one folder, replaced together.

The configuration holds what rebuilds the model: its name and arguments, and the plan of its epitome layers. It carries
a hash of itself and one of the file of weights, so that damage is found when they are read.
"""

from epitorch.checkpoint._data import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    Checkpoint,
    CheckpointConfig,
    EpitomeDtype,
    ModelInput,
    Stored,
)
from epitorch.checkpoint._guard import TooLargeError
from epitorch.checkpoint._hub import PushReport
from epitorch.checkpoint._pretrained import cost_numbers, from_pretrained, save_pretrained
from epitorch.checkpoint._push import push_checkpoint, push_to_hub
from epitorch.checkpoint._save import load_checkpoint, save_checkpoint

__all__ = [
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "Checkpoint",
    "CheckpointConfig",
    "EpitomeDtype",
    "ModelInput",
    "PushReport",
    "Stored",
    "TooLargeError",
    "cost_numbers",
    "from_pretrained",
    "load_checkpoint",
    "push_checkpoint",
    "push_to_hub",
    "save_checkpoint",
    "save_pretrained",
]
