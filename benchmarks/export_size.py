"""Bytes of exported ONNX files against the bound: 1.03 x 4 bytes for each stored parameter, and 64 KiB.

python benchmarks/export_size.py --out benchmarks/results/export_size.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnx
import torch
import torchvision
from torch import nn

import epitorch
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan
from epitorch.nn import EpitomeLayer
from epitorch.plans import LayerPlan, Plan


def resnet18_both_axes_halved() -> nn.Module:
    model = torchvision.models.resnet18(num_classes=10)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and name != "conv1"}
    halves = {n: LayerPlan((c.out_channels // 2, c.in_channels // 2, *c.kernel_size)) for n, c in layers.items()}
    epitorch.convert_(model, Plan(halves))
    return model


def mobilenetv2_018() -> nn.Module:
    model = mobilenetv2(10, cifar=True, stem_stride=2)
    epitorch.convert_(model, mobilenetv2_plan(model, 0.18, last_conv=True))
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18, both axes halved": resnet18_both_axes_halved,
    "mobilenetv2, c=0.18": mobilenetv2_018,
}


def measure(model: nn.Module, snapped: bool) -> dict[str, Any]:
    for layer in model.modules():
        if isinstance(layer, EpitomeLayer):
            sizes = layer.spec.start_sizes
            layer.set_starts({axis: torch.rand_like(v) * max(sizes[axis]) for axis, v in layer.starts().items()})
            if snapped:
                layer.snap_routing()
    x = torch.randn(1, 3, 32, 32)
    params = epitorch.count(model, x).params
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "net.onnx"
        report = epitorch.export(model.eval(), x, "onnx", out, strategy="size")
        operators = Counter(node.op_type for node in onnx.load(out).graph.node)
    bound = int(1.03 * 4 * params) + 64 * 1024
    return {
        "params": params,
        "bytes": report.bytes,
        "bound": bound,
        "within": report.bytes <= bound,
        "difference": report.difference,
        "operators": dict(operators.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for name, build in NETWORKS.items():
        for snapped in (True, False):
            rows.append({"network": name, "starts": "whole" if snapped else "fractional", **measure(build(), snapped)})
            print(rows[-1], flush=True)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "onnx": onnx.__version__},
        "cpu": names[0] if names else platform.machine(),
        "n": 1,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
