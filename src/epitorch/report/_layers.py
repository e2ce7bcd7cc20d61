"""A run's layers and routing maps, from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch.checkpoint import load_checkpoint
from epitorch.cost import Cost, count
from epitorch.errors import InputError, explain
from epitorch.nn import EpitomeLayer
from epitorch.report._data import Layer, Routing, Run
from epitorch.report._read import CHECKPOINT, CONFIG, STARTS, Found, clean, read_json
from epitorch.training.starts import FORMAT, by_axis, kept_of

_DEFAULT_SHAPE = (3, 224, 224)


def with_layers(run: Run, found: Found, dense: Mapping[str, Tensor] | None, *, allow_factory: bool) -> Run:
    """Return the run with its layers, its routing maps and how they moved.

    Args:
        run: As `describe` returns it.
        found: Where it is.
        dense: Weights to compare the generated ones with, by layer.
        allow_factory: As for `load_checkpoint`.

    Raises:
        CheckpointError: If the checkpoint is damaged.
        InputError: If the recorded starts cannot be read.
    """
    folder = found.folder
    if folder is None or not any((spot / CONFIG).is_file() for spot in (folder, folder / CHECKPOINT)):
        note = "No checkpoint: layers and routing maps are not known."
        return replace(run, notes=(*run.notes, note))
    checkpoint = load_checkpoint(folder, allow_factory=allow_factory)
    model, config = checkpoint.model, checkpoint.config
    shape = config.input.shape if config.input else (config.input_shape or (1, *_DEFAULT_SHAPE))[1:]
    cost = count(model, torch.zeros(1, *shape))
    moved = _moved(folder / STARTS)
    routing = routing_of(model, moved)
    notes = list(run.notes)
    if routing and not moved:
        notes.append("How the starts moved was not recorded.")
    return replace(
        run,
        layers=layers_of(model, cost, dense or {}),
        routing=routing,
        epitomes=any(isinstance(layer, EpitomeLayer) for layer in model.modules()),
        params=cost.params if run.params is None else run.params,
        madds=cost.madds if run.madds is None else run.madds,
        notes=tuple(notes),
    )


def layers_of(model: nn.Module, cost: Cost, dense: Mapping[str, Tensor]) -> tuple[Layer, ...]:
    """Return the counted layers of a model."""
    modules = dict(model.named_modules())
    layers = []
    for row in cost.layers:
        module = modules[row.name]
        epitome = module if isinstance(module, EpitomeLayer) else None
        before = row.params if epitome is None else epitome.spec.num_weight + row.params_other
        layers.append(
            Layer(
                clean(row.name or "(model)"),
                row.kind,
                epitome is not None,
                before,
                row.params,
                row.madds,
                row.madds_dense,
                row.strategy,
                None if epitome is None or row.name not in dense else _error(epitome, dense[row.name], row.name),
            )
        )
    return tuple(layers)


def _error(layer: EpitomeLayer, weight: Tensor, name: str) -> float | None:
    with torch.no_grad():
        generated = layer.weight.double()
    if generated.shape != weight.shape:
        raise InputError(
            explain(
                "the dense weights are of another network",
                expected=f"shape {tuple(generated.shape)}",
                got=f"shape {tuple(weight.shape)}",
                where=name,
                fix="give --dense the checkpoint of the same architecture",
            )
        )
    norm = float(weight.double().norm())
    return float((generated - weight.double()).norm()) / norm if norm else None


def dense_weights(folder: str | Path, *, allow_factory: bool = False) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by layer.

    Raises:
        CheckpointError: If it is no checkpoint, or is damaged.
    """
    model = load_checkpoint(folder, allow_factory=allow_factory).model
    weights = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            weights[name] = weight.detach()
    return weights


# ---- routing ----


def routing_of(model: nn.Module, moved: Mapping[str, Any]) -> tuple[Routing, ...]:
    """Return where the blocks of every epitome begin."""
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, EpitomeLayer):
            found += [_routing(name, layer, axis, values, moved) for axis, values in by_axis(layer).items()]
    return tuple(found)


def _routing(name: str, layer: EpitomeLayer, axis: str, starts: Tensor, moved: Mapping[str, Any]) -> Routing:
    spec = layer.spec
    if axis.startswith("spatial"):
        place = int(axis.removeprefix("spatial"))
        size, length = spec.window[place], spec.kernel[place]
    else:
        first = axis == "out"
        size, length = spec.epitome_shape[0 if first else 1], spec.block_out if first else spec.block_in
    shown = kept_of(len(starts))
    rows = moved.get("layers", {}).get(name, {}).get(axis, ())
    fits = all(len(row) == len(shown) for row in rows)
    return Routing(
        clean(name or "(model)"),
        axis,
        size,
        length,
        len(starts),
        tuple(shown),
        tuple(float(starts[i]) % size for i in shown),
        tuple(moved["epochs"]) if rows and fits else (),
        tuple(tuple(float(v) % size for v in row) for row in rows) if fits else (),
    )


def _moved(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = read_json(path, f"{STARTS} as `epitorch train` writes it")
    if not _whole(data):
        raise InputError(
            explain(
                "the recorded starts cannot be read",
                expected=f"format {FORMAT}: epochs, and for each layer and axis a row of numbers for each epoch",
                got="something else",
                where=str(path),
            )
        )
    return data


def _whole(data: Any) -> bool:
    try:
        rows = [rows for axes in data["layers"].values() for rows in axes.values()]
        epochs = data["epochs"]
        return (
            data["format"] == FORMAT
            and all(type(epoch) is int for epoch in epochs)
            and all(len(each) == len(epochs) for each in rows)
            and all(isinstance(value, int | float) for each in rows for row in each for value in row)
        )
    except (KeyError, TypeError, AttributeError):
        return False
