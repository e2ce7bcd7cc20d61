"""ResNet-18 with a quarter of its parameters: narrowed, separable epitomes, partial products, in every runtime.

    OMP_NUM_THREADS=1 python benchmarks/partial.py --out benchmarks/results/partial.json

Fresh weights (times do not depend on them), whole starts. "reuse" runs every layer on its epitome; "auto" takes what is
fastest in each runtime; "16" means epitome channels in multiples of 16, "filters" that 3x3 convolutions are shortened
along their filters. One thread, processor time, in turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torchvision
from torch import nn

import epitorch
from epitorch.bench import bench

HERE = Path(__file__).resolve().parent
NETWORKS: dict[str, dict[str, Any]] = {
    "separable": {"form": "separable"},
    "separable 16": {"form": "separable", "align": 16},
    "partial": {"form": "partial"},
    "partial 16": {"form": "partial", "align": 16},
    "partial filters": {"form": "partial", "axes": "out"},
}
STRATEGIES: tuple[Literal["reuse", "auto"], ...] = ("reuse", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "partial.json")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    content: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "command": "OMP_NUM_THREADS=1 python benchmarks/partial.py",
    }
    for strategy in STRATEGIES:
        report = bench(networks(x), x, rounds=arguments.rounds, processor_time=True, memory=False, strategy=strategy)
        print(report, flush=True)
        content[strategy] = report.to_dict()
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


def networks(x: torch.Tensor) -> dict[str, nn.Module]:
    """The dense network, one of half its width behind the first convolution, and those of `NETWORKS`.

    All keep the first convolution, all but the narrowed one the classifier; that one has 5% more parameters.
    """
    made: dict[str, nn.Module] = {
        "dense": torchvision.models.resnet18().eval(),
        "narrowed": timm.create_model("resnet18", channels=(32, 64, 128, 256)).eval(),
    }
    for name, options in NETWORKS.items():
        torch.manual_seed(0)
        model = torchvision.models.resnet18().eval()
        epitorch.convert_(model, epitorch.plan(model, x, ratio=4, only=["layer*"], index="fixed", **options))
        made[name] = model
    return made


if __name__ == "__main__":
    main()
