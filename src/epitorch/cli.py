"""The command line: arguments in, one function call, exit code out. No logic of its own.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C (after the checkpoint is written).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epitorch._extras import extra_of
from epitorch._parsers import parser
from epitorch.errors import EpitorchError, InputError, MissingExtraError, explain

DEBUG = "EPITORCH_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; default those of the process.

    Returns:
        The exit code.
    """
    try:
        arguments = parser().parse_args(argv)
        if "command" not in arguments:
            parser().print_help()
            return 0
        _COMMANDS[arguments.command](arguments)
        return 0
    except KeyboardInterrupt:
        return _failed("stopped by Ctrl-C", 130)
    except BrokenPipeError:  # the reader of standard output has gone, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, MissingExtraError) as error:
        return _failed(str(error), 2)
    except ModuleNotFoundError as error:
        return _failed(*_missing(error))
    except OSError as error:
        return _failed(_refused(error), 1)
    except Exception as error:
        return _failed(str(error) or type(error).__name__, 1)


def _refused(error: OSError) -> str:
    return explain(
        "the system refused to read or write",
        expected="files that can be read, and a disk with room",
        got=error.strerror or error,
        where=str(error.filename) if error.filename else None,
    )


def _missing(error: ModuleNotFoundError) -> tuple[str, int]:
    """Message and exit code where a package is not installed: wrong input if it belongs to an extra."""
    package = (error.name or "").split(".")[0]
    extra = extra_of(package)
    if extra is None:
        return str(error), 1
    message = explain(
        f"'{package}' is needed here",
        expected=f"the optional dependencies '{extra}'",
        got="it is not installed",
        fix=f"pip install 'epitorch[{extra}]'",
    )
    return message, 2


def _failed(message: str, code: int) -> int:
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


# ---- commands ----


def _demo(arguments: argparse.Namespace) -> None:
    from epitorch.results import results_table, results_to_json
    from epitorch.training.demo import run_demo

    results = run_demo(arguments.out, seed=arguments.seed)
    if arguments.json:
        _print_json(results_to_json(results))
        return
    images = results[0].accuracy.test_images
    print(results_table(results))
    print(f"one run each (n = 1), seed {arguments.seed}; {images} test images, so one image is {100 / images:.2f}%")
    print(f"written to {arguments.out}")


def _train(arguments: argparse.Namespace) -> None:
    from epitorch.results import result_to_json, results_table
    from epitorch.training.loggers import DEFAULT
    from epitorch.training.processes import is_first
    from epitorch.training.recipe import load_recipe
    from epitorch.training.recipe_sound import with_fold
    from epitorch.training.run import train

    recipe = with_fold(load_recipe(arguments.recipe), arguments.fold)
    seed = recipe.training.seed if arguments.seed is None else arguments.seed
    fold = "" if recipe.sound is None else f"fold{recipe.sound.fold}-"
    out = arguments.out or Path("runs") / recipe.name / f"{fold}seed{seed}"
    result = train(
        recipe,
        arguments.data,
        out,
        seed=arguments.seed,
        accelerator=arguments.accelerator,
        max_steps=arguments.max_steps,
        overwrite=arguments.overwrite,
        devices=arguments.devices,
        nodes=arguments.nodes,
        loggers=arguments.logger or DEFAULT,
        checkpoint_steps=arguments.checkpoint_steps,
        workers=arguments.workers,
    )
    if not is_first():
        return
    if arguments.json:
        _print_json(result_to_json(result))
    else:
        print(results_table([result]))
        if result.accuracy.test is None:
            print("no split to test on: the held-out images stand in")
        print(f"written to {out}")


def _eval(arguments: argparse.Namespace) -> None:
    from epitorch.training.evaluation import evaluate_checkpoint

    report = evaluate_checkpoint(
        arguments.checkpoint,
        arguments.data,
        split=arguments.split,
        accelerator=arguments.accelerator,
        allow_factory=arguments.allow_factory,
        workers=arguments.workers,
    )
    if arguments.json:
        _print_json(report.to_json())
    else:
        print(report)


def _count(arguments: argparse.Namespace) -> None:
    from epitorch.commands import count_named

    cost = count_named(arguments.model, arguments.input, allow_factory=arguments.allow_factory)
    if arguments.json:
        _print_json(cost.to_dict())
    else:
        print(cost)


