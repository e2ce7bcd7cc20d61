"""MobileNetV2 and EfficientNet-Lite0, dense, narrow and as epitomes, in every runtime: is any of them slower?

    OMP_NUM_THREADS=1 python benchmarks/mobile.py --out benchmarks/results/mobile.json

Weights are fresh (times do not depend on them), starts lie between positions, as training leaves them. Epitome
networks are deployed with strategy="auto": in each runtime the fastest of what was measured. One thread; times are
processor time, in turns, so that another load on the machine disturbs them little.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import epitorch
from epitorch.bench import bench
from epitorch.models.mobilenetv2 import mobilenetv2

SHARES = (0.35, 0.18)
HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "mobile.json")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--networks", nargs="+", default=["mobilenetv2", "efficientnet_lite0"])
    arguments = parser.parse_args()
    command = "OMP_NUM_THREADS=1 python benchmarks/mobile.py"
    content: dict[str, Any] = {"what": __doc__.splitlines()[0], "command": command, "networks": {}}
    if arguments.out.exists():  # other networks stay
        content["networks"] = json.loads(arguments.out.read_text())["networks"]
    for network in arguments.networks:
        x = torch.randn(1, 3, arguments.size, arguments.size, generator=torch.Generator().manual_seed(0))
        report = bench(networks(network), x, rounds=arguments.rounds, processor_time=True)
        print(network, report, sep="\n", flush=True)
        content["networks"][network] = report.to_dict()
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


def networks(name: str) -> dict[str, nn.Module]:
    """By label: the dense network, "c*" (hidden channels narrowed, MobileNetV2 only), epitomes at the same c."""
    torch.manual_seed(0)
    found: dict[str, nn.Module] = {"dense": dense(name)}
    for c in SHARES:
        if name == "mobilenetv2":
            found[f"narrow {c}"] = mobilenetv2(hidden_width=c)
        found[f"epitome {c}"] = epitome(name, c)
    return {label: model.eval() for label, model in found.items()}


def dense(name: str) -> nn.Module:
    return mobilenetv2() if name == "mobilenetv2" else timm.create_model("efficientnet_lite0")


@torch.no_grad()
def epitome(name: str, c: float) -> nn.Module:
    model = dense(name)
    if name == "mobilenetv2":
        plan = epitorch.mobilenetv2_plan(model, c)
    else:
        plan = lite0_plan(model, c)
    epitorch.convert_(model, plan)
    for layer in model.modules():
        if isinstance(layer, epitorch.EpitomeLayer):
            layer.set_starts({axis: starts.floor() + 0.3 for axis, starts in layer.starts().items()})
    return model


def lite0_plan(model: nn.Module, c: float) -> epitorch.Plan:
    """MobileNetV2's rule: the expanding 1x1 along its filters, the projecting one along its inputs."""
    layers = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d) or module.kernel_size != (1, 1) or ".conv_pw" not in name:
            continue
        out, in_ = module.weight.shape[:2]
        if name.endswith("conv_pw") and out > in_:
            layers[name] = epitorch.LayerPlan((int(c * out), in_, 1, 1))
        elif in_ > out:
            layers[name] = epitorch.LayerPlan((out, int(c * in_), 1, 1))
    return epitorch.Plan(layers)


if __name__ == "__main__":
    main()
