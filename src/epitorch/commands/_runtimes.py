"""Exporting, deploying and timing what a name stands for."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch._files import write_atomic
from epitorch.bench import BenchReport, bench
from epitorch.checkpoint import CheckpointConfig, load_checkpoint
from epitorch.commands._models import named_model, taking
from epitorch.conversion import convert_
from epitorch.deploy.report import Deployment
from epitorch.errors import InputError, explain
from epitorch.export import ExportReport, export
from epitorch.plans import Plan
from epitorch.tuning import deploy


def export_named(
    name: str,
    to: str,
    out: Path,
    *,
    strategy: str = "reuse",
    dynamic: str | None = None,
    opset: int | None = None,
    compress_to_fp16: bool = False,
    compiled: bool = False,
    data: str | None = None,
    input_shape: tuple[int, ...] | None = None,
    allow_factory: bool = False,
) -> ExportReport:
    """Export a checkpoint's network.

    Args:
        name: Folder of the checkpoint, or of its run.
        to: As for `epitorch.export`, and so all that follow.
        out: See there.
        strategy: See there.
        dynamic: See there.
        opset: See there.
        compress_to_fp16: See there.
        compiled: See there.
        data: Where test images come from to compare on, as for `load_images`; None compares on noise.
        input_shape: Shape of the example; default one image.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: As for `epitorch.export`, or if there is no such checkpoint.
        ParityError: If the file computes something else.
    """
    checkpoint = load_checkpoint(name, allow_factory=allow_factory)
    known = checkpoint.config.input
    shape = input_shape or ((1, 3, 224, 224) if known is None else (1, *known.shape))
    words: Any = to, strategy, dynamic  # checked there
    return export(
        checkpoint.model,
        torch.randn(shape, generator=torch.Generator().manual_seed(0)),
        words[0],
        out,
        strategy=words[1],
        dynamic=words[2],
        check_inputs=None if data is None else images_to_check(data, checkpoint.config, name, shape[0]),
        opset=opset,
        compress_to_fp16=compress_to_fp16,
        compiled=compiled,
    )


_FORMATS = {"torch": ("pt2", ".pt2"), "onnxruntime": ("onnx", ".onnx"), "openvino": ("openvino", ".xml")}


def deploy_named(
    name: str,
    runtime: str = "torch",
    *,
    objective: str = "latency",
    out: Path | None = None,
    report: Path | None = None,
    measure: bool = True,
    threads: int = 1,
    data: str | None = None,
    input_shape: tuple[int, ...] | None = None,
    allow_factory: bool = False,
) -> tuple[Deployment, ExportReport | None]:
    """Deploy a checkpoint for a runtime by measurement, and write it.

    Args:
        name: Folder of the checkpoint, or of its run.
        runtime: As for `epitorch.deploy`.
        objective: See there.
        out: File of the deployed network; None writes none.
        report: JSON file of the deployment; None writes none.
        measure: As for `epitorch.deploy`.
        threads: See there.
        data: Compare the file with torch on test images from here; default: on noise.
        input_shape: Shape of the example; default one image as the checkpoint knows it.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: As for `epitorch.deploy` and `epitorch.export`, if there is no such checkpoint, it does not take
            this input, or a file has no place. Nothing is measured then.
        ParityError: If the deployed network or its file computes something else.
    """
    to, suffix = _FORMATS.get(runtime, ("", ""))
    for option, path, wanted in (("--out", out, suffix), ("--report", report, ".json")):
        if path is not None and to:
            _check_place(option, path, wanted)
    if data is not None and out is None:
        raise InputError(explain("--data has no effect", expected="--out: what it checks", got="no file to write"))
    checkpoint = load_checkpoint(name, allow_factory=allow_factory)
    known = checkpoint.config.input
    shape = input_shape or ((1, 3, 224, 224) if known is None else (1, *known.shape))
    images = None if data is None else images_to_check(data, checkpoint.config, name, shape[0])
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with taking(name, shape), torch.no_grad():
        checkpoint.model(example)  # before anything is measured
    words: Any = runtime, objective, to  # checked there
    net: Any = deploy(
        checkpoint.model, example, "auto", runtime=words[0], objective=words[1], measure=measure, threads=threads
    )
    if report is not None:
        write_atomic(report, (json.dumps(net.deployment.to_dict(), indent=1) + "\n").encode())
    exported = None if out is None else export(net, example, words[2], out, check_inputs=images, input=known)
    return net.deployment, exported


def _check_place(option: str, path: Path, suffix: str) -> None:
    """Before anything is measured."""
    if path.suffix != suffix or path.is_dir() or not path.parent.is_dir():
        got = f"a folder: {path}" if path.is_dir() else f"{path}, no such folder" * (not path.parent.is_dir())
        raise InputError(
            explain(
                "the file has no place",
                expected=f"a file that ends in {suffix}, in a folder that exists",
                got=got or str(path),
                where=option,
            )
        )


def images_to_check(data: str, config: CheckpointConfig, name: str, number: int) -> Tensor:
    """The first test images, as the model gets them."""
    from epitorch.training.data_kinds import first_images, kind_in, load_split, normalization
    from epitorch.training.evaluation import check_images

    known = config.input
    if known is None:
        raise InputError(
            explain(
                "this checkpoint knows no images",
                expected="a trained one, or no --data",
                got="a converted model",
                where=name,
            )
        )
    images = load_split(data, "test", kind_in(config.recipe))
    check_images(images, known)
    return normalization(known)(first_images(images, number))


def bench_named(
    names: Sequence[str],
    plan_file: Path | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    runtimes: Sequence[str] | None = None,
    batches: Sequence[int] = (1,),
    strategy: str = "auto",
    threads: int = 1,
    rounds: int = 20,
    memory: bool = True,
    processor_time: bool = False,
    out: Path | None = None,
    allow_factory: bool = False,
) -> BenchReport:
    """Measure networks side by side.

    Args:
        names: Models as `build_model` takes them, folders of checkpoints, or `recipe:NAME`; the others are compared to
            the first.
        plan_file: Adds the first network, converted by this plan.
        input_shape: Shape of the input; default (1, 3, 224, 224), for a checkpoint that of its images.
        runtimes: As for `epitorch.bench.bench`, and so all that follow.
        batches: See there.
        strategy: See there.
        threads: See there.
        rounds: See there.
        memory: See there.
        processor_time: See there.
        out: Write the report to this JSON file.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: If there is no such model, or an argument is not valid.
    """
    _check_bench(names, out)
    built = {name: _named_network(name, allow_factory) for name in names}
    models = {name: model for name, (model, _) in built.items()}
    shape = input_shape or built[names[0]][1]
    if plan_file is not None:
        converted = copy.deepcopy(models[names[0]])
        convert_(converted, Plan.load(plan_file))
        models[f"{names[0]} by {plan_file}"] = converted
    chosen: Any = runtimes, strategy  # checked there
    report = bench(
        models,
        torch.randn(shape, generator=torch.Generator().manual_seed(0)),
        runtimes=chosen[0],
        batches=batches,
        strategy=chosen[1],
        threads=threads,
        rounds=rounds,
        memory=memory,
        processor_time=processor_time,
    )
    if out is not None:
        write_atomic(out, (json.dumps(report.to_dict(), indent=1) + "\n").encode())
    return report


def _check_bench(names: Sequence[str], out: Path | None) -> None:
    """Before anything is measured."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(explain("a network is named twice", expected="each once", got=twice[0]))
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        got = "a folder" if out.is_dir() else f"no folder '{out.parent}'"
        raise InputError(
            explain("the report has no place", expected="a file in a folder that exists", got=got, where=str(out))
        )


def _named_network(name: str, allow_factory: bool) -> tuple[nn.Module, tuple[int, ...]]:
    if not name.startswith("recipe:"):
        return named_model(name, allow_factory)
    from epitorch.training.recipe import load_recipe
    from epitorch.training.starting import first_model

    recipe = load_recipe(name.removeprefix("recipe:"))
    size = 224 if recipe.images is None else recipe.images.size
    shape = (1, 3, size, size)
    with torch.random.fork_rng(devices=[]):
        return first_model(recipe, torch.zeros(shape)).model, shape
