"""MobileNetV2 with fused inverted residuals on a CUDA GPU: dense against epitome, batch 256, half precision.

    python benchmarks/fused_cuda.py --out fused_cuda.json               # on the GPU; ends within --minutes
    python benchmarks/fused_cuda.py --device cpu --out /tmp/dry.json    # a rehearsal: tiny, kernel interpreted

Order: parity (nothing is timed if it fails), bandwidth of a plain copy, every distinct block with the kernel's share
of that bandwidth, the kernels that take the time, then the networks in alternating rounds, dense under
torch.compile(mode="max-autotune"). Each result is written to --out as soon as it is there. Times are medians of CUDA
events. Weights are random: times do not depend on them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epitorch
from epitorch import deploy
from epitorch.deploy import fuse
from epitorch.deploy._fused_triton import TILES, pack_triton, run_triton, wrapped_sums
from epitorch.deploy.fused import FusedInvertedResidual
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan

Run = Callable[[], Any]
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1}  # half: 17 blocks of rounding, 0.01 to 0.03 on the CPU too
CACHE_BYTES = 256 << 20  # inputs take turns until they are beyond the second-level cache


@dataclass
class Report:
    """What has been measured, on disk after every step."""

    out: Path | None
    content: dict[str, Any] = field(default_factory=dict)

    def put(self, key: str, value: Any) -> None:
        """Print it and write everything again."""
        self.content[key] = value
        print(f"== {key}\n{json.dumps(value, indent=1)}", flush=True)
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


class OutOfTime(BaseException):
    """--minutes are over; no `except Exception` of a compiler may swallow it."""


def main() -> int:
    arguments = _arguments()
    began = time.monotonic()
    report = Report(arguments.out)
    report.put("environment", _environment(arguments))
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(int(arguments.minutes * 60))
    steps = (_compile_kernels, _parity, _bandwidth, _blocks, _where, _networks)
    failed = False
    try:
        for step in steps:
            right = _done(step, report, arguments)
            failed |= not right
            report.put("seconds", report.content.get("seconds", {}) | {step.__name__: time.monotonic() - began})
            if step is _parity and not right:
                break
    except OutOfTime:
        report.put("stopped", f"after {arguments.minutes} minutes; what is above is complete")
    return int(failed)


def _done(step: Callable[[Report, argparse.Namespace], None], report: Report, arguments: argparse.Namespace) -> bool:
    """One step's failure must not cost the results of the others: time on a GPU is short."""
    try:
        with torch.no_grad():
            step(report, arguments)
    except Exception:
        report.put(f"failed{step.__name__}", traceback.format_exc()[-3000:])
        return False
    return True


def _stop(*_: object) -> None:
    raise OutOfTime


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--side", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--c", type=float, nargs="+", default=[0.18, 0.35])
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--workers", type=int, default=16, help="processes that compile kernels")
    parser.add_argument("--mode", default="max-autotune", help="of torch.compile")
    arguments = parser.parse_args()
    dry = arguments.device == "cpu"
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
    for name, real, tiny in (("batch", 256, 1), ("side", 224, 32), ("rounds", 30, 3)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, tiny if dry else real)
    return arguments


def _environment(arguments: argparse.Namespace) -> dict[str, Any]:
    import triton

    cuda = arguments.device == "cuda"
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else "none: a rehearsal, its times mean nothing",
        "batch": arguments.batch,
        "side": arguments.side,
        "rounds": arguments.rounds,
        "dtype": "float16",
        "layout": "channels last",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "epitorch": epitorch.__version__,
        },
    }


# ---- networks ----


