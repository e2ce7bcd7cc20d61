"""Runs without training: a trained network is compressed, and the answers are compared with its own."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.peers.budgets import parse_budget
from benchmarks.peers.common import MethodError, attempt, check_same, costs, load_final
from benchmarks.peers.jobs import Job
from benchmarks.peers.methods import METHODS, Task, user_lines
from benchmarks.peers.networks import NAME, lite0_trained
from torch import Tensor, nn

import epitorch
from epitorch.errors import DataError, explain, require

_SIDE, _SHORT = 224, 256
_MEAN, _STD = 0.498, 0.502  # that the weights were trained with


@dataclass(frozen=True)
class Images:
    """Calibration images and others that are measured; the seed draws which.

    Args:
        calibration: shape: (n, 224, 224, 3), uint8.
        measured: Likewise.
        labels: Of the measured ones.
    """

    calibration: Tensor
    measured: Tensor
    labels: Tensor


def compared(job: Job) -> dict[str, Any]:
    """Compress, write, read back, and compare with the network as it was."""
    images = _images(job)
    task = _task(job, images)
    dense = lite0_trained()
    began = time.process_time()
    model, file, lines = _made(job, task, dense, images)
    took = time.process_time() - began
    found = attempt(lambda: predict(model, images.measured))
    whole = predict(dense, images.measured)
    method = METHODS[job.method]
    counted = load_final(job if method.finish is None else job.other(_source(job))).model
    return {
        "accuracy": float((found == images.labels).float().mean()),
        "agreement": float((found == whole).float().mean()),
        "images": len(images.measured),
        **costs(task, counted),
        "limit": None if job.budget == "own" else task.limit,
        "file_bytes": file.stat().st_size,
        "file": str(file.relative_to(job.folder)),
        "train_seconds": took,
        "lines": lines,
    }


def _source(job: Job) -> str:
    """The method whose network is taken: the dense one has weights from the start."""
    begins = METHODS[job.method].begins
    return "dense" if begins in ("fresh", "half") else begins


def _made(job: Job, task: Task, dense: nn.Module, images: Images) -> tuple[nn.Module, Path, int]:
    method = METHODS[job.method]
    if method.finish is not None:
        return _of_another(job, task)
    model, description = copy.deepcopy(dense), {"backbone": task.base, "arguments": dict(task.arguments)}
    if method.prepare is not None:
        prepare = method.prepare
        model, layers = attempt(lambda: prepare(model, task))
        arguments = {"base": task.base, "arguments": dict(task.arguments), "layers": layers}
        description = {"backbone": NAME, "arguments": arguments}
    elif method.convert is not None:
        convert = method.convert
        model = attempt(lambda: convert(model, task))
    if job.method != "dense":
        epitorch.reestimate_batch_norm_(model, batches(images.calibration))
    folder = epitorch.save_pretrained(model.eval(), job.folder / "final", **description)  # type: ignore[arg-type]
    check_same(model, load_final(job).model, job.part.shape)
    return model, folder / "model.safetensors", user_lines(method, {}) or _conversion_lines(job)


def _conversion_lines(job: Job) -> int:
    """plan, convert_ and the import: what `convert` of an epitome method does."""
    return 0 if job.method == "dense" else 3


def _of_another(job: Job, task: Task) -> tuple[nn.Module, Path, int]:
    method, source = METHODS[job.method], job.other(_source(job))
    before = source.result()
    if before is None or before["status"] != "done":
        raise MethodError(f"{source.name} failed, or was not made")
    assert method.finish is not None
    finish = method.finish
    folder = job.folder / "file"
    folder.mkdir(exist_ok=True)
    model, file = attempt(lambda: finish(load_final(source).model, task, folder))
    return model, file, user_lines(method, {}) + before["lines"]


def _task(job: Job, images: Images) -> Task:
    dense = job.other("dense").result() if job.method != "dense" else None
    return Task(
        job.part.base,
        job.part.arguments,
        None,
        torch.zeros(1, *job.part.shape),
        parse_budget(job.budget),
        job.part.skip,
        job.seed,
        lambda: torch.cat(list(batches(images.calibration))),
        dense_bytes=dense["file_bytes"] if dense and dense["status"] == "done" else 0,
    )


# ---- images ----


def batches(images: Tensor, size: int = 20) -> Iterator[Tensor]:
    """Normalised inputs. shape: (n, H, W, 3) uint8 -> (size, 3, H, W)."""
    for part in images.split(size):
        yield (part.permute(0, 3, 1, 2).float() / 255 - _MEAN) / _STD


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    """The class that the network finds in each image. shape: (n,)."""
    return torch.cat([model.eval()(batch).argmax(1) for batch in batches(images)])


def _images(job: Job) -> Images:
    """Draw calibration images and measured ones; no image is both."""
    images, labels = _decoded(Path(job.data), job.out / job.part.name / "images.npz")
    part, needed = job.part, job.part.calibration + job.part.measured
    if len(images) < needed:
        raise DataError(explain("too few images", expected=f">= {needed}", got=len(images), where=job.data))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(job.seed))
    calibration, measured = order[: part.calibration], order[part.calibration : needed]
    return Images(images[calibration], images[measured], labels[measured])


def _decoded(file: Path, cache: Path) -> tuple[Tensor, Tensor]:
    """Crops and labels, decoded once."""
    if not cache.exists():
        parquet: Any = require("pyarrow.parquet", "train")
        if not file.is_file():
            raise DataError(explain("no images", expected="a parquet file with image and label", got=str(file)))
        rows = parquet.read_table(file).to_pylist()
        crops, labels = [_crop(row["image"]["bytes"]) for row in rows], [row["label"] for row in rows]
        scratch = cache.with_suffix(".part.npz")
        np.savez(scratch, images=np.stack(crops), labels=np.array(labels))
        scratch.replace(cache)
    stored = np.load(cache)
    return torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"])


def _crop(data: bytes) -> np.ndarray:
    """Shorter side to 256, middle 224x224."""
    pillow: Any = require("PIL.Image", "train")
    image = pillow.open(io.BytesIO(data)).convert("RGB")
    scale = _SHORT / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), pillow.Resampling.BICUBIC)
    left, top = (image.width - _SIDE) // 2, (image.height - _SIDE) // 2
    return np.asarray(image.crop((left, top, left + _SIDE, top + _SIDE)))
