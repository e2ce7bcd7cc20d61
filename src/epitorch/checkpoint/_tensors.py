"""`model.safetensors`: from a model's state to bytes and back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch.checkpoint._config import damaged
from epitorch.checkpoint._data import EPITOME_DTYPES, Stored
from epitorch.errors import CheckpointError, InputError, explain, require
from epitorch.nn import EpitomeLayer

MAX_HEADER = 8 << 20
SCALE = ".scale"  # behind an epitome's name: what its channels are multiplied by
_STEPS = 127


@dataclass(frozen=True)
class Packed:
    """The file of weights, and how to read it."""

    data: bytes
    stored: Stored


@dataclass
class _Kept:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)


# ---- writing ----


def pack(model: nn.Module, *, learner: bool, epitomes: str | None) -> Packed:
    """Return the state as the bytes of a safetensors file; a tensor under several names is stored once.

    Args:
        model: Of any dtype; only float32 epitomes can be stored narrower.
        learner: Keep index learners. Without them the routing maps are stored as frozen.
        epitomes: Dtype of the stored epitomes; None is their own.

    Raises:
        CheckpointError: If the state holds something that is no tensor.
        InputError: If the epitomes cannot be stored as asked.
    """
    save = require("safetensors.torch", "hub").save
    state = model.state_dict() if learner else _without_learners(model)
    kept = _kept(state)
    stored = {name: _on_cpu(value) for name, value in kept.tensors.items()}
    floats = {name: _word(value) for name, value in stored.items() if value.is_floating_point()}
    usual = Counter(floats.values()).most_common(1)[0][0] if floats else "float32"
    if epitomes is not None:
        for name in _check_storage(model, epitomes, stored):
            stored.update(_narrowed(name, stored[name], axes(model)[name], epitomes))
    data = save(stored, metadata={"format": "pt"})  # what readers of safetensors files look for
    others = {name: word for name, word in floats.items() if word != usual}
    return Packed(data, Stored(sha256(data).hexdigest(), len(data), usual, others, epitomes, kept.shared))


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()


def _word(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _without_learners(model: nn.Module) -> dict[str, Any]:
    state = dict(model.state_dict())
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, EpitomeLayer) and layer.learner is not None:
            prefix = f"{name}." if name else ""
            state = {key: value for key, value in state.items() if not key.startswith(f"{prefix}learner.")}
            state[f"{prefix}routing_map.frozen"] = torch.tensor(True)
    return state


def _kept(state: Mapping[str, Any]) -> _Kept:
    kept = _Kept()
    seen: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                explain("the model's state is not only tensors", expected="a tensor", got=repr(value)[:80], where=name)
            )
        if not value.numel():
            kept.tensors[name] = value
            continue
        key = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if key in seen:
            kept.shared[name] = seen[key]
        else:
            seen[key] = name
            kept.tensors[name] = value
    return kept


def axes(model: nn.Module) -> dict[str, int]:
    """Axis of the output channels of every epitome, by the epitome's name in the state."""
    return {
        f"{name}.epitome" if name else "epitome": int(layer.transposed)
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, EpitomeLayer)
    }


def _check_storage(model: nn.Module, epitomes: str, tensors: Mapping[str, Tensor]) -> list[str]:
    if epitomes not in EPITOME_DTYPES:
        raise InputError(
            explain("no such storage of epitomes", expected=" | ".join(EPITOME_DTYPES), got=repr(epitomes))
        )
    names = [name for name in axes(model) if name in tensors]
    if not names and epitomes != "float32":
        raise InputError(
            explain(
                f"there is nothing to store as {epitomes}",
                expected="a model with epitome layers",
                got=type(model).__name__,
                fix="leave dtype out: only epitomes are stored narrower",
            )
        )
    wrong = next((name for name in names if tensors[name].dtype != torch.float32), None)
    if wrong is not None:
        got = f"{wrong} in {_word(tensors[wrong])}"
        raise InputError(
            explain("storage has a dtype of its own for float32 only", expected="float32 epitomes", got=got)
        )
    unusable = next((name for name in names if not torch.isfinite(tensors[name]).all()), None)
    if unusable is not None and epitomes == "int8":
        raise InputError(explain("values cannot be rounded", expected="finite values", got="others", where=unusable))
    return names


