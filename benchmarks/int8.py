"""Int8 beside float: accuracy, bytes and time of dense and epitome networks in ONNX Runtime and OpenVINO.

    python benchmarks/int8.py --data ../shared/data --runs runs/resnet20 --images /tmp/lite0-images.npz

Networks: EfficientNet-Lite0 with ImageNet weights, dense and as epitomes (1.1x fewer parameters by least squares, batch
norm re-estimated, no training), on ILSVRC-2012 *training* images, one per class, of which others calibrate; and the
ResNet-20 that `epitorch sweep sweeps/cifar10-resnet20.yaml` trains on CIFAR-10, calibrated on held-out training images,
measured on test images. Time is processor time of one image on one thread, the files of a network in turns. One line of
JSON per network goes to `--cells`, so that a run goes on where it stopped; `--networks` picks some.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import epitorch
import lite0
from epitorch.checkpoint import load_checkpoint
from epitorch.commands import calibration_images
from epitorch.export import export, export_int8, open_onnx, open_openvino
from epitorch.export._made import round_rows
from epitorch.functional import sample_weight
from epitorch.nn import EpitomeLayer
from epitorch.training.data import load_images
from epitorch.training.data_kinds import normalization
from epitorch.warmstart import reestimate_batch_norm_

HERE = Path(__file__).resolve().parent
RESNETS = ("narrow-4x", "both-4x-fixed", "both-4x-snapped", "grid-4x-fixed")
NETWORKS = ("lite0", "lite0-epitome", *RESNETS)
RATIO = 1.1  # of Lite0's parameters


@dataclass(frozen=True)
class Task:
    """A network, images as it gets them, and labels."""

    model: nn.Module
    calibration: Tensor
    images: Tensor
    labels: np.ndarray
    about: str


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    done = _read(arguments.cells)
    for name in arguments.networks:
        if name not in {cell["network"] for cell in done}:
            task = _lite0(arguments, name) if name.startswith("lite0") else _resnet20(arguments, name)
            done.append(_cell(name, task, arguments))
            with arguments.cells.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(json.dumps(done[-1]), flush=True)
    done = sorted(_read(arguments.cells), key=lambda cell: NETWORKS.index(cell["network"]))
    report = {**_environment(), "rounds": arguments.rounds, "networks": done}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/ and imagenet1k-sample/")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the ResNet-20 runs, NAME-seed0")
    parser.add_argument("--images", dest="cache", type=Path, default=Path("/tmp/lite0-images.npz"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "int8.json")
    parser.add_argument("--cells", type=Path, default=Path("/tmp/int8-cells.jsonl"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/int8-files"))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--calibration", type=int, default=64)
    parser.add_argument("--measured", type=int, default=200, help="images of Lite0")
    parser.add_argument("--tested", type=int, default=2000, help="test images of CIFAR-10")
    parser.add_argument("--strategies", nargs="+", default=("size", "dense", "reuse"), help="of epitomes, ONNX Runtime")
    parser.add_argument("--rounds", type=int, default=21)
    return parser.parse_args()


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


# ---- networks ----


def _lite0(arguments: argparse.Namespace, name: str) -> Task:
    sample = arguments.data / "imagenet1k-sample" / "sample.parquet"
    images, labels = lite0._images(argparse.Namespace(data=sample, cache=arguments.cache))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    first, rest = order[: arguments.calibration], order[200 : 200 + arguments.measured]  # lite0.py measures the latter
    calibration, measured = (torch.cat(list(lite0._batches(images[part]))).contiguous() for part in (first, rest))
    model = lite0.lite0() if name == "lite0" else _fitted(calibration, arguments.folder / "lite0-epitome.pt")
    about = f"{len(rest)} ILSVRC-2012 training images; {len(first)} others calibrate, drawn with seed 0"
    return Task(model.eval(), calibration, measured, labels[rest].numpy(), about)


def _fitted(calibration: Tensor, kept: Path) -> nn.Module:
    """Lite0 as epitomes, fitted once."""
    if not kept.exists():
        model = lite0.lite0()
        plan = epitorch.plan(
            model, calibration[:1], ratio=RATIO, form="fine", index="direct", skip=["_conv_stem"], policy="uniform"
        )
        epitorch.convert_(model, plan, init="least_squares")
        reestimate_batch_norm_(model, calibration.split(32))
        torch.save(model, kept)
    return torch.load(kept, weights_only=False)  # this script's own file


def _resnet20(arguments: argparse.Namespace, name: str) -> Task:
    folder, data = arguments.runs / f"{name}-seed0", arguments.data / "cifar10"
    checkpoint = load_checkpoint(folder)
    known: Any = checkpoint.config.input
    calibration, drawn = calibration_images(str(data), checkpoint.config, str(folder), arguments.calibration, 0)
    test = load_images(data, "test")
    images = normalization(known)(test.images[: arguments.tested])
    return Task(checkpoint.model, calibration, images, test.labels[: arguments.tested].numpy(), f"{drawn}; test images")


# ---- one network ----


def _cell(name: str, task: Task, arguments: argparse.Namespace) -> dict[str, Any]:
    layers = {n: layer for n, layer in task.model.named_modules() if isinstance(layer, EpitomeLayer)}
    files = _files(name, task, arguments, bool(layers))
    runs = {form: run for form, (run, _) in files.items()}
    scores = {form: _accuracy(run, task) for form, run in runs.items()}
    times = _times(runs, task.images[:1].numpy(), arguments.rounds)
    return {
        "network": name,
        "about": task.about,
        "n": len(task.labels),
        "params": epitorch.count(task.model, task.images[:1]).params,
        "files": {
            form: {**about, "top1": round(100 * scores[form], 2), **times[form]} for form, (_, about) in files.items()
        },
        "weight_errors": {n: weight_errors(layer) for n, layer in layers.items()},
    }


def _files(
    name: str, task: Task, arguments: argparse.Namespace, epitomes: bool
) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each form: how it is run, and what is known of its file."""
    one, made, folder = task.images[:1], {}, arguments.folder
    file = folder / f"{name}.onnx"
    size = export(task.model, one, "onnx", file, strategy="dense").bytes
    made["onnxruntime float"] = open_onnx(file), {"bytes": size}
    made["openvino float"] = open_openvino(file), {"bytes": size}
    if epitomes:
        small = folder / f"{name}-size.onnx"
        size = export(task.model, one, "onnx", small, strategy="size").bytes
        made["onnxruntime float, size"] = open_onnx(small), {"bytes": size}
    for runtime, to, suffix, open_ in (
        ("onnxruntime", "onnx", ".onnx", open_onnx),
        ("openvino", "openvino", ".xml", open_openvino),
    ):
        strategies: Any = arguments.strategies if epitomes and to == "onnx" else ("size",)
        for strategy in strategies:
            file = folder / f"{name}-int8-{strategy}{suffix}"
            report = export_int8(task.model, one, task.calibration, to, file, strategy=strategy)
            about = {"bytes": report.bytes, "error": round(report.error, 4), "float_weights": report.float_weights}
            made[f"{runtime} int8, {strategy}"] = open_(file), about
    return made