def _plan(arguments: argparse.Namespace) -> None:
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
        _print_json(plan_to_data(plan))
        return
    print(plan)
    if arguments.out:
        print(f"written to {arguments.out}")


def _convert(arguments: argparse.Namespace) -> None:
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
        _print_json(report.to_dict())
        return
    print(report)
    print(f"written to {arguments.out}")


def _export(arguments: argparse.Namespace) -> None:
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
        _print_json(report.to_dict())
    else:
        print(report)


def _deploy(arguments: argparse.Namespace) -> None:
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
        _print_json({"deployment": deployed.to_dict(), "export": exported and exported.to_dict()})
        return
    print(deployed)
    if exported is not None:
        print(exported)


def _bench(arguments: argparse.Namespace) -> None:
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
        _print_json(report.to_dict())
    else:
        print(report)
    if not report.rows:
        raise EpitorchError("nothing could be measured: " + "; ".join(report.failures))


def _sweep(arguments: argparse.Namespace) -> None:
    from epitorch.sweeps.file import load_sweep
    from epitorch.sweeps.runner import failure
    from epitorch.sweeps.summary import markdown
    from epitorch.sweeps.sweep import run_sweep

    sweep = load_sweep(arguments.sweep)
    report = run_sweep(
        sweep,
        arguments.data,
        arguments.out or Path("runs") / sweep.name,
        results=arguments.results,
        seeds=arguments.seeds,
        folds=arguments.folds,
        methods=arguments.methods,
        max_steps=arguments.max_steps,
        resources=_resources(arguments),
        overwrite=arguments.overwrite,
    )
    if arguments.json:
        _print_json(report.summary)
    else:
        print(markdown(report.summary))
        print(f"written to {report.folder}")
    if report.failed:
        raise failure(report.failed)


def _reproduce(arguments: argparse.Namespace) -> None:
    from epitorch.sweeps.reproduce import reproduce
    from epitorch.sweeps.runner import failure
    from epitorch.sweeps.tables import load_table

    table = load_table(arguments.table)
    report = reproduce(
        table,
        arguments.data,
        arguments.out or Path("runs/reproduce") / f"{table.name}-{arguments.budget}",
        effort=arguments.budget,
        rows=arguments.rows,
        seeds=arguments.seeds,
        folds=arguments.folds,
        resources=_resources(arguments),
        overwrite=arguments.overwrite,
    )
    if arguments.json:
        _print_json(report.data)
    else:
        print(report.text)
        print(f"written to {report.folder}")
    if report.failed:
        raise failure(report.failed)


def _doctor(arguments: argparse.Namespace) -> None:
    from epitorch.doctor import diagnose

    found = diagnose()
    if arguments.json:
        _print_json(found.to_dict())
    else:
        print(found)


def _completion(arguments: argparse.Namespace) -> None:
    from epitorch.errors import require

    print(require("shtab", "train").complete(parser(), arguments.shell))


def _report(arguments: argparse.Namespace) -> None:
    from epitorch.report import load_deployment, report

    made = report(
        arguments.runs,
        arguments.out,
        figures=arguments.figures,
        tables=arguments.tables,
        bench=arguments.bench,
        deployments=[load_deployment(path) for path in arguments.deployment],
        dense=arguments.dense,
        published=arguments.published,
        allow_factory=arguments.allow_factory,
        interactive=not arguments.static,
        title=arguments.title,
    )
    if arguments.json:
        _print_json(made.to_dict())
    else:
        print(made)


def _resources(arguments: argparse.Namespace) -> Any:
    from epitorch.sweeps.cluster import Resources

    return Resources(arguments.jobs, arguments.cpus_per_run, arguments.gpus_per_run, arguments.address)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


def _push(arguments: argparse.Namespace) -> None:
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
        _print_json(report.to_dict())
    else:
        print(report)


_COMMANDS = {
    "demo": _demo,
    "train": _train,
    "eval": _eval,
    "count": _count,
    "plan": _plan,
    "convert": _convert,
    "export": _export,
    "deploy": _deploy,
    "bench": _bench,
    "sweep": _sweep,
    "reproduce": _reproduce,
    "doctor": _doctor,
    "completion": _completion,
    "report": _report,
    "push": _push,
}
