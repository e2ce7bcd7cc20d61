"""Time of planning and converting ResNet-50, after the counting pass.

    python benchmarks/plan_resnet50.py --out benchmarks/results/plan_resnet50.json

The counting pass (a copy of the model run once) is timed apart, with `epitorch.count`. A round plans a fresh network by
each budget and converts it; `plan_ms` holds the planner's own counting pass too, `after_count_ms` is planning and
converting less one counting pass of the same round. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torchvision
from torch import nn

import epitorch

BUDGETS: dict[str, dict[str, Any]] = {
    "params, half": {"ratio": 2},
    "params, half, front_heavy, align 8": {"ratio": 2, "policy": "front_heavy", "align": 8},
    "MAdds, half": {"madds": 2_054_000_000},
}


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    report = {**_environment(arguments), "budgets": {name: _measure(name, arguments) for name in BUDGETS}}
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    rounds = [_round(BUDGETS[name]) for _ in range(arguments.rounds)]
    times = {key: round(median(r[key] for r in rounds), 1) for key in ("count_ms", "plan_ms", "convert_ms")}
    after = median(r["plan_ms"] + r["convert_ms"] - r["count_ms"] for r in rounds)
    return {**times, "after_count_ms": round(after, 1), "params": rounds[0]["params"], "madds": rounds[0]["madds"]}


def _round(budget: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet50(weights=None)
    x = torch.zeros(1, 3, 224, 224)
    _, count_ms = _timed(lambda: epitorch.count(model, x))
    plan, plan_ms = _timed(lambda: epitorch.plan(model, x, **budget))
    _, convert_ms = _timed(lambda: epitorch.convert_(model, plan))
    times = {"count_ms": count_ms, "plan_ms": plan_ms, "convert_ms": convert_ms}
    return {**times, "params": plan.params, "madds": plan.madds}


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, 1000 * (time.perf_counter() - start)


def _environment(arguments: argparse.Namespace) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "what": "ResNet-50, 1x3x224x224: milliseconds, medians",
        "date": datetime.now(UTC).date().isoformat(),
        "n": arguments.rounds,
        "threads": arguments.threads,
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "epitorch": epitorch.__version__,
    }


if __name__ == "__main__":
    raise SystemExit(main())
