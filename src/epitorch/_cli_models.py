"""The commands on models: each one function call, printed as text or JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from epitorch._parsers import parser
from epitorch.errors import EpitorchError, InputError, explain


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


def count_command(arguments: argparse.Namespace) -> None:
    from epitorch.commands import count_named

    cost = count_named(arguments.model, arguments.input, allow_factory=arguments.allow_factory)
    if arguments.json:
        print_json(cost.to_dict())
    else:
        print(cost)


def plan_command(arguments: argparse.Namespace) -> None:
    from epitorch.commands import plan_named
    from epitorch.plans import plan_to_data

    plan = plan_named(
        arguments.model,
        arguments.input,
        out=arguments.out,
        params=arguments.params,
        madds=arguments.madds,
        ratio=arguments.ratio,
        policy=arguments.policy,
        form=arguments.form,
        axes=arguments.axes,
        skip=arguments.skip,
        only=arguments.only,
        depthwise=arguments.depthwise,
        align=arguments.align,
        index=arguments.index,
        allow_factory=arguments.allow_factory,
    )
    if arguments.json:
        print_json(plan_to_data(plan))
        return
    print(plan)
    if arguments.out:
        print(f"written to {arguments.out}")


def convert_command(arguments: argparse.Namespace) -> None:
    from epitorch.commands import convert_named

    report = convert_named(
        arguments.model,
        arguments.plan,
        arguments.out,
        init=arguments.init,
        seed=arguments.seed,
        allow_factory=arguments.allow_factory,
        overwrite=arguments.overwrite,
    )
    if arguments.json:
        print_json(report.to_dict())
        return
    print(report)
    print(f"written to {arguments.out}")


def export_command(arguments: argparse.Namespace) -> None:
    from epitorch.commands import export_named

    if arguments.int8:
        _export_int8(arguments)
        return
    _refuse_int8_options(arguments)
    report = export_named(
        arguments.checkpoint,
        arguments.to,
        arguments.out,
        strategy=arguments.strategy or "reuse",
        dynamic=arguments.dynamic,
        opset=arguments.opset,
        compress_to_fp16=arguments.fp16,
        compiled=arguments.compiled,
        data=arguments.data,
        input_shape=arguments.input,
        allow_factory=arguments.allow_factory,
    )
    if arguments.json:
        print_json(report.to_dict())
    else:
        print(report)


def _export_int8(arguments: argparse.Namespace) -> None:
    from epitorch.commands import export_int8_named

    _check_int8_options(arguments)
    report, calibration = export_int8_named(
        arguments.checkpoint,
        arguments.to,
        arguments.out,
        arguments.calibration,
        images=arguments.calibration_images or 128,
        seed=arguments.seed or 0,
        strategy=arguments.strategy,
        dynamic=arguments.dynamic,
        opset=arguments.opset,
        allow_factory=arguments.allow_factory,
    )
    if arguments.json:
        print_json({**report.to_dict(), "calibration": calibration.to_dict()})
        return
    print(report)
    print(calibration)


def _check_int8_options(arguments: argparse.Namespace) -> None:
    for option in ("fp16", "compiled", "data", "input"):
        if getattr(arguments, option):
            expected = "an export in float, or --calibration for the images"
            raise InputError(explain(f"--{option} says nothing for int8", expected=expected, got="--int8"))


def _refuse_int8_options(arguments: argparse.Namespace) -> None:
    for option in ("calibration", "calibration_images", "seed"):
        if getattr(arguments, option) is not None:
            option = option.replace("_", "-")
            raise InputError(explain(f"--{option} is of int8 alone", expected="--int8 beside it", got="none"))


def deploy_command(arguments: argparse.Namespace) -> None:
    from epitorch.commands import deploy_named

    deployed, exported = deploy_named(
        arguments.checkpoint,
        arguments.runtime,
        objective=arguments.objective,
        out=arguments.out,
        report=arguments.report,
        measure=not arguments.no_measure,
        threads=arguments.threads,
        data=arguments.data,
        input_shape=arguments.input,
        allow_factory=arguments.allow_factory,
    )
    if arguments.json:
        print_json({"deployment": deployed.to_dict(), "export": exported and exported.to_dict()})
        return
    print(deployed)
    if exported is not None:
        print(exported)


def bench_command(arguments: argparse.Namespace) -> None:
    from epitorch.commands import bench_named

    report = bench_named(
        arguments.models,
        arguments.plan,
        input_shape=arguments.input,
        runtimes=arguments.runtime,
        batches=arguments.batch,
        strategy=arguments.strategy,
        threads=arguments.threads,
        rounds=arguments.rounds,
        memory=not arguments.no_memory,
        processor_time=arguments.processor_time,
        out=arguments.out,
        allow_factory=arguments.allow_factory,
    )
    if arguments.json:
        print_json(report.to_dict())
    else:
        print(report)
    if not report.rows:
        raise EpitorchError("nothing could be measured: " + "; ".join(report.failures))


def push_command(arguments: argparse.Namespace) -> None:
    from epitorch.checkpoint import push_checkpoint

    report = push_checkpoint(
        arguments.checkpoint,
        arguments.repo_id,
        dtype=arguments.dtype,
        learner=arguments.learner,
        private=arguments.private,
        revision=arguments.revision,
        message=arguments.message,
        allow_factory=arguments.allow_factory,
    )
    if arguments.json:
        print_json(report.to_dict())
    else:
        print(report)


def doctor_command(arguments: argparse.Namespace) -> None:
    from epitorch.doctor import diagnose

    found = diagnose()
    if arguments.json:
        print_json(found.to_dict())
    else:
        print(found)


def completion_command(arguments: argparse.Namespace) -> None:
    from epitorch.errors import require

    print(require("shtab", "train").complete(parser(), arguments.shell))
