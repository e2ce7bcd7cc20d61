"""Runs of one recipe together, and what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from epitorch.report._data import Latency, Method, Run

Sample = tuple[Any, ...]


def accuracy_of(run: Run) -> tuple[float | None, str]:
    """Return the accuracy that stands for a run, a fraction, and what it was measured on."""
    if run.result is not None and run.result.accuracy.test is not None:
        return run.result.accuracy.test, "test"
    last = next((value for value in reversed(run.curves.heldout) if value is not None), None)
    return last, "held-out"


def methods_of(runs: Sequence[Run]) -> list[Method]:
    """Return the finished runs and checkpoints by name, each with its differences to the plain networks.

    Only what was measured on the same data is compared.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    methods = [_method(name, group) for name, group in groups.items()]
    data = {name: data_of(group) for name, group in groups.items()}
    return [_compared(method, methods, data) for method in _with_roles(methods, data)]


def _method(name: str, runs: list[Run]) -> Method:
    finished = [run for run in runs if run.state == "finished"]
    found = [accuracy_of(run) for run in finished]
    values = [value for value, _ in found if value is not None]
    measured = "test" if found and all(on == "test" for _, on in found) else "held-out"
    first = next((run for run in runs if run.params is not None), runs[0])
    role = {True: "epitome", False: "plain", None: ""}[first.epitomes]
    return Method(
        name,
        role,
        len(finished),
        mean(values) if values else None,
        stdev(values) if len(values) > 1 else None,
        measured,
        first.params,
        first.madds,
    )


def data_of(runs: list[Run]) -> Sample | None:
    """Return what tells the data of runs from others: how much there is of it. None where there is no result."""
    result = next((run.result for run in runs if run.result is not None), None)
    if result is None:
        return None
    accuracy = result.accuracy
    sizes = (accuracy.test_images, accuracy.heldout_images, accuracy.classes)
    return (result.data.get("train_images"), *sizes) if isinstance(result.data, dict) else sizes


def _with_roles(methods: list[Method], data: dict[str, Sample | None]) -> list[Method]:
    """Of the plain networks on the same data the largest is the dense one, the others are narrow."""
    largest: dict[Sample | None, Method] = {}
    for method in methods:
        if method.role == "plain" and method.params is not None:
            known = largest.setdefault(data[method.name], method)
            if method.params > (known.params or 0):
                largest[data[method.name]] = method
    return [_named(method, largest.get(data[method.name])) for method in methods]


def _named(method: Method, largest: Method | None) -> Method:
    if method.role != "plain":
        return method
    dense = largest is None or method.name == largest.name or method.params == largest.params
    return replace(method, role="dense" if dense else "narrow")


def _compared(method: Method, others: list[Method], data: dict[str, Sample | None]) -> Method:
    same = [m for m in _with_roles(others, data) if data[m.name] == data[method.name] is not None]
    same = [m for m in same if m.name != method.name and m.measured == method.measured and m.accuracy is not None]
    if method.accuracy is None or method.role == "dense":
        return method
    dense = next((m for m in same if m.role == "dense"), None)
    narrow = [m for m in same if m.role == "narrow" and m.params and method.params and method.role == "epitome"]
    near = min(narrow, key=lambda m: abs((m.params or 0) - (method.params or 0)), default=None)
    return replace(
        method,
        to_dense=None if dense is None else method.accuracy - (dense.accuracy or 0.0),
        to_narrow=None if near is None else method.accuracy - (near.accuracy or 0.0),
        dense=None if dense is None else dense.name,
        narrow=None if near is None else near.name,
    )


def smallest_batch(latencies: Sequence[Latency], method: str) -> list[Latency]:
    """Return the times of a method at its smallest batch, one for each runtime."""
    own = [row for row in latencies if row.method == method]
    least = min((row.batch for row in own), default=0)
    return [row for row in own if row.batch == least]
