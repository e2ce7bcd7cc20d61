"""bench(): several networks side by side in every runtime."""

from __future__ import annotations

import copy
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn

from epitorch.bench._peak import peak_bytes
from epitorch.bench._report import BenchReport, BenchRow
from epitorch.cost import Cost, count
from epitorch.cost._trace import epitome_layers, quiet
from epitorch.errors import EpitorchError, InputError, check_is_model, explain, suggest
from epitorch.progress import Say
from epitorch.progress import progress as show_progress
from epitorch.timing import Times, alternate, busy_clock, torch_threads
from epitorch.tuning import Runtime, deploy, installed_runtimes, machine
from epitorch.tuning._deploy import AnyStrategy, deploy_measured
from epitorch.tuning._runtimes import Running, check_runtime, load, runtime_version


def bench(
    models: Mapping[str, nn.Module],
    example_input: Tensor,
    *,
    runtimes: Sequence[Runtime] | None = None,
    batches: Sequence[int] = (1,),
    strategy: AnyStrategy = "auto",
    threads: int = 1,
    rounds: int = 20,
    memory: bool = True,
    processor_time: bool = False,
    progress: bool = True,
) -> BenchReport:
    """Measure networks side by side: each round runs all of them once, one after the other.

    Args:
        models: By label; ratios are to the first. A model with epitome layers is deployed for each runtime, any other
            is run as it is, in eval mode.
        example_input: One sample or more, shape `(N, ...)`; the first is repeated to every batch size.
        runtimes: Default: those that are installed.
        batches: Batch sizes.
        strategy: As for `epitorch.deploy`.
        threads: Of every runtime.
        rounds: How often each network is timed.
        memory: Measure peak memory too, in a process for each row.
        processor_time: Time by the processor time of this process instead of the wall's clock: for one thread on a
            machine that others use too.
        progress: Say on standard error what is being done, once two seconds have passed.

    Returns:
        Rows and environment. A network that a runtime does not take is listed under `failures`.

    Raises:
        InputError: If there is no model, or an argument is not valid.
    """
    runtimes = installed_runtimes() if runtimes is None else runtimes
    _check(models, example_input, runtimes, batches, threads, rounds, strategy, processor_time)
    runtimes, batches = list(dict.fromkeys(runtimes)), list(dict.fromkeys(batches))
    rows: list[BenchRow] = []
    failures: list[str] = []
    with show_progress("bench", progress) as say:
        for runtime, batch in product(runtimes, batches):
            arguments = (_batch_of(example_input, batch),)
            setting = _Setting(runtime, batch, arguments, strategy, threads, rounds, memory, processor_time, say)
            rows += _side_by_side(models, setting, failures)
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: runtime_version(name) for name in runtimes},
        "threads": threads,
        "rounds": rounds,
        "clock": "processor time" if processor_time else "wall",
        "strategy": strategy,
        "input": list(example_input.shape[1:]),
    }
    return BenchReport(tuple(rows), environment, tuple(failures))


@dataclass(frozen=True)
class _Setting:
    runtime: Runtime
    batch: int
    arguments: tuple[Tensor, ...]
    strategy: AnyStrategy
    threads: int
    rounds: int
    memory: bool
    processor_time: bool
    say: Say

    def at(self, label: str, what: str) -> None:
        """Say what is being done with a network."""
        self.say(f"{label} in {self.runtime}, batch {self.batch}: {what}")


@dataclass(frozen=True)
class _Ready:
    net: nn.Module
    cost: Cost
    running: Running
    folder: Path


def _side_by_side(models: Mapping[str, nn.Module], setting: _Setting, failures: list[str]) -> list[BenchRow]:
    with tempfile.TemporaryDirectory() as top, torch_threads(setting.threads):
        ready: dict[str, _Ready] = {}
        for number, (label, model) in enumerate(models.items()):
            folder = Path(top) / str(number)
            folder.mkdir()
            try:
                ready[label] = _prepared(label, model, setting, folder)
            except Exception as error:  # the model's own code may raise anything; the others go on
                kind = "" if isinstance(error, EpitorchError) else f"{type(error).__name__}: "
                failures.append(f"{label} in {setting.runtime}, batch {setting.batch}: {kind}{error}")
        calls: dict[str, Callable[[], object]] = {label: one.running.call for label, one in ready.items()}
        setting.at("all", f"timing {setting.rounds} rounds")
        clock = busy_clock(1) if setting.processor_time else time.perf_counter
        times = alternate(calls, rounds=setting.rounds, clock=clock) if calls else {}
        first = next(iter(times.values()), None)
        return [_row(label, one, times[label], first or times[label], setting) for label, one in ready.items()]


