"""The commands that train, and those on what was trained."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from epitorch._cli_models import print_json


def demo_command(arguments: argparse.Namespace) -> None:
    from epitorch.results import results_table, results_to_json
    from epitorch.training.demo import run_demo

    results = run_demo(arguments.out, seed=arguments.seed)
    if arguments.json:
        print_json(results_to_json(results))
        return
    images = results[0].accuracy.test_images
    print(results_table(results))
    print(f"one run each (n = 1), seed {arguments.seed}; {images} test images, so one image is {100 / images:.2f}%")
    print(f"written to {arguments.out}")


def train_command(arguments: argparse.Namespace) -> None:
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
        print_json(result_to_json(result))
    else:
        print(results_table([result]))
        if result.accuracy.test is None:
            print("no split to test on: the held-out images stand in")
        print(f"written to {out}")


def eval_command(arguments: argparse.Namespace) -> None:
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
        print_json(report.to_json())
    else:
        print(report)


def sweep_command(arguments: argparse.Namespace) -> None:
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
        print_json(report.summary)
    else:
        print(markdown(report.summary))
        print(f"written to {report.folder}")
    if report.failed:
        raise failure(report.failed)


def reproduce_command(arguments: argparse.Namespace) -> None:
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
        print_json(report.data)
    else:
        print(report.text)
        print(f"written to {report.folder}")
    if report.failed:
        raise failure(report.failed)


def _resources(arguments: argparse.Namespace) -> Any:
    from epitorch.sweeps.cluster import Resources

    return Resources(arguments.jobs, arguments.cpus_per_run, arguments.gpus_per_run, arguments.address)


def report_command(arguments: argparse.Namespace) -> None:
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
        print_json(made.to_dict())
    else:
        print(made)
