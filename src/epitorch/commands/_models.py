"""Planning, converting and counting what a name stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from epitorch.checkpoint import CheckpointConfig, load_checkpoint, save_checkpoint
from epitorch.conversion import ConversionReport, Init, convert_
from epitorch.cost import Cost, count, plan
from epitorch.cost.planning import Axes, Form, Index, Policy
from epitorch.errors import EpitorchError, InputError, explain
from epitorch.models.resolve import build_model
from epitorch.plans import Plan, check_suffix


def count_named(name: str, input_shape: tuple[int, ...] | None = None, *, allow_factory: bool = False) -> Cost:
    """Count the parameters and multiply-adds of a model or checkpoint.

    Args:
        name: A model as `build_model` takes it, or the folder of a checkpoint.
        input_shape: Shape of the input; default (1, 3, 224, 224), for a checkpoint that of its images.
        allow_factory: As for `load_checkpoint`.

    Raises:
        InputError: If there is no such model, or it does not take an input of this shape.
    """
    model, usual = named_model(name, allow_factory)
    shape = input_shape or usual
    with taking(name, shape):
        return count(model, torch.zeros(shape))


@contextmanager
def taking(name: str, shape: tuple[int, ...]) -> Iterator[None]:
    """What torch says of an input that does not fit, in the family's words.

    Raises:
        InputError: If the model does not take an input of this shape.
    """
    try:
        yield
    except EpitorchError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise InputError(
            explain(
                f"'{name}' does not take an input of shape {shape}",
                expected="an input that the model runs on",
                got=(str(error).splitlines() or [type(error).__name__])[0],
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
    model, usual = named_model(name, allow_factory)
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


def named_model(name: str, allow_factory: bool) -> tuple[nn.Module, tuple[int, ...]]:
    """The model, and the shape of its usual input."""
    if not Path(name).is_dir():
        with torch.random.fork_rng(devices=[]):
            return build_model(name), (1, 3, 224, 224)
    checkpoint = load_checkpoint(name, allow_factory=allow_factory)
    seen, planned = checkpoint.config.input, checkpoint.config.input_shape
    return checkpoint.model, (1, *seen.shape) if seen is not None else planned or (1, 3, 224, 224)
