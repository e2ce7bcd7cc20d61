"""What a run measured, as plain data: written to `results.json`, read back, shown as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from epitorch._files import write_atomic
from epitorch.errors import InputError, explain

FORMAT = 1
Record = TypeVar("Record")


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracies, as fractions of the images.

    Args:
        test: On the test images with the routing map, read once after training; None where there are none.
        test_learner: On the same batches with the index learner; None without learners.
        gap: `test_learner - test`: what the model loses when the learner is replaced by its average.
        heldout: On the held-out training images with the routing map, after each epoch.
        heldout_learner: The same with the learner.
        train: On the augmented training batches while training, for each epoch.
        test_images: How many test images there are.
        heldout_images: How many training images were held out.
        classes: Number of classes.
    """

    test: float | None
    test_learner: float | None = None
    gap: float | None = None
    heldout: list[float] = field(default_factory=list)
    heldout_learner: list[float] | None = None
    train: list[float] = field(default_factory=list)
    test_images: int = 0
    heldout_images: int = 0
    classes: int = 0


@dataclass(frozen=True)
class Parameters:
    """Numbers that the trained model keeps: epitomes, routing maps, all others. Learners are not kept."""

    epitome: int
    routing: int
    other: int
    total: int


@dataclass(frozen=True)
class MAdds:
    """Multiply-adds of one image.

    Args:
        executed: What the deployed network computes.
        paper: By the paper's formulas.
        interpolation: The part of `executed` that mixes neighbours.
    """

    executed: int
    paper: int
    interpolation: int


@dataclass(frozen=True)
class Seconds:
    """Wall time: the whole run, each epoch with its evaluation, and the training steps of each epoch alone."""

    total: float
    epochs: list[float]
    epochs_training: list[float]


@dataclass(frozen=True)
class PeakMemory:
    """Largest resident memory seen during the run and, on CUDA, the most that torch allocated there, in bytes."""

    rss: int
    cuda: int | None = None


@dataclass(frozen=True)
class RunResult:
    """One training run."""

    name: str
    accuracy: Accuracy
    parameters: Parameters
    madds: MAdds
    seconds: Seconds
    peak_memory_bytes: PeakMemory
    seed: int
    loss: dict[str, list[float | None]]
    environment: dict[str, Any]
    command: list[str]
    recipe: dict[str, Any]
    recipe_text: str
    recipe_sha256: str
    data: dict[str, Any]
    date: str
    format: int = FORMAT


_NESTED: dict[str, type[Any]] = {
    "accuracy": Accuracy,
    "parameters": Parameters,
    "madds": MAdds,
    "seconds": Seconds,
    "peak_memory_bytes": PeakMemory,
}


def result_to_json(result: RunResult) -> dict[str, Any]:
    """Return a result as plain data."""
    return asdict(result)


def result_from_json(data: Any, *, where: str = "result") -> RunResult:
    """Read a result back.

    Raises:
        InputError: If it is not a result, or one of a later format.
    """
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise InputError(
            explain("this is not a result that can be read", expected=f"format {FORMAT}", got=version, where=where)
        )
    nested = {key: _record(cls, data.get(key), f"{where}: {key}") for key, cls in _NESTED.items()}
    return _record(RunResult, {**data, **nested}, where)


def _record(cls: type[Record], data: Any, where: str) -> Record:
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    needed = {n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if not isinstance(data, dict) or not needed <= set(data) <= set(known):
        raise InputError(explain("keys are missing or unknown", expected=sorted(known), got=_keys(data), where=where))
    return cls(**data)


def _keys(data: Any) -> Any:
    return sorted(data) if isinstance(data, dict) else repr(data)


def results_to_json(results: RunResult | Sequence[RunResult]) -> dict[str, Any]:
    """Return one result as plain data, or several as `{"format": 1, "runs": [...]}`."""
    if isinstance(results, RunResult):
        return result_to_json(results)
    return {"format": FORMAT, "runs": [result_to_json(result) for result in results]}


def save_results(path: Path, results: RunResult | Sequence[RunResult]) -> None:
    """Write `results_to_json(results)`; the file is there whole or not at all."""
    content = json.dumps(results_to_json(results), indent=1, allow_nan=False)
    write_atomic(Path(path), (content + "\n").encode())


def load_results(path: Path) -> list[RunResult]:
    """Read what `save_results` wrote; a single result gives a list of one.

    Raises:
        InputError: If the file is missing or is not a results file.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = error if isinstance(error, OSError) else f"no JSON: {error}"
        raise InputError(
            explain("the results cannot be read", expected="a results.json", got=got, where=str(path))
        ) from error
    runs = data["runs"] if isinstance(data, dict) and isinstance(data.get("runs"), list) else [data]
    return [result_from_json(run, where=str(path)) for run in runs]


def results_table(results: Sequence[RunResult]) -> str:
    """Return the results as a Markdown table whose columns line up, one row a run in the order given.

    Accuracies are in percent; parameters and MAdds are whole numbers; the learner's column appears where a run has one.
    """
    learner = any(result.accuracy.test_learner is not None for result in results)
    header = ["run", "test %", *(["with learner %"] if learner else []), "held-out %"]
    header += ["parameters", "MAdds", "seconds", "seed"]
    rows = [_row(result, learner=learner) for result in results]
    return aligned([header, *rows])


def _row(result: RunResult, *, learner: bool) -> list[str]:
    accuracy = result.accuracy
    return [
        result.name,
        _percent(accuracy.test),
        *([_percent(accuracy.test_learner)] if learner else []),
        _percent(accuracy.heldout[-1] if accuracy.heldout else None),
        f"{result.parameters.total:,}",
        f"{result.madds.executed:,}",
        f"{result.seconds.total:.1f}",
        str(result.seed),
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def aligned(rows: list[list[str]]) -> str:
    """Return rows of cells, the header first, as a Markdown table whose columns line up."""
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]  # 2: a rule is at least -:
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join("| " + " | ".join(_cells(line, widths)) + " |" for line in lines)


def _cells(line: list[str], widths: list[int]) -> list[str]:
    first, *others = line
    return [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