def _narrowed(name: str, value: Tensor, axis: int, epitomes: str) -> dict[str, Tensor]:
    if epitomes != "int8":
        narrow = value.to(getattr(torch, epitomes))
        if not torch.equal(torch.isfinite(narrow), torch.isfinite(value)):
            largest = f"up to {value[torch.isfinite(value)].abs().max():.3g}"
            expected = f"at most {torch.finfo(narrow.dtype).max:.3g}"
            fix = "store them as bfloat16 or int8"
            raise InputError(
                explain(f"values too large for {epitomes}", expected=expected, got=largest, where=name, fix=fix)
            )
        return {name: narrow}
    scale = value.abs().amax(dim=[d for d in range(value.dim()) if d != axis]) / _STEPS
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    whole = torch.round(value / _along(steps, axis, value.dim())).clamp(-_STEPS, _STEPS)
    return {name: whole.to(torch.int8), name + SCALE: scale}


def _along(scale: Tensor, axis: int, dims: int) -> Tensor:
    return scale.reshape([-1 if d == axis else 1 for d in range(dims)])


# ---- reading ----


def unpack(data: bytes, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: If it is none, or its header is longer than any real one.
    """
    load = require("safetensors.torch", "hub").load
    _header(data, path)
    try:
        return dict(sorted(load(data).items()))
    except Exception as error:  # a parser of foreign bytes: whatever it says, they are no checkpoint
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _header(data: bytes, path: Path) -> bytes:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise damaged(path, f"{len(data):,} bytes that promise a header of {length:,}")
    if length > MAX_HEADER:
        raise damaged(path, f"a header of {length:,} bytes", f"at most {MAX_HEADER:,}")
    return data[8 : 8 + length]


def check_old_hash(data: bytes, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Files of format 1.1 carry a hash of their tensors in themselves.

    Raises:
        CheckpointError: If it is not theirs.
    """
    try:
        metadata = dict(json.loads(_header(data, path)).get("__metadata__") or {})
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise damaged(path, error) from error
    if metadata.pop("sha256", None) != tensors_hash(tensors, metadata):
        raise damaged(path, "tensors that do not match the file's own hash")


def tensors_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Hash of the tensors as format 1.1 made it."""
    digest = sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def widened(model: nn.Module, tensors: dict[str, Tensor], stored: Stored, path: Path) -> dict[str, Tensor]:
    """Return the tensors with float32 epitomes and all their names.

    Raises:
        CheckpointError: If an epitome or its scales are not as they were stored.
    """
    made = dict(tensors)
    own = model.state_dict()
    for name, axis in axes(model).items() if stored.epitomes is not None else ():
        if name in made and name in own:
            _check_epitome(name, made, own[name], axis, stored, path)
            made[name] = _wide(name, made, axis, stored)
    for name, source in stored.shared.items():
        if source not in made or name in made:
            raise damaged(path, f"'{name}', a second name of '{source}'", "names that the file has")
        made[name] = made[source]
    return made


def _check_epitome(
    name: str, tensors: Mapping[str, Tensor], own: Tensor, axis: int, stored: Stored, path: Path
) -> None:
    value = tensors[name]
    if _word(value) != stored.epitomes or value.shape != own.shape:
        got = f"{name} {tuple(value.shape)} in {_word(value)}"
        raise damaged(path, got, f"an epitome {tuple(own.shape)} in {stored.epitomes}")
    if stored.epitomes == "int8":
        scale = tensors.get(name + SCALE)
        if scale is None or scale.dtype != torch.float32 or scale.shape != (value.shape[axis],):
            got = "no scales" if scale is None else f"scales {tuple(scale.shape)} in {_word(scale)}"
            raise damaged(path, f"{name} with {got}", "a float32 scale for each output channel")
        if not torch.isfinite(scale).all() or bool((scale < 0).any()):
            raise damaged(path, f"{name} with scales that are negative or not finite")


def _wide(name: str, made: dict[str, Tensor], axis: int, stored: Stored) -> Tensor:
    value = made[name].to(torch.float32)
    return value if stored.epitomes != "int8" else value * _along(made.pop(name + SCALE), axis, value.dim())
