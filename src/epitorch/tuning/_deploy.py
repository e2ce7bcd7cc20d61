"""deploy(strategy="auto"): strategies chosen by measurement on this machine, or by a cost model."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from epitorch.cost._trace import Trace, as_arguments
from epitorch.cost.analysis import declined_by, geometry_of, interpolated_of
from epitorch.cost.formulas import NO_NEED, STRATEGIES, Choice, Geometry, Reason, Strategy, executed
from epitorch.deploy import Chooser, deploy_as, deploy_by
from epitorch.errors import InputError, check_is_model, explain, suggest
from epitorch.nn import EpitomeLayer
from epitorch.progress import Say, say_nothing
from epitorch.progress import progress as show_progress
from epitorch.timing import torch_threads
from epitorch.tuning._cache import TimingCache
from epitorch.tuning._layers import LayerTimer, Seconds, applicable, record_inputs
from epitorch.tuning._networks import fastest_network
from epitorch.tuning._runtimes import Runtime, check_runtime

Objective = Literal["latency", "size"]
AnyStrategy = Literal["dense", "reuse", "auto"]
MIXING = 16.0
"""Multiply-adds that one operation of mixing channels costs in time: it moves data and computes next to nothing."""
_WORTH = 0.98  # a strategy is taken for its speed if it takes less than this share of folding's time


def deploy(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...],
    strategy: AnyStrategy = "reuse",
    *,
    runtime: Runtime = "torch",
    objective: Objective = "latency",
    measure: bool = True,
    threads: int = 1,
    slowdown: float = 1.0,
    progress: bool = True,
) -> nn.Module:
    """Make a module for inference without learners that computes what `model` computes in eval mode.

    "dense" folds every epitome into a plain torch layer. "reuse" runs each layer by product map, channel wrapping or
    sums along diagonals (method section 5), whichever executes the fewest operations on the example, and never makes
    the dense weight; a layer to which none applies, or that saves nothing, is folded and listed. "auto" times the
    strategies that apply to each layer, on its own input, in the runtime and on this machine. In the end both models
    run on the example and must agree; where float32 differs by more than rounding usually does, because the model
    amplifies it, they must agree in float64.

    Args:
        model: The trained model; it stays as it is.
        example_input: A tensor, or a tuple of the model's arguments. "auto" is for this size and batch.
        strategy: "dense", "reuse" or "auto".
        runtime: For "auto": "torch", "onnxruntime" or "openvino".
        objective: For "auto": "latency" takes the fastest strategy of each layer, never one slower than folding, then
            the fastest of the networks that can be made of them: folded, as chosen, laid out for a runtime or, in
            torch, with fused blocks. "size" takes the smallest that takes at most `slowdown` times as long as folding.
        measure: For "auto": without measuring, an operation of mixing channels counts as 16 multiply-adds.
        threads: For "auto": of the runtime.
        slowdown: For the objective "size".
        progress: For "auto": say on standard error what is being timed, once two seconds have passed.

    Returns:
        A copy in eval mode. Its attribute `deployment` is the report (`Deployment`) with every candidate's time; copies
        keep it.

    Raises:
        InputError: If an argument is not valid, or the example holds no tensor.
        StartsError: If a start is not finite.
        ParityError: If the outputs on the example differ.
        MissingExtraError: If the runtime is not installed.

    Example:
        >>> import torch
        >>> from epitorch.nn import EpitomeLinear
        >>> net = deploy(EpitomeLinear(8, 64, epitome_shape=(8, 8)), torch.zeros(1, 8))
        >>> net.deployment.layers[0].strategy
        'product_map'
    """
    _check(model, strategy, runtime, objective, measure, threads, slowdown)
    if strategy != "auto":
        return deploy_as(model, example_input, strategy)
    if not measure:
        return deploy_by(model, example_input, "auto", _by_model(objective, slowdown))
    with show_progress("deploy", progress) as say:
        return deploy_measured(model, as_arguments(example_input), runtime, objective, threads, slowdown, say)


def deploy_measured(
    model: nn.Module,
    arguments: tuple[Any, ...],
    runtime: Runtime,
    objective: Objective,
    threads: int,
    slowdown: float,
    say: Say,
) -> nn.Module:
    """`deploy(strategy="auto")` with checked arguments; see there.

    Args:
        model: See there, as for all that follow.
        arguments: See there.
        runtime: See there.
        objective: See there.
        threads: See there.
        slowdown: See there.
        say: Is told what is being done.
    """
    with tempfile.TemporaryDirectory() as folder, torch_threads(threads):
        cache = TimingCache()
        timer = LayerTimer(runtime, threads, Path(folder), cache)
        chooser = _Measured(timer, arguments, objective, slowdown, say)
        net = deploy_by(model, arguments, "auto", chooser)
        cache.save()
        if objective == "size":
            return net
        return fastest_network(model, net, arguments, runtime, Path(folder), threads, say)


# ---- by measurement ----


@dataclass
class _Measured:
    """Chooses for every layer of a recorded model."""

    timer: LayerTimer
    arguments: tuple[Any, ...]
    objective: Objective
    slowdown: float
    say: Say = say_nothing

    def __call__(self, net: nn.Module, record: Trace) -> dict[str, Choice]:
        inputs = record_inputs(net, self.arguments)
        layers = [(name, calls) for name, calls in record.calls.items() if isinstance(calls.module, EpitomeLayer)]
        found = {}
        for number, (name, calls) in enumerate(layers, 1):
            self.say(f"timing layer {number} of {len(layers)}, {name}")
            found[name] = self._choice(calls.module, geometry_of(calls, record), inputs.get(name))
        return found

    def _choice(self, layer: Any, geometry: Geometry, given: Tensor | None) -> Choice:
        if given is None or not geometry.kernel_positions:
            return _choice_of(layer, geometry, "folded", "not run by the example input")
        seconds = self.timer.seconds(layer, geometry, given)
        return _choice_of(layer, geometry, *pick(layer, seconds, self.objective, self.slowdown), seconds)


def pick(layer: EpitomeLayer, seconds: Seconds, objective: Objective, slowdown: float) -> tuple[Strategy, Reason]:
    """The strategy that times and sizes speak for, and why.

    Args:
        layer: The trained layer.
        seconds: Of one pass by strategy, "folded" among them.
        objective: "latency": the fastest, unless folding is as good. "size": the fastest of the smallest among those
            that take at most `slowdown` times as long as folding.
        slowdown: See there.
    """
    if len(seconds) == 1:
        why = [reason for strategy in STRATEGIES if (reason := declined_by(layer, strategy)) is not None]
        return "folded", next((reason for reason in why if reason not in NO_NEED), "axis not compressed")
    if objective == "latency":
        fastest = min(seconds, key=lambda strategy: seconds[strategy])
        good = seconds[fastest] < _WORTH * seconds["folded"]
        return (fastest, "fastest here") if good else ("folded", "nothing is faster than folding")
    limit = slowdown * seconds["folded"]
    allowed = [strategy for strategy, value in seconds.items() if value <= limit] or ["folded"]
    smallest = min(allowed, key=lambda strategy: (stored(layer, strategy), seconds[strategy]))
    return smallest, "smallest that is fast enough"


def stored(layer: EpitomeLayer, strategy: Strategy) -> int:
    """Numbers that a strategy keeps: the epitome and its starts, or the whole weight."""
    return prod(layer.weight_shape) if strategy == "folded" else layer.spec.num_epitome + layer.spec.num_starts


def _choice_of(
    layer: EpitomeLayer, geometry: Geometry, strategy: Strategy, reason: Reason, seconds: Seconds | None = None
) -> Choice:
    operations = executed(layer.spec, geometry, strategy, interpolated_of(layer))
    declined = tuple((other, why) for other in STRATEGIES if (why := declined_by(layer, other)) is not None)
    return Choice(strategy, operations, reason, declined, tuple((seconds or {}).items()))


# ---- by a model of the cost ----


def _by_model(objective: Objective, slowdown: float) -> Chooser:
    """Seconds are multiply-adds, and an operation of mixing channels is `MIXING` of them."""

    def choose(_: nn.Module, record: Trace) -> dict[str, Choice]:
        found = {}
        for name, calls in record.calls.items():
            layer = calls.module
            if not isinstance(layer, EpitomeLayer):
                continue
            geometry = geometry_of(calls, record)
            units = {strategy: _units(layer, geometry, strategy) for strategy in applicable(layer, geometry)}
            strategy, reason = pick(layer, units, objective, slowdown)
            found[name] = _choice_of(layer, geometry, strategy, reason if len(units) == 1 else "cost model")
        return found

    return choose


def _units(layer: EpitomeLayer, geometry: Geometry, strategy: Strategy) -> float:
    operations = executed(layer.spec, geometry, strategy, interpolated_of(layer))
    copies = 0 if strategy == "folded" else 1  # whole starts are copied, which is no operation but takes time
    moved = copies * (geometry.out_positions * layer.spec.weight_shape[0] + geometry.in_positions)
    return operations.multiply_adds + MIXING * (operations.interpolation + moved)


# ---- what was asked ----


def _check(
    model: nn.Module,
    strategy: object,
    runtime: object,
    objective: object,
    measure: object,
    threads: object,
    slowdown: object,
) -> None:
    check_is_model(model)
    check_runtime(runtime)
    for name, value, known in (
        ("strategy", strategy, get_args(AnyStrategy)),
        ("objective", objective, get_args(Objective)),
    ):
        if value not in known:
            hint = suggest(str(value), list(known))
            raise InputError(explain(f"{name} is not known", expected=" | ".join(known), got=f"{value!r}{hint}"))
    if not isinstance(measure, bool):
        raise InputError(explain("measure is not valid", expected="True or False", got=repr(measure)))
    if strategy != "auto" and (runtime != "torch" or objective != "latency"):
        raise InputError(
            explain(
                f"runtime and objective have no effect with strategy={strategy!r}",
                expected="strategy='auto'",
                got=f"runtime={runtime!r}, objective={objective!r}",
                fix="leave them out: what 'dense' and 'reuse' give is the same for every runtime",
            )
        )
    if type(threads) is not int or threads < 1:
        raise InputError(explain("threads is not valid", expected="a whole number above 0", got=repr(threads)))
    if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not slowdown >= 1:
        raise InputError(explain("slowdown is not valid", expected="a number of at least 1", got=repr(slowdown)))
