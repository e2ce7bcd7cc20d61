"""Which strategy is fastest for one layer, measured on its own input in a runtime."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch.cost._trace import quiet
from epitorch.cost.analysis import interpolated_of
from epitorch.cost.formulas import STRATEGIES, Geometry, Strategy, why_not
from epitorch.deploy.reuse import reuse_layer
from epitorch.errors import EpitorchError
from epitorch.nn import AdaptedLayer, EpitomeLayer
from epitorch.timing import alternate, busy_clock
from epitorch.tuning._cache import Times, TimingCache, machine
from epitorch.tuning._runtimes import Runtime, load, runtime_version

Seconds = dict[Strategy, float]


def record_inputs(net: nn.Module, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """The first input of every epitome layer, by qualified name; a copy runs, whose forward may count its calls."""
    with quiet(net):
        net = copy.deepcopy(net)
    found: dict[str, Tensor] = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(value, Tensor):
                found.setdefault(name, value.detach().clone())

        return record

    for name, layer in net.named_modules():
        if isinstance(layer, EpitomeLayer):
            layer.register_forward_pre_hook(recorder(name), with_kwargs=True)
    with quiet(net):
        net(*copy.deepcopy(arguments))
    return found


def applicable(layer: EpitomeLayer, geometry: Geometry) -> tuple[Strategy, ...]:
    """Strategies that compute what the layer computes; folding always does, and alone for a forward of its own."""
    if isinstance(layer, AdaptedLayer):
        return ("folded",)
    return tuple(strategy for strategy in STRATEGIES if why_not(layer.spec, geometry, strategy) is None)


class LayerTimer:
    """Times the strategies of layers; layers that are alike are timed once, and known times are looked up.

    Args:
        runtime: Where they run.
        threads: Of the runtime.
        folder: For files in between.
        cache: What was measured before.
        rounds: How often each strategy is timed.
    """

    def __init__(self, runtime: Runtime, threads: int, folder: Path, cache: TimingCache, rounds: int = 9) -> None:
        self.runtime, self.threads, self.folder, self.cache, self.rounds = runtime, threads, folder, cache, rounds

    def seconds(self, layer: EpitomeLayer, geometry: Geometry, given: Tensor) -> Seconds:
        """Seconds of one pass under each strategy that applies and that the runtime takes: the least of the rounds.

        The least is what another load on the machine disturbs least; it decides, and no figure is made of it.

        Args:
            layer: In eval mode.
            geometry: Of its use in the model.
            given: Its input there.
        """
        key = self._key(layer, given)
        strategies = applicable(layer, geometry)
        known = self.cache.get(key)
        if known is None or set(known) != set(strategies) or known["folded"] is None:
            known = self._measure(layer, strategies, given)
            self.cache.put(key, known)
        return {strategy: value for strategy in strategies if (value := known[strategy]) is not None}

    def _measure(self, layer: EpitomeLayer, strategies: tuple[Strategy, ...], given: Tensor) -> Times:
        calls: dict[str, Callable[[], object]] = {}
        for strategy in strategies:
            made = runs_as(layer, strategy)
            try:
                calls[strategy] = load(made, (given,), self.runtime, self.folder, strategy, self.threads).call
            except EpitorchError:
                if strategy == "folded":
                    raise
                continue  # a strategy that the runtime does not take is no candidate
        times = alternate(calls, rounds=self.rounds, clock=busy_clock(self.threads))
        return {strategy: min(times[strategy].seconds) if strategy in times else None for strategy in strategies}

    def _key(self, layer: Any, given: Tensor) -> str:
        options = ("stride", "padding", "dilation", "groups", "padding_mode", "output_padding")
        content = {
            "machine": machine(),
            "runtime": [self.runtime, runtime_version(self.runtime), torch.__version__, self.threads],
            "layer": [type(layer).__name__, asdict(layer.spec), interpolated_of(layer), layer.bias is not None],
            "options": [getattr(layer, name, None) for name in options],
            "input": [list(given.shape), str(given.dtype), given.is_contiguous()],
        }
        return json.dumps(content, default=str, sort_keys=True)


def runs_as(layer: EpitomeLayer, strategy: Strategy) -> nn.Module:
    """A copy of the layer for inference under a strategy."""
    with quiet(layer):
        own = copy.deepcopy(layer).eval()
    made: nn.Module = own.to_dense() if strategy == "folded" else reuse_layer(own, strategy)
    return made.eval().requires_grad_(False)
