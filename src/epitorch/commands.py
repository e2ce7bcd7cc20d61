"""What the command line does with a model's name, as functions."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epitorch._files import write_atomic
from epitorch.bench import BenchReport, bench
from epitorch.checkpoint import CheckpointConfig, load_checkpoint, save_checkpoint
from epitorch.conversion import ConversionReport, Init, convert_
from epitorch.cost import Cost, count, plan
from epitorch.cost.planning import Axes, Form, Index, Policy
from epitorch.deploy.report import Deployment
from epitorch.errors import EpitorchError, InputError, explain
from epitorch.export import ExportReport, export
from epitorch.models.resolve import build_model
from epitorch.plans import Plan, check_suffix
from epitorch.tuning import deploy


def count_named(name: str, input_shape: tuple[int, ...] | None = None, *, allow_factory: bool = False) -> Cost:
    """Count the parameters and multiply-adds of a model or checkpoint.

    Args:
        name: A model as `build_model` takes it, or the folder of a checkpoint.
        input_shape: Shape of the input; default (1, 3, 224, 224), for a checkpoint that of its images.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: If there is no such model, or it does not take an input of this shape.
    """
    model, usual = _named_model(name, allow_factory)
    shape = input_shape or usual
    try:
        return count(model, torch.zeros(shape))
    except EpitorchError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise InputError(
            explain(
                f"'{name}' does not take an input of shape {shape}",
                expected="an input that the model runs on",
                got=str(error).splitlines()[0],
                fix="give its shape with --input, such as --input 1,1,8,8",
            )
        ) from error


def plan_named(
    name: str,
    input_shape: tuple[int, ...] | None = None,
    *,
    out: Path | None = None,
    params: int | None = None,
    madds: int | None = None,
    ratio: float | None = None,
    policy: Policy = "uniform",
    form: Form = "auto",
    axes: Axes = "auto",
    skip: Collection[str] = (),
    only: Collection[str] = (),
    depthwise: bool = False,
    align: int = 1,
    index: Index = "learner",
    allow_factory: bool = False,
) -> Plan:
    """Plan a model or checkpoint by name and write the plan.

    Args:
        name: As for `count_named`.
        input_shape: As for `count_named`.
        out: File of the plan, `.yaml` or `.json`; None writes nothing.
        params: As for `epitorch.plan`, and so all that follow.
        madds: See there.
        ratio: See there.
        policy: See there.
        form: See there.
        axes: See there.
        skip: See there.
        only: See there.
        depthwise: See there.
        align: See there.
        index: See there.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: As for `epitorch.plan`, or if there is no such model.
    """
    if out is not None:
        check_suffix(out)
    model, usual = _named_model(name, allow_factory)
    made = plan(
        model,
        torch.zeros(input_shape or usual),
        params=params,
        madds=madds,
        ratio=ratio,
        policy=policy,
        form=form,
        axes=axes,
        skip=skip,
        only=only,
        depthwise=depthwise,
        align=align,
        index=index,
    )
    if out is not None:
        made.save(out)
    return made


def convert_named(
    name: str,
    plan_file: Path,
    out: Path,
    *,
    init: Init = "fresh",
    seed: int = 0,
    allow_factory: bool = False,
    overwrite: bool = False,
) -> ConversionReport:
    """Build or load a model, convert it by a plan and write it as a checkpoint.

    Args:
        name: A model as `build_model` takes it, or the folder of a dense model's checkpoint.
        plan_file: What `Plan.save` wrote.
        out: Folder of the checkpoint; it is made if missing.
        init: As for `convert_`.
        seed: Of the fresh weights; the random generator is put back.
        allow_factory: Run the factory that a checkpoint names.
        overwrite: Replace what an earlier conversion wrote to the folder.

    Raises:
        InputError: If there is no such model, the plan is damaged or for another model, or the folder has files.
    """
    _refuse_used(name, out, overwrite)
    loaded = Plan.load(plan_file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if Path(name).is_dir():
            checkpoint = load_checkpoint(name, allow_factory=allow_factory)
            model, config = checkpoint.model, replace(checkpoint.config, plan=loaded)
            if checkpoint.config.plan is not None:
                raise InputError(
                    explain(
                        "this checkpoint is converted already",
                        expected="the checkpoint of a dense model",
                        got=name,
                    )
                )
        else:
            shape = None if loaded.budget is None else loaded.budget.input_shape
            model, config = build_model(name), CheckpointConfig(name, {}, loaded, None, None, input_shape=shape)
        report = convert_(model, loaded, init=init)
    save_checkpoint(out, model, config)
    return report


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
        check_inputs=None if data is None else _test_images(data, checkpoint.config, name, shape[0]),
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
        InputError: As for `epitorch.deploy` and `epitorch.export`, if there is no such checkpoint, or a file has no
            place. Nothing is measured then.
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
    images = None if data is None else _test_images(data, checkpoint.config, name, shape[0])
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    words: Any = runtime, objective, to  # checked there
    net: Any = deploy(
        checkpoint.model, example, "auto", runtime=words[0], objective=words[1], measure=measure, threads=threads
    )
    if report is not None:
        write_atomic(report, (json.dumps(net.deployment.to_dict(), indent=1) + "\n").encode())
    exported = None if out is None else export(net, example, words[2], out, check_inputs=images)
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


def _test_images(data: str, config: CheckpointConfig, name: str, number: int) -> Tensor:
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
        return _named_model(name, allow_factory)
    from epitorch.training.recipe import load_recipe
    from epitorch.training.starting import first_model

    recipe = load_recipe(name.removeprefix("recipe:"))
    size = 224 if recipe.images is None else recipe.images.size
    shape = (1, 3, size, size)
    with torch.random.fork_rng(devices=[]):
        return first_model(recipe, torch.zeros(shape)).model, shape


def _refuse_used(name: str, out: Path, overwrite: bool) -> None:
    """A conversion must not replace the weights it comes from, nor the files of a run."""
    source = Path(name).resolve()
    if Path(name).is_dir() and out.resolve() in (source, *source.parents, source / "checkpoint"):
        wrong = "the output would replace the model that is converted"
        raise InputError(explain(wrong, expected="another folder", got=str(out), where="--out"))
    used = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if used and not (overwrite and (out / "config.json").is_file()):
        raise InputError(
            explain(
                "this folder has files already",
                expected="a new or empty folder",
                got=str(out),
                where="--out",
                fix="choose another folder, or pass --overwrite to replace an earlier conversion",
            )
        )


def _named_model(name: str, allow_factory: bool) -> tuple[nn.Module, tuple[int, ...]]:
    """The model, and the shape of its usual input."""
    if not Path(name).is_dir():
        with torch.random.fork_rng(devices=[]):
            return build_model(name), (1, 3, 224, 224)
    checkpoint = load_checkpoint(name, allow_factory=allow_factory)
    seen, planned = checkpoint.config.input, checkpoint.config.input_shape
    return checkpoint.model, (1, *seen.shape) if seen is not None else planned or (1, 3, 224, 224)
