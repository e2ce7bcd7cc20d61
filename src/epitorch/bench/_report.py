"""What a benchmark found: plain data, a table, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from epitorch.cost.analysis import aligned

_HEAD = (
    "runtime",
    "batch",
    "network",
    "ms",
    "quartiles",
    "speed-up",
    "quartiles",
    "samples/s",
    "params",
    "MAdds",
    "stored",
    "peak memory",
    "runs as",
)


@dataclass(frozen=True)
class BenchRow:
    """One network in one runtime at one batch size.

    Args:
        model: Its label.
        runtime: "torch", "onnxruntime" or "openvino".
        batch: Samples in a pass.
        milliseconds: Of one pass, median over the rounds.
        quartiles: Its lower and upper quartile.
        speedup: How many times faster than the first network: median of the ratios of the rounds.
        speedup_quartiles: Its quartiles.
        params: Parameters, routing maps included, learners not.
        madds: Executed multiply-adds per sample.
        stored: Bytes of the file; for torch of the state.
        peak: Bytes that a process which loads and runs the network needs at most, beyond one that only imports the
            runtime. None where it was not measured.
        runs_as: How the epitome layers run: the network taken and the number of layers under each strategy.
    """

    model: str
    runtime: str
    batch: int
    milliseconds: float
    quartiles: tuple[float, float]
    speedup: float
    speedup_quartiles: tuple[float, float]
    params: int
    madds: int
    stored: int
    peak: int | None
    runs_as: str

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return 1e3 * self.batch / self.milliseconds


@dataclass(frozen=True)
class BenchReport:
    """All rows, and what they were measured with. `str()` is a table, `to_dict()` plain data.

    Args:
        rows: By runtime, batch size and network.
        environment: Date, processor, versions, threads, rounds.
        failures: What could not be measured, and why.
    """

    rows: tuple[BenchRow, ...]
    environment: Mapping[str, Any]
    failures: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [{**asdict(row), "throughput": round(row.throughput, 2)} for row in self.rows]
        return {**self.environment, "rows": rows, "failures": list(self.failures)}

    def __str__(self) -> str:
        lines = aligned([_HEAD, *(_cells(row) for row in self.rows)], left=(0, 2, 12))
        env = self.environment
        how = f"{env['threads']} thread(s), {env['rounds']} rounds in turns, {env['clock']}"
        lines.append(f"{how}: medians and quartiles; speed-up over the first network")
        return "\n".join([*lines, *(f"not measured: {failure}" for failure in self.failures)])


def _cells(row: BenchRow) -> tuple[str, ...]:
    peak = "" if row.peak is None else f"{row.peak / 2**20:,.1f} MiB"
    return (
        row.runtime,
        str(row.batch),
        row.model,
        f"{row.milliseconds:.3f}",
        "{:.3f}-{:.3f}".format(*row.quartiles),
        f"{row.speedup:.2f}x",
        "{:.2f}-{:.2f}".format(*row.speedup_quartiles),
        f"{row.throughput:,.1f}",
        f"{row.params:,}",
        f"{row.madds:,}",
        f"{row.stored:,} B",
        peak,
        row.runs_as,
    )
