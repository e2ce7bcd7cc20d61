"""Fused inverted residuals on one CPU thread, batch 1: blocks and whole networks, side by side.

    OMP_NUM_THREADS=1 python benchmarks/fused.py --out benchmarks/results/fused.json

Everything lives in one process and takes turns (A B C, B C A, ...), so that a slow moment of the machine meets all of
it. A ratio is the median of the rounds' ratios, of the time on the clock and of the process's CPU time: on a machine
that others use at the same time the first holds their share too. Weights are random: times do not depend on them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import epitorch
from epitorch import deploy
from epitorch.deploy import fuse
from epitorch.deploy.fused import instruction_set, native_problem
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan

# MobileNetV2: input and output channels, side of the image, stride
BLOCKS = (
    (16, 24, 112, 2),
    (24, 24, 56, 1),
    (24, 32, 56, 2),
    (32, 32, 28, 1),
    (64, 64, 14, 1),
    (96, 96, 14, 1),
    (160, 160, 7, 1),
)
# EfficientNet-b0, with squeeze-excitation: stage and block, input channels, side of the image
SQUEEZED = (
    (1, 0, 16, 112),
    (1, 1, 24, 56),
    (2, 0, 24, 56),
    (2, 1, 40, 28),
    (3, 1, 80, 14),
    (4, 1, 112, 14),
    (5, 1, 192, 7),
)
Run = Callable[[], Any]


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    report = _environment(arguments)
    with torch.no_grad():
        chosen = [block for name in arguments.blocks for block in _blocks(name)]
        report["blocks"] = [_block(*block, c, arguments.rounds) for block in chosen for c in arguments.c]
        report["networks"] = {name: _network(name, arguments) for name in arguments.networks}
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--c", type=float, nargs="+", default=[0.35, 0.18])
    parser.add_argument("--blocks", nargs="*", default=["mobilenetv2"], choices=["mobilenetv2", "efficientnet_b0"])
    parser.add_argument("--networks", nargs="*", default=["mobilenetv2", "efficientnet_lite0"])
    return parser.parse_args()


def _environment(arguments: argparse.Namespace) -> dict[str, Any]:
    import onnxruntime
    import openvino

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "threads": 1,
        "batch": 1,
        "rounds": arguments.rounds,
        "kernel": instruction_set() or native_problem(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "onnxruntime": onnxruntime.__version__,
            "openvino": openvino.__version__,
            "epitorch": epitorch.__version__,
        },
    }


# ---- what runs ----


def _epitome(build: Callable[[], nn.Module], c: float, x: Tensor) -> nn.Module:
    model = build()
    epitorch.convert_(model, mobilenetv2_plan(model, c, index="direct"))
    return fuse(deploy(model.eval(), x, "reuse"))


def _folded(net: nn.Module, x: Tensor) -> nn.Module:
    """Dense, batch norms folded into the convolutions, channels last."""
    from torch.fx.experimental.optimization import fuse as fold

    return fold(net.eval()).to(memory_format=torch.channels_last)


def _compiled(net: nn.Module, x: Tensor) -> Run:
    """torch.compile with everything frozen, channels last."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    compiled = torch.compile(net.eval().to(memory_format=torch.channels_last))
    x = x.contiguous(memory_format=torch.channels_last)
    compiled(x)
    return lambda: compiled(x)


def _onnx(net: nn.Module, x: Tensor, folder: str) -> str:
    path = f"{folder}/{id(net)}.onnx"
    torch.onnx.export(net.eval(), (x,), path, dynamo=True, verbose=False)
    return path


def _openvino(path: str, x: Tensor) -> Run:
    import openvino

    options = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(path, "CPU", options).create_infer_request()
    value = np.ascontiguousarray(x.numpy())
    return lambda: request.infer([value], share_inputs=True)


def _onnxruntime(path: str, x: Tensor) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name, value = session.get_inputs()[0].name, x.numpy()
    return lambda: session.run(None, {name: value})


# ---- side by side ----


