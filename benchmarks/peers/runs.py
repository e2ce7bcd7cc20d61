"""One run: train or compress, write the file, read it back, measure."""

from __future__ import annotations

import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import epitorch
from benchmarks.peers.budgets import parse_budget
from benchmarks.peers.jobs import RESULT, Job
from benchmarks.peers.methods import METHODS, Changes, Task, user_lines
from benchmarks.peers.networks import NAME
from epitorch._files import write_atomic
from epitorch.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from epitorch.errors import DataError, InputError, MissingExtraError
from epitorch.results import RunResult, load_results
from epitorch.training.data_kinds import kind_of, load_split, make_loader, normalization
from epitorch.training.measuring import evaluate
from epitorch.training.recipe import Recipe, parse_recipe
from epitorch.training.run import train
from epitorch.training.setup import environment, load_training_data

SMOKE_STEPS = 2
Value = TypeVar("Value")


class MethodError(Exception):
    """A method failed: a result like any other."""


def run(job: Job) -> dict[str, Any]:
    """Make a run and write its result; a failure of the method is a result too.

    Raises:
        MissingExtraError: If a package is missing.
        InputError: If data or folders do not fit.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    try:
        measured = (_trained if METHODS[job.method].begins in ("fresh", "half") else _finished)(job)
        found = {"status": "done", **measured}
    except MethodError as error:
        cause = error.__cause__ or error
        shown = "".join(traceback.format_exception(cause)[-4:])
        found = {"status": "failed", "error": f"{type(cause).__name__}: {cause}"[:2000], "traceback": shown[-2000:]}
    result = {**_about(job), **found, "wall_seconds": time.perf_counter() - began}
    write_atomic(job.folder / RESULT, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _about(job: Job) -> dict[str, Any]:
    method = METHODS[job.method]
    return {
        "identity": job.identity(),
        **{key: job.identity()[key] for key in ("part", "method", "budget", "seed")},
        "versions": {name: installed(name) for name in method.needs},
        "environment": environment(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def installed(package: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def attempt(work: Callable[[], Value]) -> Value:
    """Do what belongs to the method; its errors are told apart from those of data and folders.

    Raises:
        MethodError: With the method's own error as its cause.
    """
    try:
        return work()
    except (MissingExtraError, DataError, MethodError):
        raise
    except Exception as error:  # a package may raise anything
        raise MethodError(str(error)) from error


# ---- trained ----


def _trained(job: Job) -> dict[str, Any]:
    method, task = METHODS[job.method], task_of(job)
    start = None if method.begins == "fresh" else _result_of(job.other("start"))
    if method.prepare is not None:
        changes = _prepared(job, task)
    else:
        assert method.changes is not None
        make = method.changes
        changes = attempt(lambda: make(task))
    result = attempt(lambda: _train(job, _recipe(job, changes)))
    model, file = _stored(job)
    return {
        **_accuracy(result),
        **costs(task, model),
        "limit": None if job.budget == "own" else task.limit,
        "file_bytes": file.stat().st_size,
        "train_seconds": result.seconds.total + (start.seconds.total if start else 0.0),
        "peak_memory_bytes": max(r.peak_memory_bytes.rss for r in (result, start) if r),
        "lines": user_lines(method, changes),
        "recipe_sha256": result.recipe_sha256,
        "steps": result.data["steps_run"],
    }


def _prepared(job: Job, task: Task) -> Changes:
    """Make the smaller network once: a run that goes on begins from the same weights."""
    method, told, weights = METHODS[job.method], job.folder / "layers.json", job.folder / "start.safetensors"
    if not (told.exists() and weights.exists()):
        assert method.prepare is not None
        assert task.start is not None
        make, dense = method.prepare, load_checkpoint(task.start).model
        model, layers = attempt(lambda: make(dense, task))
        save_file({name: value.detach().contiguous() for name, value in model.state_dict().items()}, weights)
        write_atomic(told, json.dumps(layers).encode())
    layers = json.loads(told.read_text(encoding="utf-8"))
    arguments = {"base": task.base, "arguments": dict(task.arguments), "layers": layers, "start": str(weights)}
    return {"model": {"name": NAME, "arguments": arguments}}


def _recipe(job: Job, changes: Changes) -> Recipe:
    """The part's recipe with the method's sections in place of, and its training keys over, the dense one's."""
    part, method = job.part, METHODS[job.method]
    training = dict(part.recipe["training"])
    epochs = {"half": part.epochs - part.start_epochs}.get(method.begins, part.epochs)
    if method.begins == "half":
        training |= part.tuning
    training |= {**changes.get("training", {}), "epochs": part.start_epochs if job.method == "start" else epochs}
    dense = {"model": {"name": part.base, "arguments": dict(part.arguments)}}
    sections = {**dense, **part.recipe, **changes, "training": training}
    return parse_recipe({"name": f"peers-{part.name}/{job.name}", **sections}, source=job.name)