def _epitome(c: float, dtype: torch.dtype, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = mobilenetv2()
    epitorch.convert_(model, mobilenetv2_plan(model, c, index="direct"))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    model.train()(torch.randn(8, 3, 64, 64))  # without statistics all values are near 0, where half precision is coarse
    return fuse(deploy(model.eval(), torch.randn(1, 3, 64, 64), "reuse")).to(device, dtype)


def _dense(device: str, hidden_width: float = 1.0) -> nn.Module:
    from torch.fx.experimental.optimization import fuse as fold

    net = fold(mobilenetv2(hidden_width=hidden_width).eval())
    return net.to(device, torch.float16, memory_format=torch.channels_last)


def _images(arguments: argparse.Namespace, dtype: torch.dtype = torch.float16) -> Tensor:
    shape = (arguments.batch, 3, arguments.side, arguments.side)
    return torch.randn(shape, device=arguments.device, dtype=dtype).contiguous(memory_format=torch.channels_last)


# ---- steps ----


def _compile_kernels(report: Report, arguments: argparse.Namespace) -> None:
    """Fill Triton's cache on disk from several processes; the timings of their tuning are not kept."""
    if arguments.device == "cpu" or arguments.workers < 1:
        return
    shares = [(arguments, n) for n in range(arguments.workers)]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        report.put("kernels_compiled", sum(pool.starmap(_compile_share, shares)))


def _compile_share(arguments: argparse.Namespace, number: int) -> int:
    small = argparse.Namespace(**(vars(arguments) | {"batch": 2, "side": 64}))
    done = at = 0
    with torch.no_grad():
        for c in arguments.c:
            for dtype in TOLERANCE:
                for _, block, x in _block_inputs(_epitome(c, dtype, "cuda"), small, dtype):
                    for tile in TILES:
                        if at % arguments.workers == number:
                            run_triton(block.stage, block._packed, x, tile)
                            done += 1
                        at += 1
    torch.cuda.synchronize()
    return done


def _block_inputs(
    net: nn.Module, arguments: argparse.Namespace, dtype: torch.dtype = torch.float16
) -> list[tuple[str, FusedInvertedResidual, Tensor]]:
    """Blocks that differ in their sizes, each with an input; no kernel runs."""
    from epitorch.deploy._fused_block import output_size

    found: dict[str, Any] = {}
    rows = columns = arguments.side
    stages = [(n, m) for n, m in net.named_modules() if hasattr(m, "settings")]
    for name, module in stages:
        stage: Any = module
        channels = stage.stage.in_channels
        if isinstance(module, FusedInvertedResidual):
            shapes = [tuple(tensor.shape) for tensor in module._tensors()]
            shape = (arguments.batch, rows, columns, channels)
            x = torch.randn(shape, device=arguments.device, dtype=dtype).permute(0, 3, 1, 2)
            found.setdefault(str((shape, shapes, module.settings)), (name, module, x))
        rows, columns = output_size(stage.settings, stage.stage.kernel, rows, columns)
    return list(found.values())


def _parity(report: Report, arguments: argparse.Namespace) -> None:
    """The fused network on the device against torch's operators in double precision on the CPU."""
    found = {}
    torch.backends.cudnn.allow_tf32 = False  # float32 is compared, never timed
    for c in arguments.c:
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
        exact = _by_torch(_epitome(c, torch.float64, "cpu"), x.double())
        for dtype, tolerance in TOLERANCE.items():
            net = _epitome(c, dtype, arguments.device)
            got = net(x.to(arguments.device, dtype)).double().cpu()
            error = float((exact - got).norm() / exact.norm())
            other = net(x.to(arguments.device, dtype).flip(3)).double().cpu()
            control = float((exact - other).norm() / exact.norm())
            found[f"c={c} {dtype}"] = {"error": error, "tolerance": tolerance, "mirrored_input": control}
            report.put("parity", found)
            if not (error < tolerance < control):
                raise ValueError(f"the fused network at c={c} in {dtype} is not the network: error {error}")


def _by_torch(net: nn.Module, x: Tensor) -> Tensor:
    for module in net.modules():
        if hasattr(module, "_packed"):
            module._packed = []
    return net(x)


def _bandwidth(report: Report, arguments: argparse.Namespace) -> None:
    size = (1 << 30) if arguments.device == "cuda" else (1 << 22)
    a = torch.randn(size // 2, device=arguments.device, dtype=torch.float16)
    b = torch.empty_like(a)
    (spent,) = _times({"copy": lambda: b.copy_(a)}, arguments).values()
    report.put("copy_gb_s", round(2 * size / median(spent) / 1e6, 1))


def _blocks(report: Report, arguments: argparse.Namespace) -> None:
    rows = []
    for c in arguments.c:
        net = _epitome(c, torch.float16, arguments.device)
        blocks = _block_inputs(net, arguments)
        for name, block, x in blocks[1:2] if arguments.device == "cpu" else blocks:
            rows.append({"c": c, "block": name} | _block(block, x, report.content["copy_gb_s"], arguments))
            report.put("blocks", rows)


def _block(block: FusedInvertedResidual, x: Tensor, peak: float, arguments: argparse.Namespace) -> dict[str, Any]:
    stage, tile = block.stage, TILES[0] if arguments.device == "cpu" else None
    expand, project, indices, constants = pack_triton(stage)
    pixels = x.permute(0, 2, 3, 1)
    made = F.linear(pixels, expand) if expand.numel() else pixels
    sums = wrapped_sums(stage, made, indices, constants, tile)
    moved = sum(t.numel() * t.element_size() for t in (made, sums, indices, constants))
    copies = [made, *(made.clone() for _ in range(_copies(moved, arguments)))]
    turn = iter(range(1 << 60))
    runs: dict[str, Run] = {
        "kernel": lambda: wrapped_sums(stage, copies[next(turn) % len(copies)], indices, constants, tile),
        "product_map": lambda: F.linear(pixels, expand) if expand.numel() else None,
        "last_1x1": lambda: F.linear(sums, project),
        "stage": lambda: run_triton(stage, [expand, project, indices, constants], x, tile),
    }
    times = {name: median(spent) for name, spent in _times(runs, arguments).items()}
    share = moved / times["kernel"] / 1e6 / peak
    hidden = stage.depthwise.shape[0] if stage.depthwise is not None else 0
    return {
        "input": list(x.shape),
        "hidden": hidden,
        "product_map": made.shape[3],
        "wrapped": sums.shape[3],
        "kernel_mb": round(moved / 1e6, 2),
        "ms": {name: round(value, 4) for name, value in times.items()},
        "share_of_bandwidth": round(share, 3),
        "expanded_values_per_ns": round(x.shape[0] * x.shape[2] * x.shape[3] * hidden / times["kernel"] / 1e6, 2),
    }


def _copies(size: int, arguments: argparse.Namespace) -> int:
    return min(16, CACHE_BYTES // size) if arguments.device == "cuda" else 0


def _where(report: Report, arguments: argparse.Namespace) -> None:
    """Which kernels of the fused network take the time."""
    from torch.profiler import ProfilerActivity, profile

    cuda = arguments.device == "cuda"
    found = {}
    x = _images(arguments) if cuda else _images(arguments, torch.float32)
    for c in arguments.c:
        net = _epitome(c, x.dtype, arguments.device)
        net(x)
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
            net(x)
            _wait(arguments)
        events: list[Any] = list(profiler.key_averages())
        spent = sorted((e.self_device_time_total if cuda else e.self_cpu_time_total, e.key, e.count) for e in events)
        found[f"c={c}"] = [{"us": us, "kernel": key[:80], "calls": n} for us, key, n in reversed(spent[-12:])]
    report.put("where", found)


def _networks(report: Report, arguments: argparse.Namespace) -> None:
    cuda = arguments.device == "cuda"
    x = _images(arguments) if cuda else _images(arguments, torch.float32)
    dense = _dense(arguments.device).to(x.dtype)
    runs: dict[str, Run] = {"dense eager": lambda: dense(x)}
    for c in arguments.c:
        net = _epitome(c, x.dtype, arguments.device)
        runs[f"fused c={c} eager"] = lambda net=net: net(x)
        runs[f"fused c={c} compiled"] = _compiled(_epitome(c, x.dtype, arguments.device), x, arguments.mode)
    runs["dense reduce-overhead"] = _compiled(_dense(arguments.device).to(x.dtype), x, "reduce-overhead")
    _compare(report, "networks_first", runs, arguments)  # searching kernels for the dense network may take minutes
    runs[f"dense {arguments.mode}"] = _compiled(_dense(arguments.device).to(x.dtype), x, arguments.mode)
    _compare(report, "networks", runs, arguments)
    for c in arguments.c:
        narrow = _dense(arguments.device, c).to(x.dtype)
        runs[f"narrow c={c} {arguments.mode}"] = _compiled(narrow, x, arguments.mode)
    _compare(report, "networks_with_narrow", runs, arguments)


def _compiled(net: nn.Module, x: Tensor, mode: str) -> Run:
    compiled = torch.compile(net, mode=mode) if x.is_cuda else torch.compile(net, backend="aot_eager")
    for _ in range(3):  # the third call replays a graph
        compiled(x)
    return lambda: compiled(x)


def _compare(report: Report, key: str, runs: dict[str, Run], arguments: argparse.Namespace) -> None:
    times = _times(runs, arguments)
    names = [name for name in runs if name.startswith("fused")]
    faster = {
        f"{slow} / {fast}": round(median(a / b for a, b in zip(times[slow], times[fast], strict=True)), 3)
        for slow in runs
        if slow not in names
        for fast in names
    }
    spread = {name: [round(f(spent), 3) for f in (median, min, max)] for name, spent in times.items()}
    report.put(key, {"ms_median_min_max": spread, "faster": faster})


# ---- time ----


def _wait(arguments: argparse.Namespace) -> None:
    if arguments.device == "cuda":
        torch.cuda.synchronize()


def _times(runs: dict[str, Run], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of every round; the runs take turns, each round beginning with another one."""
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(0 if arguments.device == "cpu" else -3, arguments.rounds):
        for at in range(len(names)):
            name = names[(at + round_) % len(names)]
            spent = _once(runs[name], arguments)
            if round_ >= 0:
                times[name].append(spent)
    return times


def _once(run: Run, arguments: argparse.Namespace) -> float:
    if arguments.device == "cpu":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)  # the queue fills meanwhile, so that launching is not in the time
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


if __name__ == "__main__":
    raise SystemExit(main())
