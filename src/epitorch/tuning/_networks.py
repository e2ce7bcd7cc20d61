"""Which of the networks that can be made of the layers is fastest as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, get_args

from torch import nn

from epitorch.cost._trace import quiet
from epitorch.cost.formulas import Reason
from epitorch.deploy import Deployment, Rotate, deploy_as, fuse, lay_out
from epitorch.deploy._parity import AMPLIFIED, check_parity
from epitorch.errors import EpitorchError
from epitorch.progress import Say, say_nothing
from epitorch.timing import Times, alternate, busy_clock
from epitorch.tuning._runtimes import Running, Runtime, load

_ROUNDS = 11
_WORTH = 0.97  # a network is taken for its speed if it takes less than this share of the folded one's time
_REASON: Reason = "part of the fastest network"


def fastest_network(
    model: nn.Module,
    chosen: nn.Module,
    arguments: tuple[Any, ...],
    runtime: Runtime,
    folder: Path,
    threads: int,
    say: Say = say_nothing,
) -> nn.Module:
    """Time whole networks side by side and return the fastest.

    Args:
        model: The trained model.
        chosen: Deployed with the strategies that were fastest layer by layer.
        arguments: Example.
        runtime: Where it will run.
        folder: For files in between.
        threads: Of the runtime.
        say: Is told what is being done.

    Returns:
        The fastest, or the folded one where none is faster by 3%; its `deployment` names them all with their times.
    """
    nets, running = {}, {}
    expected = _output(chosen, arguments)
    candidates = _candidates(model, chosen, arguments, runtime)
    for number, (name, make) in enumerate(candidates.items(), 1):
        say(f"making network {number} of {len(candidates)}, {name}")
        try:
            net = make()
            if net is None:
                continue
            check_parity(expected, _output(net, arguments), slack=AMPLIFIED)
            running[name] = load(net, arguments, runtime, folder, name.replace(" ", "_"), threads)
        except EpitorchError:
            if name == "as chosen":
                raise  # what the user asked for; the others are offers
            continue
        nets[name] = net
    say("timing networks")
    times = {name: min(value.seconds) for name, value in _timed(running, threads).items()}
    fastest = min(times, key=lambda name: times[name])
    if times[fastest] > _WORTH * times.get("folded", inf):
        fastest = "folded"
    report: Any = nets[fastest].deployment
    seconds = {layer.name: layer.seconds for layer in chosen.deployment.layers}  # type: ignore[union-attr]
    layers = tuple(
        replace(layer, seconds=seconds.get(layer.name, ()), reason=_REASON if fastest != "as chosen" else layer.reason)
        for layer in report.layers
    )
    full = Deployment("auto", layers, report.difference, fastest, tuple(times.items()))
    setattr(nets[fastest], "deployment", full)  # noqa: B010 - nn.Module declares tensors and modules only
    return nets[fastest]


def _output(net: nn.Module, arguments: tuple[Any, ...]) -> Any:
    with quiet(net):
        return copy.deepcopy(net)(*copy.deepcopy(arguments))


def _timed(running: dict[str, Running], threads: int) -> dict[str, Times]:
    calls = {name: one.call for name, one in running.items()}
    return alternate(calls, rounds=_ROUNDS, clock=busy_clock(threads))


def _candidates(
    model: nn.Module, chosen: nn.Module, arguments: tuple[Any, ...], runtime: Runtime
) -> dict[str, Callable[[], nn.Module | None]]:
    """By name, made when asked for; None where there is nothing to be made."""
    found: dict[str, Callable[[], nn.Module | None]] = {
        "as chosen": lambda: chosen,
        "folded": lambda: deploy_as(model, arguments, "dense"),
    }
    if runtime == "torch":
        return found | {"fused blocks": partial(_fused, model, arguments)}
    for rotate in get_args(Rotate):
        found[f"as chosen, laid out by {rotate}"] = partial(_laid_out, lambda: chosen, arguments, rotate)
        reuse = partial(deploy_as, model, arguments, "reuse")
        found[f"reuse, laid out by {rotate}"] = partial(_laid_out, reuse, arguments, rotate)
    return found


def _fused(model: nn.Module, arguments: tuple[Any, ...]) -> nn.Module | None:
    fused: Any = fuse(deploy_as(model, arguments, "reuse"), arguments)
    return fused if fused.fusion.fused else None


def _laid_out(make: Callable[[], nn.Module], arguments: tuple[Any, ...], rotate: Rotate) -> nn.Module | None:
    net: Any = lay_out(make(), arguments, rotate=rotate)
    return net if net.layout.layers else None