def _train(job: Job, recipe: Recipe) -> RunResult:
    """Train, go on with an unfinished run, or take the finished one."""
    folder = job.folder / "train"
    done = folder / "results.json"
    if done.exists() and load_results(done)[0].recipe_sha256 == recipe.sha256:
        return load_results(done)[0]
    steps = SMOKE_STEPS if job.smoke else None
    try:
        return train(recipe, job.data, folder, seed=job.seed, max_steps=steps)
    except InputError:
        if not folder.exists():
            raise
        return train(recipe, job.data, folder, seed=job.seed, max_steps=steps, overwrite=True)


def _stored(job: Job) -> tuple[nn.Module, Path]:
    """Write the network as a reader needs it, without learners and without a trace of its first weights."""
    trained = load_checkpoint(job.folder / "train", allow_factory=True)
    arguments = {key: value for key, value in trained.config.arguments.items() if key != "start"}
    config = replace(trained.config, arguments=arguments)
    folder = save_checkpoint(job.folder / "final", trained.model, config, learner=False)
    check_same(trained.model, load_final(job).model, _probe(config.input.shape if config.input else ()))
    return trained.model, folder / "model.safetensors"


def load_final(job: Job) -> Checkpoint:
    """The network that a run ended with."""
    return load_checkpoint(job.folder / "final", allow_factory=True)


def _probe(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def check_same(model: nn.Module, other: nn.Module, probe: Tensor) -> None:
    """Raise MethodError unless both networks say the same about the inputs."""
    first, second = model.eval()(probe), other.eval()(probe)
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5 * float(first.abs().max())):
        raise MethodError(f"the file gives other outputs: they differ by {float((first - second).abs().max()):.2e}")


def _result_of(job: Job) -> RunResult:
    return load_results(job.folder / "train" / "results.json")[0]


def _accuracy(result: RunResult) -> dict[str, Any]:
    return {"accuracy": result.accuracy.test, "images": result.accuracy.test_images, "loss": result.loss["train"]}


# ---- finished without training ----


def _finished(job: Job) -> dict[str, Any]:
    method, task, source = METHODS[job.method], task_of(job), job.other(METHODS[job.method].begins)
    before = source.result()
    assert before is not None
    if before["status"] != "done":
        raise MethodError(f"{source.name} failed")
    assert method.finish is not None
    finish, checkpoint = method.finish, load_final(source)
    folder = job.folder / "file"
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    model, file = attempt(lambda: finish(load_final(source).model, task, folder))
    took = time.perf_counter() - began
    limit = task.limit if job.budget.startswith("bytes") else before["limit"]
    return {
        **attempt(lambda: _test(job, source, model)),
        **costs(task, checkpoint.model),
        "limit": limit,
        "file_bytes": file.stat().st_size,
        "file": str(file.relative_to(job.folder)),
        "train_seconds": before["train_seconds"] + took,
        "peak_memory_bytes": before["peak_memory_bytes"],
        "lines": user_lines(method, {}) + (before["lines"] if not method.code else 0),
    }


def _test(job: Job, source: Job, model: nn.Module) -> dict[str, Any]:
    recipe = _recipe(source, {})
    checkpoint = load_final(source)
    assert checkpoint.config.input is not None
    images = load_split(job.data, "test", kind_of(recipe))
    loader = make_loader(images, 100, torch.device("cpu"))
    found = evaluate(model.eval(), loader, normalization(checkpoint.config.input))
    return {"accuracy": found.accuracy, "images": found.images}


# ---- what methods are given ----


def task_of(job: Job) -> Task:
    """What the job's method is asked to do."""
    part = job.part
    start = job.other("start").folder / "train" / "checkpoint"
    dense = job.other("dense").result() if job.method != "dense" else None
    return Task(
        part.base,
        part.arguments,
        part.init,
        torch.zeros(1, *_shape(job)),
        parse_budget(job.budget),
        part.skip,
        job.seed,
        lambda: _samples(job),
        start.absolute() if start.exists() else None,
        dense["file_bytes"] if dense and dense["status"] == "done" else 0,
    )


def _shape(job: Job) -> tuple[int, ...]:
    """Of one input."""
    sound = job.part.recipe.get("sound")
    return (3, 32, 32) if sound is None else (1, round(sound["clip_seconds"] * sound["sample_rate"]))


def _samples(job: Job) -> Tensor:
    """Training inputs, normalised as the network is used to."""
    data = load_training_data(_recipe(job.other("dense"), {}), job.data)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(job.seed))
    chosen: Any = data.train
    return normalization(data.input)(chosen.images[order[: job.part.calibration]])


def costs(task: Task, model: nn.Module) -> dict[str, Any]:
    """Parameters and multiply-adds that the deployed network executes."""
    cost = epitorch.count(model, task.example)
    return {"params": cost.params, "madds": cost.madds, "uncounted": len(cost.uncounted)}
