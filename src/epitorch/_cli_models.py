"""The commands on models: each one function call, printed as text or JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from epitorch._parsers import parser
from epitorch.errors import EpitorchError


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

    report = export_named(
        arguments.checkpoint,
        arguments.to,
        arguments.out,
        strategy=arguments.strategy,
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
