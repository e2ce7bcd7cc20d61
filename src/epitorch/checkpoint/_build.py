"""From a configuration and tensors to a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch.checkpoint._data import FACTORY, CheckpointConfig, Stored
from epitorch.checkpoint._guard import Bounded
from epitorch.conversion import convert_
from epitorch.errors import CheckpointError, EpitorchError, explain
from epitorch.models.resolve import build_model, find_factory, is_library_name
from epitorch.nn import EpitomeLayer
from epitorch.plans import Plan

Factory = Callable[..., Any]
# Arguments that fetch or open files of weights: the checkpoint replaces those weights anyway.
_WEIGHT_SOURCES = ("pretrained", "weights", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_BACKBONE = "weights_backbone"  # torchvision's default for it fetches a file
_SHOWN = 4  # names listed in a message
_LONGEST = 1500  # characters of a message from elsewhere


def rebuild(
    config: CheckpointConfig, folder: Path, bounds: Bounded, *, allow_factory: bool, factory: Factory | None
) -> nn.Module:
    """Build and convert the model that a configuration describes; its weights are drawn.

    Raises:
        CheckpointError: If it needs code that the caller did not allow, or cannot be built.
    """
    make = _maker(config, folder, allow_factory, factory)
    try:
        with torch.random.fork_rng(devices=[]), bounds:
            model = make()
            if config.plan is not None:
                convert_(model, _unbuilt(config.plan, model))
    except EpitorchError as error:
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        message = str(error)[:_LONGEST]
        raise kind(f"{folder}: the checkpoint's model cannot be rebuilt: {message}") from error
    except Exception as error:  # a factory may raise anything when the arguments in the file are wrong
        message = f"{type(error).__name__}: {error}"[:_LONGEST]
        raise CheckpointError(f"{folder}: the checkpoint's model cannot be rebuilt: {message}") from error
    return model


def _maker(
    config: CheckpointConfig, folder: Path, allow_factory: bool, factory: Factory | None
) -> Callable[[], nn.Module]:
    arguments = {key: value for key, value in config.arguments.items() if key not in (*_WEIGHT_SOURCES, _BACKBONE)}
    if factory is not None:
        return lambda: _called(factory, arguments)
    if config.model.startswith(FACTORY):
        raise CheckpointError(
            explain(
                f"the checkpoint does not say how '{config.model.removeprefix(FACTORY)}' is built",
                expected="the function that builds it",
                got="no factory",
                where=str(folder),
                fix="give it: from_pretrained(..., factory=function); for the command line save the model again with "
                "backbone='torchvision:NAME', or with backbone='package.module:function' and --allow-factory",
            )
        )
    if not allow_factory and not is_library_name(config.model):
        raise CheckpointError(
            explain(
                f"this checkpoint is built by the code of '{config.model}'",
                expected="a model of epitorch, timm or torchvision",
                got="a factory of another package, which loading would run",
                where=str(folder),
                fix="pass the function yourself (factory=), or, if you trust the checkpoint, allow it "
                "(allow_factory=True, --allow-factory)",
            )
        )
    return lambda: build_model(config.model, {**arguments, **_no_backbone_weights(config.model)})


def _called(factory: Factory, arguments: dict[str, Any]) -> nn.Module:
    model = factory(**arguments)
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise CheckpointError(explain("the factory did not return a model", expected="a torch.nn.Module", got=got))
    return model


def _no_backbone_weights(name: str) -> dict[str, None]:
    if not name.startswith("torchvision:"):
        return {}
    find_factory(name)  # says so if there is no such model
    from torchvision.models import get_model_builder

    known = inspect.signature(get_model_builder(name.partition(":")[2])).parameters
    return {_BACKBONE: None} if _BACKBONE in known else {}


def _unbuilt(plan: Plan, model: nn.Module) -> Plan:
    """The plan without the layers that the factory makes as epitome layers itself."""
    own = {name for name, module in model.named_modules() if isinstance(module, EpitomeLayer)}
    return replace(plan, layers={name: layer for name, layer in plan.layers.items() if name not in own})


# ---- the state ----


def load_state(model: nn.Module, tensors: dict[str, Tensor], stored: Stored | None, path: Path, name: str) -> None:
    """Give the model its tensors, all of them and no others, of the shapes and dtypes that are stated.

    Raises:
        CheckpointError: If they are not its own.
    """
    _drop_absent_learners(model, tensors)
    own = model.state_dict()
    problems = _differences(own, tensors) or _dtype_differences(own, tensors, stored)
    if problems:
        raise CheckpointError(
            explain(
                f"the weights belong to another architecture than '{name}'",
                expected="the tensors of that model, name by name",
                got="; ".join(problems),
                where=str(path),
            )
        )
    try:
        model.load_state_dict(_tied(model, tensors), strict=True, assign=True)  # dtypes are the checkpoint's
    except RuntimeError as error:  # starts that are not finite
        raise CheckpointError(f"{path}: {str(error)[:_LONGEST]}") from error


def _tied(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters that the model has under several names stay one."""
    made: dict[int, nn.Parameter] = {}
    given = dict(tensors)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in given:
            new = made.setdefault(id(parameter), nn.Parameter(given[name], parameter.requires_grad))
            if new.data_ptr() != given[name].data_ptr() and not torch.equal(new, given[name]):
                raise CheckpointError(
                    explain("one parameter has two values", expected="the same under all its names", got=name)
                )
            given[name] = new
    return given


def _drop_absent_learners(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """A deployed state has frozen maps and no learners."""
    for name, layer in model.named_modules():
        if not isinstance(layer, EpitomeLayer) or layer.learner is None:
            continue
        prefix = f"{name}." if name else ""
        frozen = given.get(f"{prefix}routing_map.frozen")
        if frozen is None or frozen.numel() != 1 or not bool(frozen):
            continue
        if not any(key.startswith(f"{prefix}learner.") for key in given):
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
    return [f"{kind}: {first(names)}" for kind, names in kinds if names]


def _dtype_differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], stored: Stored | None) -> list[str]:
    wrong = [
        f"{name} in {given[name].dtype} instead of {expected}"
        for name, value in wanted.items()
        if not (expected := _expected(name, value, given[name], stored)).endswith(str(given[name].dtype))
    ]
    return [f"other dtype: {first(wrong)}"] if wrong else []


def _expected(name: str, own: Tensor, given: Tensor, stored: Stored | None) -> str:
    if not own.is_floating_point():
        return str(own.dtype)
    if stored is None:  # format 1.1 did not say
        return str(given.dtype) if given.is_floating_point() else "a floating-point dtype"
    if stored.epitomes is not None and name.rpartition(".")[2] == "epitome":
        return str(torch.float32)
    return f"torch.{stored.others.get(name, stored.dtype)}"


def first(names: list[str]) -> str:
    """The first few names, shortened, and how many more there are."""
    more = len(names) - _SHOWN
    shown = ", ".join(name if len(name) <= 120 else name[:120] + "..." for name in names[:_SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")
