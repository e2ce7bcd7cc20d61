"""Time of one training step, side by side: dense, narrowed and epitome MobileNetV2 (32x32, batch 128).

    python benchmarks/train_step.py --out benchmarks/results/train_step.json

All networks live in one process and take turns (A B C, B C A, ...), so that a slow moment of the machine meets all of
them; the figure is the median over the rounds of each round's ratio to the dense step. Peak memory is that of a fresh
process that runs one network only. `--stem-stride 1` is the full-size network of the CIFAR-10 tables. `--profile`
writes instead which part of a step's processor time goes into which operators.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epitorch
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan

NETWORKS = ("dense", "narrow-0.18", "epitome-0.18-learner", "epitome-0.18-direct", "epitome-0.18-fixed")


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(_peak_memory(arguments.memory_of, arguments))
        return 0
    if arguments.profile:
        report = {**_environment(arguments), "shares": {name: _shares(name, arguments) for name in NETWORKS}}
    else:
        report = {**_environment(arguments), "step": _step_times(arguments), "peak_rss_bytes": _peaks(arguments)}
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stem-stride", type=int, default=1)
    parser.add_argument("--layout", choices=("channels_last", "contiguous"), default="channels_last")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--memory-of", choices=NETWORKS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _build(name: str, arguments: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    width = 0.18 if name.startswith("narrow") else 1.0
    model = mobilenetv2(10, cifar=True, stem_stride=arguments.stem_stride, hidden_width=width, last_width=width)
    if name.startswith("epitome"):
        index: Any = name.rsplit("-", 1)[1]
        epitorch.convert_(model, mobilenetv2_plan(model, 0.18, last_conv=True, index=index))
    return model.to(memory_format=_layout(arguments)).train()


def _layout(arguments: argparse.Namespace) -> torch.memory_format:
    return torch.channels_last if arguments.layout == "channels_last" else torch.contiguous_format


class _Step:
    """Forward, backward and optimiser step of one network."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.model = _build(name, arguments)
        groups = epitorch.param_groups(self.model, lr=0.05, weight_decay=5e-4)
        self.optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)

    def __call__(self, images: Tensor, labels: Tensor) -> float:
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()
        return 1000 * (time.perf_counter() - begun)


def _batch(arguments: argparse.Namespace) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(arguments.batch, 3, 32, 32, generator=generator).contiguous(memory_format=_layout(arguments))
    return images, torch.randint(0, 10, (arguments.batch,), generator=generator)


def _step_times(arguments: argparse.Namespace) -> dict[str, Any]:
    images, labels = _batch(arguments)
    steps = {name: _Step(name, arguments) for name in NETWORKS}
    times: dict[str, list[float]] = {name: [] for name in NETWORKS}
    for turn in range(arguments.warmup + arguments.rounds):
        first = turn % len(NETWORKS)  # a network's neighbours in the order differ from round to round
        for name in NETWORKS[first:] + NETWORKS[:first]:
            took = steps[name](images, labels)
            if turn >= arguments.warmup:
                times[name].append(took)
    return {name: _summary(times[name], times["dense"]) for name in NETWORKS}


def _summary(times: list[float], dense: list[float]) -> dict[str, Any]:
    ratios = sorted(mine / reference for mine, reference in zip(times, dense, strict=True))
    quarter = len(ratios) // 4
    return {
        "median_ms": round(median(times), 2),
        "ratio_to_dense": round(median(ratios), 4),
        "ratio_quartiles": [round(ratios[quarter], 4), round(ratios[-1 - quarter], 4)],
    }


def _shares(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Shares of the processor time of `rounds` steps, operators below a hundredth together."""
    step, batch = _Step(name, arguments), _batch(arguments)
    for _ in range(arguments.warmup):
        step(*batch)
    with torch.profiler.profile(record_shapes=True) as profile:
        for _ in range(arguments.rounds):
            step(*batch)
    times: dict[str, float] = {}
    for event in profile.key_averages(group_by_input_shape=True):
        kind = _kind(event.key, [shape for shape in event.input_shapes if len(shape) == 4])
        times[kind] = times.get(kind, 0) + event.self_cpu_time_total
    total = sum(times.values())
    shares = {kind: round(took / total, 4) for kind, took in sorted(times.items(), key=lambda item: -item[1])}
    small = [kind for kind, share in shares.items() if share < 0.01]
    return {**{kind: share for kind, share in shares.items() if kind not in small}, "rest": _sum(shares, small)}


def _sum(shares: dict[str, float], kinds: list[str]) -> float:
    return round(sum(shares[kind] for kind in kinds), 4)


def _kind(operator: str, shapes: list[Any]) -> str:
    """The operator's name; convolutions by kernel and direction."""
    backward = operator == "aten::convolution_backward"
    if not backward and operator != "aten::mkldnn_convolution":
        return operator
    weight = shapes[2 if backward else 1]
    kernel = "1x1" if weight[2] == 1 else "depthwise" if weight[1] == 1 else "stem"
    return f"{kernel} convolution, {'backward' if backward else 'forward'}"


def _peak_memory(name: str, arguments: argparse.Namespace) -> int:
    step = _Step(name, arguments)
    for _ in range(3):
        step(*_batch(arguments))
    status = Path("/proc/self/status").read_text()  # not getrusage: its maximum is inherited from the parent
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _peaks(arguments: argparse.Namespace) -> dict[str, int]:
    peaks = {}
    for name in NETWORKS:
        command = [sys.executable, __file__, "--memory-of", name, "--batch", str(arguments.batch)]
        command += ["--threads", str(arguments.threads), "--stem-stride", str(arguments.stem_stride)]
        done = subprocess.run([*command, "--layout", arguments.layout], capture_output=True, text=True, check=True)
        peaks[name] = int(done.stdout)
    return peaks


def _environment(arguments: argparse.Namespace) -> dict[str, Any]:
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "what": "one training step (forward, backward, SGD), MobileNetV2 for 32x32 images",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "batch": arguments.batch,
        "stem_stride": arguments.stem_stride,
        "layout": arguments.layout,
        "n": arguments.rounds,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    sys.exit(main())