def _compare(runs: dict[str, Run], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of every round, on the clock and of CPU time."""
    names = list(runs)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for round_ in range(-5, rounds):
        for at in range(len(names)):
            name = names[(at + round_) % len(names)]
            began, cpu = time.perf_counter(), time.process_time()
            runs[name]()
            spent = (time.perf_counter() - began) * 1e3, (time.process_time() - cpu) * 1e3
            if round_ >= 0:
                times[name].append(spent)
    return times


def _summary(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in times.items():
        clock, cpu = zip(*values, strict=True)
        quarter = sorted(cpu)[len(cpu) // 4]
        found[name] = {
            "median_ms": round(median(clock), 4),
            "min_ms": round(min(clock), 4),
            "cpu_median_ms": round(median(cpu), 4),
            "cpu_first_quartile_ms": round(quarter, 4),
            "cpu_min_ms": round(min(cpu), 4),
        }
    return found


def _ratios(
    times: dict[str, list[tuple[float, float]]], slow: list[str], fast: list[str]
) -> dict[str, dict[str, float]]:
    """How many times faster: median over the rounds, and the ratio of the best rounds."""
    found = {}
    for a in slow:
        for b in fast:
            pairs = list(zip(times[a], times[b], strict=True))
            best = min(cpu for _, cpu in times[a]) / min(cpu for _, cpu in times[b])
            found[f"{a} / {b}"] = {
                "clock": round(median(x[0] / y[0] for x, y in pairs), 3),
                "cpu": round(median(x[1] / y[1] for x, y in pairs), 3),
                "best_cpu": round(best, 3),
            }
    return found


def _blocks(name: str) -> list[tuple[dict[str, Any], Callable[[], nn.Module]]]:
    """What each block is, and how it is made."""
    if name == "mobilenetv2":
        from torchvision.models.mobilenetv2 import InvertedResidual

        def block(first: int, last: int, side: int, stride: int) -> tuple[dict[str, Any], Callable[[], nn.Module]]:
            what = {"in": first, "out": last, "side": side, "stride": stride}
            return what, lambda: InvertedResidual(first, last, stride, 6)

        return [block(*shape) for shape in BLOCKS]
    import timm

    stages: Any = timm.create_model(name).blocks
    found = []
    for stage, at, first, side in SQUEEZED:
        one = stages[stage][at]
        what = {"in": first, "out": one.conv_pwl.out_channels, "side": side, "stride": one.conv_dw.stride[0]}
        what |= {"of": name, "name": f"blocks.{stage}.{at}", "kernel": one.conv_dw.kernel_size[0]}
        found.append((what, lambda one=one: copy.deepcopy(one)))
    return found


def _block(what: dict[str, Any], make: Callable[[], nn.Module], c: float, rounds: int) -> dict[str, Any]:
    x = torch.randn(1, what["in"], what["side"], what["side"])

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(what["in"], what["in"], 1), make())

    fast: Any = _epitome(build, c, x)
    dense = make().eval()
    like = x.contiguous(memory_format=torch.channels_last)
    torch.compiler.reset()
    fused = fast[-1]
    with tempfile.TemporaryDirectory() as folder:
        path = _onnx(dense, x, folder)
        runs = {
            "dense openvino": _openvino(path, x),
            "dense compiled": _compiled(dense, x),
            "fused": lambda: fused(like),
        }
        times = _compare(runs, rounds)
    ratios = _ratios(times, ["dense compiled", "dense openvino"], ["fused"])
    return {"block": what, "c": c, "times": _summary(times), "faster": ratios}


def _network(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    def build(width: float = 1.0) -> nn.Module:
        if name == "mobilenetv2":
            return mobilenetv2(hidden_width=width)
        import timm

        return timm.create_model(name)

    x = torch.randn(1, 3, 224, 224)
    dense = build().eval()
    torch.compiler.reset()
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = _onnx(dense, x, folder)
        runs["dense onnxruntime"], runs["dense openvino"] = _onnxruntime(path, x), _openvino(path, x)
        runs["dense compiled"] = _compiled(build(), x)
        plain, like = _folded(build(), x), x.contiguous(memory_format=torch.channels_last)
        runs["dense eager"] = lambda: plain(like)
        for c in arguments.c:
            net = _epitome(build, c, x)
            runs[f"fused c={c}"] = lambda net=net: net(x)
            if name == "mobilenetv2":
                runs[f"narrow c={c} openvino"] = _openvino(_onnx(build(c), x, folder), x)
        times = _compare(runs, arguments.rounds)
    fused = [f"fused c={c}" for c in arguments.c]
    others = [run for run in runs if run not in fused]
    return {"times": _summary(times), "faster": _ratios(times, others, fused)}


if __name__ == "__main__":
    raise SystemExit(main())