def _prepared(label: str, model: nn.Module, setting: _Setting, folder: Path) -> _Ready:
    setting.at(label, "counting")
    cost = count(model, setting.arguments)
    if epitome_layers(model):
        net = _deployed(label, model, setting)
    else:
        with quiet(model):
            net = copy.deepcopy(model).eval()
    setting.at(label, "loading")
    running = load(net, setting.arguments, setting.runtime, folder, "net", setting.threads)
    return _Ready(net, cost, running, folder)


def _deployed(label: str, model: nn.Module, setting: _Setting) -> nn.Module:
    if setting.strategy != "auto":
        return deploy(model, setting.arguments, setting.strategy)
    say = partial(setting.at, label)
    return deploy_measured(model, setting.arguments, setting.runtime, "latency", setting.threads, 1.0, say)


def _row(label: str, ready: _Ready, times: Times, first: Times, setting: _Setting) -> BenchRow:
    setting.at(label, "peak memory")
    ratio = times.speedup_over(first)
    source = ready.running.file or ready.net
    lower, upper = times.quartiles
    return BenchRow(
        model=label,
        runtime=setting.runtime,
        batch=setting.batch,
        milliseconds=1e3 * times.median,
        quartiles=(1e3 * lower, 1e3 * upper),
        speedup=ratio.median,
        speedup_quartiles=ratio.quartiles,
        params=ready.cost.params,
        madds=ready.cost.madds,
        stored=ready.running.stored,
        peak=peak_bytes(setting.runtime, source, setting.arguments, ready.folder) if setting.memory else None,
        runs_as=_runs_as(ready.net),
    )


def _runs_as(net: nn.Module) -> str:
    report: Any = getattr(net, "deployment", None)
    if report is None:
        return "as it is"
    strategies = Counter(layer.strategy for layer in report.layers)
    shown = ", ".join(f"{strategy} {number}" for strategy, number in strategies.most_common())
    return f"{report.network}: {shown}" if report.network else shown


def _batch_of(example: Tensor, batch: int) -> Tensor:
    return example[:1].repeat(batch, *[1] * (example.dim() - 1))


def _check(
    models: Any,
    example: Any,
    runtimes: Any,
    batches: Any,
    threads: object,
    rounds: object,
    strategy: object,
    processor_time: bool,
) -> None:
    if not isinstance(models, Mapping) or not models:
        raise InputError(explain("there is nothing to measure", expected="models by label", got=repr(models)[:80]))
    for model in models.values():
        check_is_model(model)
    if not isinstance(example, Tensor) or example.dim() < 2 or not len(example):
        got = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise InputError(explain("the example is not valid", expected="a tensor with at least one sample", got=got))
    for name, value in (("runtimes", runtimes), ("batches", batches)):
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise InputError(
                explain(f"{name} is not valid", expected="a list with at least one entry", got=repr(value))
            )
    for runtime in runtimes:
        check_runtime(runtime)
    if strategy not in get_args(AnyStrategy):
        known = list(get_args(AnyStrategy))
        got = f"{strategy!r}{suggest(str(strategy), known)}"
        raise InputError(explain("strategy is not known", expected=" | ".join(known), got=got))
    if processor_time and threads != 1:
        wrong = "processor time adds up over threads"
        raise InputError(explain(wrong, expected="threads=1 with processor_time", got=f"threads={threads}"))
    for name, value in (*(("batch", batch) for batch in batches), ("threads", threads), ("rounds", rounds)):
        if type(value) is not int or value < 1:
            raise InputError(explain(f"{name} is not valid", expected="a whole number above 0", got=repr(value)))
