"""What a checkpoint says beside its tensors, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn

from epitorch._inputs import ModelInput
from epitorch.plans import Plan

FORMAT_MAJOR, FORMAT_MINOR = 1, 2
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
FILES = (WEIGHTS, CONFIG, CARD)
EpitomeDtype = Literal["float32", "float16", "bfloat16", "int8"]
EPITOME_DTYPES: tuple[str, ...] = get_args(EpitomeDtype)
FACTORY = "factory:"  # begins the name of a model that only the reader's own factory builds


@dataclass(frozen=True)
class CheckpointConfig:
    """Everything but the tensors.

    Args:
        model: Name of the model, as `build_model` takes it, or `factory:NAME` where the reader brings the factory.
        arguments: Keyword arguments of its factory.
        plan: The epitome layers; None for a dense model.
        input: Images, normalisation and classes; None for a model that no data were seen by.
        batch_size: Batch size of training; accuracy with the learner depends on it. None where it is not known.
        metrics: Numbers known when it was saved.
        recipe: The recipe with all defaults filled in.
        input_shape: Of the example that the plan was made for; multiply-adds are counted on that size where no data
            were seen. None where it is not known.
        cost: `params`, `madds` and so on, as `epitorch.count` gave them; None where they were not counted.
    """

    model: str
    arguments: dict[str, Any]
    plan: Plan | None
    input: ModelInput | None
    batch_size: int | None
    metrics: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] | None = None
    cost: dict[str, Any] | None = None


@dataclass(frozen=True)
class Stored:
    """How the tensors are stored; what the file of weights must be.

    Args:
        sha256: Of the file.
        bytes: Its length.
        dtype: Of every floating-point tensor but the epitomes and `others`.
        others: Other dtypes, by name.
        epitomes: Dtype that float32 epitomes are stored in; None is the model's own.
        shared: Names whose tensor stands in the file under another name.
    """

    sha256: str
    bytes: int
    dtype: str = "float32"
    others: dict[str, str] = field(default_factory=dict)
    epitomes: str | None = None
    shared: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A model rebuilt from its files, in eval mode on the CPU, and its configuration."""

    model: nn.Module
    config: CheckpointConfig
