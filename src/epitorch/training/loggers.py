"""Where the numbers of a run go: Lightning's loggers by name."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from epitorch.errors import InputError, explain, require, suggest
from epitorch.training.folder import LOGS

DEFAULT = ("csv", "tensorboard")
_METRICS = "metrics.csv"

# the package that must be there, and the logger for a run's folder and name
_MADE: dict[str, tuple[str | None, Callable[[Path, str], Logger]]] = {
    "csv": (None, lambda out, name: CSVLogger(out, name=LOGS, version="")),
    "tensorboard": (None, lambda out, name: TensorBoardLogger(out, name=LOGS, version="")),
    "wandb": ("wandb", lambda out, name: WandbLogger(name=name, save_dir=out / LOGS, project="epitorch")),
    "mlflow": (
        "mlflow",
        lambda out, name: MLFlowLogger("epitorch", run_name=name, save_dir=str(out / LOGS / "mlruns")),
    ),
    "comet": ("comet_ml", lambda out, name: CometLogger(name=name, project="epitorch")),
}
NAMES = tuple(_MADE)


def check_loggers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once.

    Raises:
        InputError: If there is no such logger.
        MissingExtraError: If its package is not installed.
    """
    for name in names:
        if name not in _MADE:
            raise InputError(
                explain(
                    f"there is no logger '{name}'{suggest(name, list(NAMES))}",
                    expected=" | ".join(NAMES),
                    got=repr(name),
                    where="--logger",
                )
            )
        package = _MADE[name][0]
        if package is not None:
            require(package, "loggers")
    return tuple(dict.fromkeys(names))


def make_loggers(names: Sequence[str], out: Path, name: str, *, resume: bool) -> list[Logger]:
    """Return the loggers of a run.

    Args:
        names: As `check_loggers` returns them.
        out: Folder of the run.
        name: Of the recipe.
        resume: The run goes on: rows of `metrics.csv` stay.
    """
    made = [_MADE[each][1](out, name) for each in names]
    for logger in made:
        if resume and isinstance(logger, CSVLogger):
            _keep_rows(logger, out / LOGS / _METRICS)
    return made


def _keep_rows(logger: CSVLogger, path: Path) -> None:
    """Put the rows that are there into the logger, which deletes the file when it begins."""
    rows: list[dict[str, Any]] = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
        experiment = logger.experiment
    for row in rows:
        experiment.metrics.append({key: value for key, value in row.items() if value})
    experiment.save()
