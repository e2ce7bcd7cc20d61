"""Time of one layer under every strategy that applies, side by side with the folded layer (batch 1, torch on the CPU).

    OMP_NUM_THREADS=1 python benchmarks/strategies.py --out benchmarks/results/strategies.json

All forms of a layer live in one process and take turns, the order rotated from round to round; the figure is the
median over the rounds of each round's ratio to the folded layer. Time is the thread's own (one thread does all the
work), so that other processes on the machine count little. `madds_ratio` is the same ratio of executed operations.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import epitorch
from epitorch.cost.analysis import declined_by
from epitorch.cost.formulas import STRATEGIES
from epitorch.deploy.reuse import reuse_layer
from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeLayer

OUT: dict[str, Any] = {"spatial_starts": "out", "index": "fixed"}
LAYERS: dict[str, tuple[EpitomeLayer, tuple[int, ...]]] = {
    "1-D, 128 windows of one filter": (
        EpitomeConv1d(64, 128, 8, stride=2, epitome_shape=(1, 64, 72), **OUT),
        (64, 1024),
    ),
    "1-D, long kernel": (EpitomeConv1d(64, 64, 32, epitome_shape=(1, 64, 96), **OUT), (64, 512)),
    "2-D, filters": (EpitomeConv2d(64, 128, 3, padding=1, epitome_shape=(16, 64, 5, 5), **OUT), (64, 28, 28)),
    "2-D, both axes": (EpitomeConv2d(128, 256, 3, padding=1, epitome_shape=(16, 64, 5, 5), **OUT), (128, 14, 14)),
    "2-D, pairs of blocks": (
        EpitomeConv2d(128, 256, 3, padding=1, epitome_shape=(8, 64, 5, 5), spatial_starts="grid", index="fixed"),
        (128, 14, 14),
    ),
    "2-D, no spatial starts": (EpitomeConv2d(128, 256, 3, padding=1, epitome_shape=(64, 32, 3, 3)), (128, 14, 14)),
}


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {}
    for name, (layer, shape) in LAYERS.items():
        for where in ("fractional", "whole"):
            rows[f"{name}, {where} starts"] = _row(_moved(layer, where), torch.randn(1, *shape), arguments)
    text = json.dumps({**_environment(arguments), "layers": rows}, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--warmup", type=int, default=3)
    return parser.parse_args()


def _moved(layer: EpitomeLayer, where: str) -> EpitomeLayer:
    """The layer with random starts."""
    moved = copy.deepcopy(layer).eval()
    for axis, value in moved.starts().items():
        position = torch.rand_like(value) * max(moved.spec.start_sizes[axis])
        moved.set_starts(moved.starts() | {axis: position.floor() if where == "whole" else position.floor() + 0.4})
    return moved


@torch.inference_mode()
def _row(layer: EpitomeLayer, x: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    forms: dict[str, nn.Module] = {"folded": layer.to_dense().eval()}
    forms |= {name: _form(layer, name) for name in STRATEGIES[:-1] if declined_by(layer, name) is None}
    expected = layer(x)
    times: dict[str, list[float]] = {name: [] for name in forms}
    for name, form in forms.items():
        torch.testing.assert_close(form(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()), msg=name)
    order = list(forms)
    for turn in range(arguments.warmup + arguments.rounds):
        order = order[1:] + order[:1]
        for name in order:
            begun = time.thread_time()
            forms[name](x)
            if turn >= arguments.warmup:
                times[name].append(1000 * (time.thread_time() - begun))
    work = {name: epitorch.count(form, x).madds for name, form in forms.items()}
    return {name: _summary(times[name], times["folded"], work[name] / work["folded"]) for name in forms}


def _form(layer: EpitomeLayer, strategy: Any) -> nn.Module:
    return reuse_layer(copy.deepcopy(layer), strategy)


def _summary(times: list[float], folded: list[float], madds_ratio: float) -> dict[str, Any]:
    ratios = sorted(mine / reference for mine, reference in zip(times, folded, strict=True))
    quarter = len(ratios) // 4
    return {
        "median_ms": round(median(times), 3),
        "ratio_to_folded": round(median(ratios), 3),
        "ratio_quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
        "madds_ratio": round(madds_ratio, 3),
    }


def _environment(arguments: argparse.Namespace) -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.split(":")[1].strip() for line in info if "model name" in line]
    return {
        "what": "one layer, batch 1, each strategy against the folded layer, torch, time of the thread",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": 1,
        "n": arguments.rounds,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    raise SystemExit(main())
