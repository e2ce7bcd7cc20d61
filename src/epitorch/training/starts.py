"""How the starts moved: those of the routing maps before training and after each epoch, in `starts.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from epitorch._files import write_atomic
from epitorch.nn import EpitomeLayer
from epitorch.training.module import EpitomeModule

FORMAT = 1
MOST_STARTS = 64  # of an axis: more lines than that cannot be told apart in a picture
MOST_MOMENTS = 100

Starts = dict[str, dict[str, list[float]]]


def kept_of(count: int) -> list[int]:
    """Return which of so many starts are recorded: all, or `MOST_STARTS` spread evenly."""
    if count <= MOST_STARTS:
        return list(range(count))
    return [i * (count - 1) // (MOST_STARTS - 1) for i in range(MOST_STARTS)]


def starts_of(model: nn.Module) -> Starts:
    """Return the recorded starts by layer and axis, in positions; spatial ones by axis, as `spatial0`."""
    found: Starts = {}
    for name, layer in model.named_modules():
        if isinstance(layer, EpitomeLayer):
            found[name] = {axis: _kept(values) for axis, values in by_axis(layer).items()}
    return {name: axes for name, axes in found.items() if axes}


def by_axis(layer: EpitomeLayer) -> dict[str, torch.Tensor]:
    """Return the starts of a layer: one flat tensor for each epitome axis, `out`, `in`, `spatial0`, `spatial1`, ..."""
    axes: dict[str, torch.Tensor] = {}
    for axis, values in layer.starts().items():
        values = values.detach().float().cpu()
        if axis != "spatial":
            axes[axis] = values.flatten()
            continue
        for place, column in zip(layer.spec.spatial_axes, values.flatten(0, -2).T, strict=True):
            axes[f"spatial{place}"] = column
    return axes


def _kept(values: torch.Tensor) -> list[float]:
    return [round(float(values[i]), 3) for i in kept_of(len(values))]


class StartsLog(pl.Callback):
    """Writes `starts.json`: at most `MOST_STARTS` starts of an axis and about `MOST_MOMENTS` epochs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[int, Starts] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take what an unfinished run recorded, or the starts before training."""
        if trainer.global_step:
            self.rows = {epoch: row for epoch, row in _read(self.path).items() if epoch <= trainer.current_epoch}
        else:
            self._record(0, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the starts, every few epochs where there are many, and in any case the last."""
        epoch, epochs = trainer.current_epoch + 1, trainer.max_epochs or 1
        if epoch % -(-epochs // MOST_MOMENTS) == 0 or epoch == epochs:
            self._record(epoch, pl_module)

    def _record(self, epoch: int, module: pl.LightningModule) -> None:
        starts = starts_of(module.kept) if isinstance(module, EpitomeModule) else {}
        if starts:
            self.rows[epoch] = starts
            write_atomic(self.path, (json.dumps(self._content()) + "\n").encode())

    def _content(self) -> dict[str, Any]:
        last = self.rows[max(self.rows)]
        layers = {
            name: {axis: [row[name][axis] for row in self.rows.values()] for axis in axes}
            for name, axes in last.items()
        }
        return {"format": FORMAT, "epochs": list(self.rows), "layers": layers}


def _read(path: Path) -> dict[int, Starts]:
    """The rows of a run that goes on; none where the file is missing: the run matters more than its picture."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {
            epoch: {n: {axis: rows[i] for axis, rows in axes.items()} for n, axes in data["layers"].items()}
            for i, epoch in enumerate(data["epochs"])
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}
