"""How long `epitorch.deploy` takes for ResNet-50, without measuring and by measurement.

OMP_NUM_THREADS=1 python benchmarks/deploy_resnet50.py --out benchmarks/results/deploy_resnet50.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
import torchvision

import epitorch
from epitorch.tuning import machine

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "deploy_resnet50.json")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = torchvision.models.resnet50().eval(), torch.randn(1, 3, 224, 224)
    epitorch.convert_(model, epitorch.plan(model, x, madds=2_500_000_000))
    ways = {
        "dense": {"strategy": "dense"},
        "reuse": {"strategy": "reuse"},
        "auto, cost model": {"strategy": "auto", "measure": False},
        "auto, measured in torch": {"strategy": "auto"},
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, options in ways.items():
            with tempfile.TemporaryDirectory() as folder:  # nothing known from the round before
                os.environ["EPITORCH_CACHE"] = folder
                begun = time.perf_counter(), time.process_time()
                epitorch.deploy(model, x, **options)
                seconds[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    content = {
        "what": __doc__.splitlines()[0],
        "command": "OMP_NUM_THREADS=1 python benchmarks/deploy_resnet50.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "torch": torch.__version__,
        "threads": 1,
        "n": arguments.rounds,
        "seconds": {
            name: {"wall": round(median(w for w, _ in rows), 2), "processor": round(median(p for _, p in rows), 2)}
            for name, rows in seconds.items()
        },
    }
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
