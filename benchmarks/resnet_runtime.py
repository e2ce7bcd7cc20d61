"""Deployed epitome ResNets and VGG in ONNX Runtime and OpenVINO, against the dense network and against plain tiling.

    python benchmarks/resnet_runtime.py --models resnet18 --variants --out benchmarks/results/runtime_resnet18.json

All 3x3 convolutions but the first become epitomes: along the filters (c = 0.5, 0.25) or with both channel axes halved.
`tiling` is the bound: product map, every copy plain, no rotation, no interpolation. `deployed-*` is what
`epitorch.deploy` returns, `laid-out-*` the same after the layout for runtimes; `whole` has a snapped
routing map, `fractional` one with random starts, another in every layer. What rotations are left are 1x1 convolutions,
or slices (`-slices`). `-in-order` leaves the channels in their
order, `-in-one` keeps every activation in one tensor. Weights are random, so are batch-norm statistics. VGG is run
without its three linear layers, whose 124 M weights take the same time in every network.

Every network is exported to ONNX and its output compared with torch's before it is timed. Networks run in turn, one
thread; a round's ratio is the dense time over the network's in that round, and the median over the rounds is given,
by CPU time of the process (what wall time is on an idle machine) and by wall time.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

import epitorch
from epitorch.deploy import lay_out
from epitorch.nn import EpitomeConv2d, EpitomeLayer

CONFIGURATIONS = {"filters 0.5": (0.5, 1.0), "filters 0.25": (0.25, 1.0), "both axes 0.5": (0.5, 0.5)}
RUNTIMES = ("onnxruntime", "openvino")
TOLERANCE = 1e-3  # of the largest output; float32, other summation orders
Run = Callable[[], np.ndarray]


def main() -> int:
    arguments = _arguments()
    if arguments.table:
        print("\n".join(row for path in arguments.table for row in table(json.loads(path.read_text(encoding="utf-8")))))
        return 0
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    report: dict[str, Any] = {**_environment(arguments), "models": {}}
    for model in arguments.models:
        rows = report["models"][model] = {}
        for name in arguments.configurations:
            rows[name] = _measure(model, *CONFIGURATIONS[name], arguments)
            print(model, name, json.dumps(rows[name], indent=1), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--variants", action="store_true", help="the networks laid out in part, too")
    parser.add_argument("--table", nargs="+", type=Path, help="print these reports as a table; measure nothing")
    return parser.parse_args()


def table(report: dict[str, Any]) -> list[str]:
    """Markdown rows: speedup over the dense network and share of the bound, per runtime."""
    rows = []
    for model, configurations in report["models"].items():
        for configuration, measured in configurations.items():
            label = f"{model}, without linear layers" if model.startswith("vgg") else model
            for name in [name for name in measured[RUNTIMES[0]] if name != "dense"]:
                cells = [f"{measured[r][name]['speedup']:.2f}x ({measured[r][name]['of_bound']:.0%})" for r in RUNTIMES]
                rows.append(f"| {label}: {configuration} | {name} | {' | '.join(cells)} |")
    return rows


# ---- networks ----


def _measure(model: str, filters: float, inputs: float, arguments: argparse.Namespace) -> dict[str, Any]:
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    runs: dict[str, dict[str, Run]] = {runtime: {} for runtime in RUNTIMES}
    sizes = {}
    for name, make in _networks(model, filters, inputs, image, arguments.variants).items():
        data, expected = _exported(make(), image)
        sizes[name] = len(data)
        for runtime, compiled in (("onnxruntime", _onnxruntime), ("openvino", _openvino)):
            runs[runtime][name] = _checked(compiled(data, image), expected, f"{name} in {runtime}")
        del data
        gc.collect()
    return {runtime: _times(runs[runtime], arguments.rounds) for runtime in RUNTIMES} | {"onnx_bytes": sizes}


def _networks(
    model: str, filters: float, inputs: float, image: Tensor, variants: bool
) -> dict[str, Callable[[], nn.Module]]:
    def deployed(kind: str) -> nn.Module:
        return epitorch.deploy(_epitome_network(model, filters, inputs, kind), image, strategy="reuse")

    networks: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: _randomised(model),
        "tiling": lambda: _tiled(_epitome_network(model, filters, inputs, "whole")),
    }
    for kind in ("whole", "fractional"):
        networks[f"deployed-{kind}"] = lambda kind=kind: deployed(kind)
        networks[f"laid-out-{kind}"] = lambda kind=kind: lay_out(deployed(kind), image)
        if variants:
            networks[f"laid-out-{kind}-in-order"] = lambda kind=kind: lay_out(deployed(kind), image, permute=False)
            networks[f"laid-out-{kind}-in-one"] = lambda kind=kind: lay_out(deployed(kind), image, split=False)
    networks["laid-out-whole-slices"] = lambda: lay_out(deployed("whole"), image, rotate="slices")
    return networks


def _randomised(model: str) -> nn.Module:
    torch.manual_seed(0)
    net = torchvision.models.get_model(model).eval()
    if model.startswith("vgg"):
        net.classifier = nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
    return net


def _epitome_network(model: str, filters: float, inputs: float, kind: str) -> nn.Module:
    net = _randomised(model)
    for name, conv in list(net.named_modules()):
        if isinstance(conv, nn.Conv2d) and conv.kernel_size == (3, 3) and conv.in_channels > 3:
            net.set_submodule(name, _epitome(conv, filters, inputs))
    for layer in net.modules():
        if isinstance(layer, EpitomeLayer):
            sizes = dict(zip(("out", "in"), layer.spec.epitome_shape[:2], strict=True))
            layer.set_starts({axis: torch.rand_like(value) * sizes[axis] for axis, value in layer.starts().items()})
            if kind == "whole":
                layer.snap_routing()
    return net


def _epitome(conv: Any, filters: float, inputs: float) -> EpitomeConv2d:
    shape = (int(conv.out_channels * filters), int(conv.in_channels * inputs), *conv.kernel_size)
    layer = EpitomeConv2d(
        *(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding),
        bias=conv.bias is not None,
        epitome_shape=shape,
        index="fixed",
    )
    nn.init.normal_(layer.epitome, 0, (2 / (9 * conv.in_channels)) ** 0.5)
    return layer.eval()


class _Tiled(nn.Module):
    """The bound: inputs summed as they lie, a small convolution, its output repeated."""

    def __init__(self, layer: EpitomeConv2d) -> None:
        super().__init__()
        self.copies = layer.out_channels // layer.spec.epitome_shape[0]
        self.width = layer.spec.epitome_shape[1]
        self.pieces = layer.in_channels // self.width
        shape = layer.spec.epitome_shape
        self.conv = nn.Conv2d(shape[1], shape[0], layer.kernel_size, layer.stride, layer.padding, bias=False)
        self.conv.weight.data.copy_(layer.epitome)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        if self.pieces > 1:
            total = x.narrow(1, 0, self.width)
            for piece in range(1, self.pieces):
                total = total + x.narrow(1, piece * self.width, self.width)
        output = torch.cat([self.conv(total)] * self.copies, 1)
        return output if self.bias is None else output + self.bias


def _tiled(net: nn.Module) -> nn.Module:
    for name, layer in list(net.named_modules()):
        if isinstance(layer, EpitomeConv2d):
            net.set_submodule(name, _Tiled(layer))
    return net.eval()


# ---- runtimes ----


def _exported(net: nn.Module, image: Tensor) -> tuple[bytes, np.ndarray]:
    with torch.no_grad():
        expected = net(image).numpy()
    program = torch.onnx.export(net.eval(), (image,), dynamo=True, verbose=False)
    assert program is not None
    return program.model_proto.SerializeToString(), expected


def _onnxruntime(data: bytes, image: Tensor) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: image.numpy()}
    return lambda: session.run(None, feed)[0]


def _openvino(data: bytes, image: Tensor) -> Run:
    import openvino

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    core = openvino.Core()
    request = core.compile_model(core.read_model(io.BytesIO(data)), "CPU", options).create_infer_request()
    return lambda: request.infer([image.numpy()], share_inputs=True, share_outputs=True)[0]


def _checked(run: Run, expected: np.ndarray, what: str) -> Run:
    difference = float(np.abs(run() - expected).max() / np.abs(expected).max())
    if not difference < TOLERANCE:
        raise RuntimeError(f"{what}: output differs from torch's by {difference:.1e} of the largest value")
    return run


# ---- times ----


def _times(runs: dict[str, Run], rounds: int) -> dict[str, Any]:
    names, taken = list(runs), {name: [] for name in runs}
    for turn in range(rounds + 2):
        first = turn % len(names)  # a network's neighbours in the order differ from round to round
        for name in names[first:] + names[:first]:
            runs[name]()
            begun = time.process_time(), time.perf_counter()
            runs[name]()
            runs[name]()
            took = (time.process_time() - begun[0]) / 2, (time.perf_counter() - begun[1]) / 2
            if turn > 1:
                taken[name].append(took)
    rows = {name: _summary(taken[name], taken["dense"]) for name in names}
    for row in rows.values():
        row["of_bound"] = round(row["speedup"] / rows["tiling"]["speedup"], 3)
        row["of_bound_fastest"] = round(row["speedup_fastest"] / rows["tiling"]["speedup_fastest"], 3)
    return rows


def _summary(times: list[tuple[float, float]], dense: list[tuple[float, float]]) -> dict[str, float]:
    cpu, wall = zip(*times, strict=True)
    cpu_dense, wall_dense = zip(*dense, strict=True)
    ratios = sorted(d / t for d, t in zip(cpu_dense, cpu, strict=True))
    quarter = len(ratios) // 4
    return {
        "cpu_ms": round(1000 * median(cpu), 2),
        "speedup": round(median(ratios), 3),
        "speedup_lower_quartile": round(ratios[quarter], 3),
        "speedup_upper_quartile": round(ratios[-1 - quarter], 3),
        "speedup_fastest": round(min(cpu_dense) / min(cpu), 3),
        "wall_ms": round(1000 * median(wall), 2),
        "speedup_wall": round(median(d / t for d, t in zip(wall_dense, wall, strict=True)), 3),
    }


def _command() -> str:
    """As it was called, less where the report went."""
    words = list(sys.argv)
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    return "python " + " ".join(words)


def _environment(arguments: argparse.Namespace) -> dict[str, Any]:
    import onnxruntime
    import openvino

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "what": "one image of 224x224, float32, one thread; speedup = dense / network, of_bound = speedup / tiling's",
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "onnxruntime": onnxruntime.__version__,
            "openvino": openvino.__version__,
            "python": platform.python_version(),
        },
        "cpu": next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor()),
        "avx512": any("avx512f" in line for line in lines),
        "cores": os.cpu_count(),
        "threads": 1,
        "n": arguments.rounds,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    sys.exit(main())
