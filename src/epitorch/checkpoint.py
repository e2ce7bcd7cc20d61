"""Checkpoints without pickle: `model.safetensors` and `config.json` in one folder, each there whole or not at all.

The configuration holds what rebuilds the model: its name and arguments, and the plan of its epitome layers. Both files
carry a hash of their content, so that damage is found when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch._files import write_atomic
from epitorch.conversion import convert_
from epitorch.errors import CheckpointError, EpitorchError, explain, require
from epitorch.models.resolve import build_model, is_library_name
from epitorch.nn import EpitomeLayer
from epitorch.plans import LayerPlan, Plan

FORMAT_MAJOR, FORMAT_MINOR = 1, 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
# Arguments that fetch or open files of weights: the checkpoint replaces those weights anyway.
_WEIGHT_SOURCES = ("pretrained", "weights", "checkpoint_path", "pretrained_cfg", "weights_backbone")
_SHOWN = 4  # names listed in a message


@dataclass(frozen=True)
class ModelInput:
    """What the model was trained on.

    Args:
        shape: `(C, H, W)` of an image, `(1, samples)` of a sound.
        mean: Mean of each channel, taken off; images are on the scale 0 to 1, sounds on -1 to 1.
        std: Standard deviation of each channel, divided by.
        classes: Name of each class.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointConfig:
    """Everything but the tensors.

    Args:
        model: Name of the model, as `build_model` takes it.
        arguments: Keyword arguments of its factory.
        plan: The epitome layers; None for a dense model.
        input: Images, normalisation and classes; None for a model that no data were seen by.
        batch_size: Batch size of training; accuracy with the learner depends on it. None likewise.
        metrics: Numbers known when it was saved.
        recipe: The recipe with all defaults filled in.
        input_shape: Of the example that the plan was made for; multiply-adds are counted on that size where no data
            were seen. None where it is not known.
    """

    model: str
    arguments: dict[str, Any]
    plan: Plan | None
    input: ModelInput | None
    batch_size: int | None
    metrics: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A model rebuilt from its files, in eval mode on the CPU, and its configuration."""

    model: nn.Module
    config: CheckpointConfig


# ---- writing ----


def save_checkpoint(folder: str | Path, model: nn.Module, config: CheckpointConfig) -> Path:
    """Write a checkpoint; learners are kept where the model has them.

    The weights are written first and the configuration last, each by one rename. If a checkpoint of another
    architecture stands there, its configuration goes first, so that no moment shows one with the other's weights.

    Args:
        folder: Made if missing.
        model: The model; its tensors are copied to the CPU.
        config: What rebuilds it.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the model is a deployed one.
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
    content = _config_to_json(config)
    if _architecture(_peek(folder / CONFIG)) != _architecture(content):
        (folder / CONFIG).unlink(missing_ok=True)
    write_atomic(folder / WEIGHTS, _pack(model.state_dict()))
    write_atomic(folder / CONFIG, (json.dumps(content, indent=1) + "\n").encode())
    return folder


def _pack(state: Mapping[str, Tensor]) -> bytes:
    save = require("safetensors.torch", "train").save
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    metadata = {"format": "pt"}  # what readers of safetensors files look for
    return save(tensors, metadata={**metadata, "sha256": _tensors_hash(tensors, metadata)})


def _tensors_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _config_to_json(config: CheckpointConfig) -> dict[str, Any]:
    content = {
        "format": [FORMAT_MAJOR, FORMAT_MINOR],
        "model": config.model,
        "arguments": config.arguments,
        "plan": None if config.plan is None else _plan_to_json(config.plan),
        "input": None if config.input is None else asdict(config.input),
        "batch_size": config.batch_size,
        "metrics": config.metrics,
        "recipe": config.recipe,
        "input_shape": config.input_shape,
    }
    content = json.loads(json.dumps(content))  # tuples become lists: the hash is that of what will be read
    return {**content, "sha256": _content_hash(content)}


def _plan_to_json(plan: Plan) -> dict[str, Any]:
    """All options, defaults too: they must mean the same when a later version has other defaults."""
    return {"layers": {name: asdict(layer) for name, layer in plan.layers.items()}, "left": dict(plan.left)}


