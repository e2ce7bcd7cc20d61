"""Runs that train, and those that compress what was trained."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.budgets import parse_budget
from benchmarks.peers.common import MethodError, attempt, check_same, costs, load_final
from benchmarks.peers.jobs import Job
from benchmarks.peers.methods import METHODS, Changes, Task, user_lines
from benchmarks.peers.networks import NAME
from safetensors.torch import save_file
from torch import Tensor, nn

from epitorch._files import write_atomic
from epitorch.checkpoint import load_checkpoint, save_checkpoint
from epitorch.results import RunResult, load_results
from epitorch.training.data_kinds import kind_of, load_split, make_loader, normalization
from epitorch.training.folder import Identity
from epitorch.training.measuring import evaluate
from epitorch.training.recipe import Recipe, parse_recipe
from epitorch.training.run import train
from epitorch.training.setup import load_training_data

SMOKE_STEPS = 2


def trained(job: Job) -> dict[str, Any]:
    """Train a network, or the one that a method made, and write it as a reader needs it."""
    method, task = METHODS[job.method], task_of(job)
    start = None if method.begins == "fresh" else _start(job.other("start"))
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
    told, weights, start = job.folder / "layers.json", job.folder / "start.safetensors", _weights_of_start(job)
    made = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    if made.get("start") != start:
        prepare = METHODS[job.method].prepare
        assert prepare is not None
        assert task.start is not None
        dense = load_checkpoint(task.start).model
        model, layers = attempt(lambda: prepare(dense, task))
        save_file({name: value.detach().contiguous() for name, value in model.state_dict().items()}, weights)
        made = {"start": start, "layers": layers}
        write_atomic(told, json.dumps(made).encode())
    arguments = {"base": task.base, "arguments": dict(task.arguments), "layers": made["layers"], "start": str(weights)}
    return {"model": {"name": NAME, "arguments": arguments}}


def _weights_of_start(job: Job) -> str:
    """Hash of the weights that a run of "half" begins from: with others it is another run."""
    file = job.other("start").folder / "train" / "checkpoint" / "model.safetensors"
    return sha256(file.read_bytes()).hexdigest()


def _recipe(job: Job, changes: Changes) -> Recipe:
    """The part's recipe with the method's sections in place of, and its training keys over, the dense one's."""
    part, method = job.part, METHODS[job.method]
    training = dict(part.recipe["training"])
    epochs = {"half": part.epochs - part.start_epochs}.get(method.begins, part.epochs)
    if method.begins == "half":
        training |= part.tuning
    training |= {**changes.get("training", {}), "epochs": part.start_epochs if job.method == "start" else epochs}
    dense: dict[str, Any] = {"model": {"name": part.base, "arguments": dict(part.arguments)}}
    if method.begins == "half":
        dense["description"] = f"begins from {_weights_of_start(job)[:16]}"
    sections = {**dense, **part.recipe, **changes, "training": training}
    return parse_recipe({"name": f"peers-{part.name}/{job.name}", **sections}, source=job.name)


def _train(job: Job, recipe: Recipe) -> RunResult:
    """Train, go on with an unfinished run, or take the finished one; another run in the folder is replaced."""
    folder, steps = job.folder / "train", SMOKE_STEPS if job.smoke else None
    fold = None if recipe.sound is None else recipe.sound.fold
    same = _began(folder) == asdict(Identity(recipe.sha256, job.seed, steps, job.data, fold))
    if same and (folder / "results.json").exists():
        return load_results(folder / "results.json")[0]
    return train(recipe, job.data, folder, seed=job.seed, max_steps=steps, overwrite=not same)


def _began(folder: Path) -> Any:
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _stored(job: Job) -> tuple[nn.Module, Path]:
    """Write the network as a reader needs it, without learners and without a trace of its first weights."""
    done = load_checkpoint(job.folder / "train", allow_factory=True)
    arguments = {key: value for key, value in done.config.arguments.items() if key != "start"}
    config = replace(done.config, arguments=arguments)
    folder = save_checkpoint(job.folder / "final", done.model, config, learner=False)
    check_same(done.model, load_final(job).model, job.part.shape)
    return done.model, folder / "model.safetensors"


def _start(job: Job) -> RunResult:
    """What training the dense network for the first part of the epochs measured."""
    before = job.result()
    if before is not None and before["status"] == "failed":
        raise MethodError(f"{job.name} failed")
    return load_results(job.folder / "train" / "results.json")[0]


def _accuracy(result: RunResult) -> dict[str, Any]:
    return {"accuracy": result.accuracy.test, "images": result.accuracy.test_images, "loss": result.loss["train"]}


# ---- finished without training ----


def finished(job: Job) -> dict[str, Any]:
    """Compress the network that another run ended with."""
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
        torch.zeros(1, *part.shape),
        parse_budget(job.budget),
        part.skip,
        job.seed,
        lambda: _samples(job),
        start.absolute() if start.exists() else None,
        dense["file_bytes"] if dense and dense["status"] == "done" else 0,
    )


def _samples(job: Job) -> Tensor:
    """Training inputs, normalised as the network is used to."""
    data = load_training_data(_recipe(job.other("dense"), {}), job.data)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(job.seed))
    chosen: Any = data.train
    return normalization(data.input)(chosen.images[order[: job.part.calibration]])