def _accuracy(run: Callable[..., Any], task: Task) -> float:
    found = [run([batch.numpy()])[0].argmax(1) for batch in task.images.split(10)]
    return float((np.concatenate(found) == task.labels).mean())


def _times(runs: dict[str, Callable[..., Any]], x: np.ndarray, rounds: int) -> dict[str, dict[str, Any]]:
    """Processor milliseconds, in turns; medians, and of the ratio to the runtime's float network in the same round."""
    took: dict[str, list[float]] = {form: [] for form in runs}
    for number in range(rounds + 2):
        for form, run in runs.items():
            begun = time.process_time()
            run([x])
            if number >= 2:
                took[form].append(1e3 * (time.process_time() - begun))
    found = {}
    for form, values in took.items():
        base = took[f"{form.split()[0]} float"]
        ratio = sorted(a / b for a, b in zip(base, values, strict=True))
        quartiles = [round(ratio[len(ratio) * k // 4], 3) for k in (1, 2, 3)]
        found[form] = {"cpu_ms": round(statistics.median(values), 3), "speedup_quartiles": quartiles}
    return found


# ---- scales ----


def weight_errors(layer: Any) -> dict[str, float]:
    """Relative error of a layer's weight in int8, by what has a scale of its own."""
    epitome = layer.epitome.detach()
    semantic = epitome.transpose(0, 1) if layer.transposed else epitome

    def made(source: Tensor) -> np.ndarray:
        return sample_weight(source, layer.starts(), layer.spec).detach().numpy()

    weight, rows = made(semantic), _rounded(semantic.numpy(), 0)
    shared = made(torch.from_numpy(rows))
    tensor = weight.reshape(1, -1)
    ways = {
        "scale per output channel of the weight": _rounded(weight, 0),
        "scale per row of the epitome": shared,
        "both, one after the other": _rounded(shared, 0),
        "one scale for the epitome": made(
            torch.from_numpy(_rounded(semantic.numpy().reshape(1, -1), 0)).view_as(semantic)
        ),
        "one scale for the weight": _rounded(tensor, 0).reshape(weight.shape),
    }
    norm = np.linalg.norm(weight)
    return {way: round(float(np.linalg.norm(value - weight) / norm), 5) for way, value in ways.items()}


def _rounded(values: np.ndarray, axis: int) -> np.ndarray:
    rounded, scale = round_rows(values, axis)
    return (rounded * scale).astype(np.float32)


def _environment() -> dict[str, Any]:
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    packages = ("torch", "onnx", "onnxruntime", "openvino", "nncf")
    return {
        "what": "int8 beside float: accuracy, bytes, processor time of one image; one thread, files in turns",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": 1,
    }


if __name__ == "__main__":
    sys.exit(main())
