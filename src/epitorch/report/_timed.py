"""What was timed: benchmarks and deployment reports, from their files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from epitorch._files import write_atomic
from epitorch.deploy.report import FORMAT, Deployment, LayerDeployment
from epitorch.errors import InputError, explain
from epitorch.report._data import Latency, Layer, Run
from epitorch.report._read import clean, read_json


def save_deployment(path: str | Path, deployment: Deployment) -> None:
    """Write a deployment report (`net.deployment`), whole or not at all, as `epitorch deploy --report` does.

    Args:
        path: JSON file.
        deployment: What `epitorch.deploy` left on the network.
    """
    write_atomic(Path(path), (json.dumps(deployment.to_dict(), indent=1, allow_nan=False) + "\n").encode())


def load_deployment(path: str | Path) -> Deployment:
    """Read what `save_deployment` or `epitorch deploy --report` wrote.

    Raises:
        InputError: If the file is missing or is something else.
    """
    path = Path(path)
    data = read_json(path, "a deployment report, as epitorch.report.save_deployment writes it")
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        layers = tuple(_layer(**row) for row in data["layers"])
        times = tuple((str(n), float(s)) for n, s in data["networks"].items())
        return Deployment(str(data["strategy"]), layers, float(data["difference"]), data["network"], times)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            explain(
                "this is no deployment report",
                expected=f"format {FORMAT}, as epitorch.report.save_deployment writes it",
                got=f"{type(error).__name__}: {error}",
                where=str(path),
            )
        ) from error


def _layer(
    name: str,
    kind: str,
    strategy: Any,
    reason: Any,
    declined: Any,
    madds: int,
    madds_dense: int,
    seconds: dict[str, float],
) -> LayerDeployment:
    times: Any = tuple((str(n), float(s)) for n, s in seconds.items())
    pairs: Any = tuple((str(a), str(b)) for a, b in declined.items())
    known: tuple[Any, Any] = str(strategy), str(reason)  # shown as they are
    return LayerDeployment(str(name), str(kind), known[0], known[1], pairs, int(madds), int(madds_dense), times)


def attach(runs: Sequence[Run], deployments: Sequence[Deployment]) -> list[Run]:
    """Return the runs with each deployment on those of its architecture: the same epitome layers, of the same sizes.

    Raises:
        InputError: If a deployment fits no run.
    """
    found = list(runs)
    for deployment in deployments:
        wanted = {(clean(layer.name or "(model)"), layer.madds_dense) for layer in deployment.layers}
        fits = [i for i, run in enumerate(found) if wanted and wanted == _sizes(run)]
        if not fits:
            there = "; ".join(f"{run.label}: {len(_sizes(run))} epitome layers" for run in found)
            raise InputError(
                explain(
                    "a deployment report belongs to none of these runs",
                    expected="the report of a run whose checkpoint is there",
                    got=f"{len(deployment.layers)} layers; {there}",
                )
            )
        for i in fits:
            found[i] = replace(found[i], layers=_deployed(found[i].layers, deployment))
    return found


def _sizes(run: Run) -> set[tuple[str, int]]:
    return {(layer.name, layer.madds_dense) for layer in run.layers if layer.epitome}


def _deployed(layers: Sequence[Layer], deployment: Deployment) -> tuple[Layer, ...]:
    told = {clean(layer.name or "(model)"): layer for layer in deployment.layers}
    return tuple(
        replace(
            layer,
            strategy=clean(told[layer.name].strategy),
            madds=told[layer.name].madds,
            seconds=tuple((clean(n), s) for n, s in told[layer.name].seconds),
            reason=clean(told[layer.name].reason),
        )
        if layer.name in told
        else layer
        for layer in layers
    )


# ---- benchmarks ----


def load_bench(path: str | Path, runs: Sequence[Run]) -> list[Latency]:
    """Return the rows that `epitorch bench --out` wrote, each with the method that it timed.

    A network of the benchmark is a run's if it is called by its label, its recipe (`recipe:NAME`) or its folder.

    Raises:
        InputError: If the file is missing or is something else.
    """
    path = Path(path)
    data = read_json(path, "what `epitorch bench --out` writes")
    called = {place: run.name for run in runs for place in (*run.places, run.label)}
    try:
        return [_latency(row, called) for row in data["rows"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            explain(
                "this is no benchmark",
                expected="what `epitorch bench --out` writes",
                got=f"{type(error).__name__}: {error}",
                where=str(path),
            )
        ) from error


def _latency(row: dict[str, Any], called: dict[str, str]) -> Latency:
    model = str(row["model"])
    method = called.get(model) or called.get(str(Path(model).resolve()))
    lower, upper = (float(value) for value in row["quartiles"])
    milliseconds, speedup = float(row["milliseconds"]), float(row["speedup"])
    if not all(map(math.isfinite, (milliseconds, speedup, lower, upper))) or milliseconds <= 0:
        raise ValueError(f"a time of {milliseconds} ms")
    return Latency(
        clean(model),
        method,
        clean(row["runtime"]),
        int(row["batch"]),
        milliseconds,
        (lower, upper),
        speedup,
        int(row["stored"]),
        clean(row["runs_as"]),
    )