def _content_hash(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _architecture(content: Mapping[str, Any] | None) -> list[Any] | None:
    return None if content is None else [content.get(key) for key in ("model", "arguments", "plan")]


def _peek(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


# ---- reading ----


def load_checkpoint(folder: str | Path, *, allow_factory: bool = False) -> Checkpoint:
    """Rebuild a model from a checkpoint, strictly.

    Args:
        folder: The folder with both files, or a run's folder that has it as `checkpoint/`.
        allow_factory: Also build a model whose name is `package.module:factory`: that runs code which the checkpoint
            names, so allow it for files that you trust.

    Returns:
        Model (eval mode, CPU) and configuration.

    Raises:
        CheckpointError: If a file is missing or damaged, the format is newer, or the tensors are not those of the
            model; the model is named, and the first tensors that do not fit.
    """
    folder = _folder(Path(folder))
    config = _read_config(folder / CONFIG)
    tensors = _read_tensors(folder / WEIGHTS)
    model = _rebuild(config, folder, allow_factory)
    _load_state(model, tensors, folder / WEIGHTS, config.model)
    return Checkpoint(model.eval(), config)


def _folder(path: Path) -> Path:
    inner = path / "checkpoint"
    return inner if not (path / CONFIG).exists() and inner.is_dir() else path


def _damaged(path: Path, got: object, expected: str = "a complete file, as epitorch wrote it") -> CheckpointError:
    fix = "take another copy of the checkpoint, or train again"
    return CheckpointError(explain("the checkpoint is damaged", expected=expected, got=got, where=str(path), fix=fix))


def _check_there(path: Path) -> None:
    if path.is_file():
        return
    there = _first(sorted(p.name for p in path.parent.iterdir())) if path.parent.is_dir() else "no such folder"
    raise CheckpointError(
        explain(
            f"there is no checkpoint here: {path.name} is missing",
            expected=f"a folder with {CONFIG} and {WEIGHTS}",
            got=there or "an empty folder",
            where=str(path.parent),
        )
    )


def _read_config(path: Path) -> CheckpointConfig:
    _check_there(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        major = content["format"][0]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}", "a JSON object that states its format") from error
    if major != FORMAT_MAJOR:
        raise CheckpointError(
            explain(
                "the checkpoint has another format",
                expected=f"format {FORMAT_MAJOR}",
                got=f"format {major}",
                where=str(path),
                fix="install the version of epitorch that wrote it",
            )
        )
    given = content.pop("sha256", None)
    if given != _content_hash(content):
        raise _damaged(path, "content that does not match its own hash")
    return _config_from_json(content, path)


def _config_from_json(content: dict[str, Any], path: Path) -> CheckpointConfig:
    try:
        _check_types(content)
        model_input, plan = _input_from_json(content["input"]), content["plan"]
        values = {f.name: content[f.name] for f in fields(CheckpointConfig)}
        shape = content["input_shape"] and tuple(content["input_shape"])
        values.update(input=model_input, plan=None if plan is None else _plan_from_json(plan), input_shape=shape)
        return CheckpointConfig(**values)
    except (KeyError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}", "all keys of a configuration") from error


def _check_types(content: dict[str, Any]) -> None:
    right = isinstance(content["model"], str) and isinstance(content["arguments"], dict)
    given, batch_size = content["input"], content["batch_size"]
    if given is not None:
        numbers = [*given["mean"], *given["std"], *given["shape"], batch_size]
        right = right and (
            all(isinstance(given[key], list) for key in ("mean", "std", "shape", "classes"))
            and len(given["shape"]) in (2, 3)
            and all(isinstance(number, int | float) for number in numbers)
        )
    shape = content["input_shape"]
    if shape is not None:
        right = right and isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape) and bool(shape)
    if not right or (given is None) != (batch_size is None):
        raise TypeError("a value of another type than its key has")


def _input_from_json(given: dict[str, Any] | None) -> ModelInput | None:
    if given is None:
        return None
    # a later minor version may add keys; what is not known here is left aside
    return ModelInput(**{f.name: tuple(given[f.name]) for f in fields(ModelInput)})


def _plan_from_json(content: dict[str, Any]) -> Plan:
    known = [f.name for f in fields(LayerPlan)]
    layers = {}
    for name, options in content["layers"].items():
        values = {key: options[key] for key in known if key in options}
        layers[name] = LayerPlan(**{**values, "epitome_shape": tuple(options["epitome_shape"])})
    return Plan(layers, dict(content["left"]))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    _check_there(path)
    safetensors = require("safetensors", "train")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if metadata.pop("sha256", None) != _tensors_hash(tensors, metadata):
        raise _damaged(path, "tensors that do not match the file's own hash")
    return tensors


def _rebuild(config: CheckpointConfig, folder: Path, allow_factory: bool) -> nn.Module:
    if not allow_factory and not is_library_name(config.model):
        raise CheckpointError(
            explain(
                f"this checkpoint is built by the code of '{config.model}'",
                expected="a model of epitorch, timm or torchvision",
                got="a factory of another package, which loading would run",
                where=str(folder),
                fix="if you trust the checkpoint, allow it (allow_factory=True, --allow-factory)",
            )
        )
    arguments = {key: value for key, value in config.arguments.items() if key not in _WEIGHT_SOURCES}
    try:
        with torch.random.fork_rng(devices=[]):
            model = build_model(config.model, arguments)
            if config.plan is not None:
                convert_(model, config.plan)
    except EpitorchError as error:
        raise CheckpointError(f"{folder}: the checkpoint's model cannot be rebuilt: {error}") from error
    return model


def _load_state(model: nn.Module, tensors: dict[str, Tensor], path: Path, name: str) -> None:
    _drop_absent_learners(model, tensors)
    problems = _differences(model.state_dict(), tensors)
    if not problems:
        try:
            model.load_state_dict(tensors, strict=True, assign=True)  # dtypes are the checkpoint's
        except RuntimeError as error:  # starts that are not finite
            raise CheckpointError(f"{path}: {error}") from error
        return
    raise CheckpointError(
        explain(
            f"the weights belong to another architecture than '{name}'",
            expected="the tensors of that model, name by name",
            got="; ".join(problems),
            where=str(path),
        )
    )


def _drop_absent_learners(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """A deployed state has frozen maps and no learners."""
    for name, layer in model.named_modules():
        if not isinstance(layer, EpitomeLayer) or layer.learner is None:
            continue
        frozen = given.get(f"{name}.routing_map.frozen")
        if frozen is not None and bool(frozen) and not any(key.startswith(f"{name}.learner.") for key in given):
            layer.drop_learner()


def _differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in wanted]
    shapes = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(value.shape)}"
        for name, value in wanted.items()
        if name in given and given[name].shape != value.shape
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("other shape", shapes))
    return [f"{kind}: {_first(names)}" for kind, names in kinds if names]


def _first(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
