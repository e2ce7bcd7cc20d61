"""The command line's arguments."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from epitorch import __version__, _help
from epitorch._arguments import amount, at_least_1, folder, names, seed, seeds, share, sizes


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; `command` names the one that was given."""
    made = _described(argparse.ArgumentParser, _help.MAIN, prog="epitorch")
    made.add_argument("--version", action="version", version=f"epitorch {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_demo, _add_plan, _add_convert, _add_train, _add_eval, _add_count, _add_bench, _add_export):
        add(commands)
    for add in (_add_deploy, _add_sweep, _add_reproduce, _add_report, _add_push, _add_doctor, _add_completion):
        add(commands)
    return made


def _described(make: Any, text: str, **options: Any) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    description = textwrap.dedent(text).strip()
    return make(description=description, formatter_class=layout, **options)


def _add_demo(commands: Any) -> None:
    parser = _described(
        commands.add_parser, _help.DEMO, name="demo", help="train on handwritten digits, no data needed"
    )
    parser.add_argument("--out", type=folder, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="default: 0")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(command="demo")


def _add_train(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.TRAIN, name="train", help="train a recipe and measure the result")
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, or a name under recipes/")
    _add_data(parser)
    parser.add_argument("--out", type=folder, metavar="DIR", help="default: runs/RECIPE/seedN")
    parser.add_argument("--seed", type=int, metavar="N", help="default: the recipe's")
    parser.add_argument("--fold", type=int, metavar="N", help="sounds: fold to test on, default: the recipe's")
    parser.add_argument("--max-steps", type=int, metavar="N", help="at most so many steps, for a trial")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in --out, begin anew")
    _add_device(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="processes per machine; default: 1, or torchrun's")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines; default: 1, or torchrun's")
    parser.add_argument(
        "--logger",
        action="append",
        metavar="NAME",
        help="csv | tensorboard | wandb | mlflow | comet, may be repeated; default: csv and tensorboard",
    )
    parser.add_argument(
        "--checkpoint-steps",
        type=int,
        metavar="N",
        help="save the state of training so often; default: every 10 minutes",
    )
    _add_workers(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(command="train")


def _add_eval(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.EVAL, name="eval", help="measure a checkpoint on the test images")
    parser.add_argument("checkpoint", type=folder, metavar="CHECKPOINT", help="its folder, or the run's")
    _add_data(parser)
    parser.add_argument("--split", default="test", metavar="NAME", help="default: test")
    _add_device(parser)
    _add_workers(parser)
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(command="eval")


def _add_count(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.COUNT, name="count", help="parameters and multiply-adds of a model")
    parser.add_argument("model", metavar="MODEL", help="a model's name, or a checkpoint's folder")
    parser.add_argument(
        "--input",
        type=sizes,
        metavar="N,C,H,W",
        help="shape of the input; default 1,3,224,224, for a checkpoint that of its images",
    )
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(command="count")


def _add_plan(commands: Any) -> None:
    parser = _described(
        commands.add_parser, _help.PLAN, name="plan", help="choose an epitome for every layer by a budget"
    )
    parser.add_argument("model", metavar="MODEL", help="a model's name, or a checkpoint's folder")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--params", type=amount, metavar="N", help="at most so many parameters, such as 2.1M")
    budget.add_argument("--madds", type=amount, metavar="N", help="at most so many multiply-adds per sample")
    budget.add_argument("--ratio", type=float, metavar="R", help="so many times fewer parameters")
    parser.add_argument("--input", type=sizes, metavar="N,C,H,W", help="shape of the input; default 1,3,224,224")
    parser.add_argument(
        "--policy", default="uniform", help="uniform | positions | front_heavy | sensitivity; default: uniform"
    )
    parser.add_argument("--form", default="auto", help="auto | separable | grid | fine | partial; default: auto")
    parser.add_argument("--axes", default="auto", help="channel axes: auto | out | in | both; default: auto")
    parser.add_argument("--index", default="learner", help="learner | direct | fixed; default: learner")
    parser.add_argument("--align", type=int, default=1, metavar="N", help="epitome channels in multiples of N")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PAT", help="layers to leave, such as 'layer4.*'")
    parser.add_argument("--only", nargs="+", default=[], metavar="PAT", help="leave all layers but these")
    parser.add_argument("--depthwise", action="store_true", help="compress depthwise convolutions too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="plan.yaml or plan.json")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(command="plan")


def _add_convert(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.CONVERT, name="convert", help="write a model converted by a plan")
    parser.add_argument("model", metavar="MODEL", help="a model's name, or the checkpoint folder of a dense one")
    parser.add_argument("--plan", type=Path, required=True, metavar="FILE", help="what `epitorch plan` wrote")
    parser.add_argument("--out", type=folder, required=True, metavar="DIR", help="folder of the checkpoint")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the fresh weights; default: 0")
    parser.add_argument(
        "--init",
        choices=("fresh", "least_squares"),
        default="fresh",
        help="least_squares: the epitomes nearest to the model's weights; default: fresh",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion in --out")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(command="convert")


def _add_export(commands: Any) -> None:
    parser = _described(
        commands.add_parser, _help.EXPORT, name="export", help="write a checkpoint's network for another runtime"
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder, or the run's")
    parser.add_argument("--to", default="onnx", help="onnx | openvino | pt2 | executorch; default: onnx")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .onnx, .xml, .pt2 or .pte")
    parser.add_argument("--strategy", help="reuse | size | dense; default: reuse, with --int8 size")
    parser.add_argument("--dynamic", help="batch | all | none; default: batch (executorch: none)")
    parser.add_argument("--opset", type=int, metavar="N", help="of ONNX; default: 20")
    parser.add_argument("--fp16", action="store_true", help="openvino: store weights in 16 bits")
    parser.add_argument("--compiled", action="store_true", help="pt2: compile for this machine")
    parser.add_argument("--data", metavar="PATH", help="compare on test images from this folder, or the word digits")
    parser.add_argument("--input", type=sizes, metavar="N,C,H,W", help="shape of the example; default: one image")
    parser.add_argument("--int8", action="store_true", help="onnx, openvino: weights and activations in 8 bits")
    parser.add_argument("--calibration", metavar="PATH", help="int8: the training data, or the word digits")
    parser.add_argument(
        "--calibration-images", type=at_least_1, metavar="N", help="int8: held-out training images; default: 128"
    )
    parser.add_argument("--seed", type=seed, metavar="N", help="int8: which of them; default: 0")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(command="export")


def _add_deploy(commands: Any) -> None:
    parser = _described(
        commands.add_parser, _help.DEPLOY, name="deploy", help="find the fastest way to run a checkpoint here"
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder, or the run's")
    parser.add_argument("--runtime", default="torch", help="torch | onnxruntime | openvino; default: torch")
    parser.add_argument("--objective", default="latency", help="latency | size; default: latency")
    parser.add_argument("--out", type=Path, metavar="FILE", help="ends in .pt2, .onnx or .xml, as the runtime wants")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was measured as JSON")
    parser.add_argument("--no-measure", action="store_true", help="decide by a model of the cost")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the runtime; default: 1")
    parser.add_argument("--data", metavar="PATH", help="compare on test images from this folder, or the word digits")
    parser.add_argument("--input", type=sizes, metavar="N,C,H,W", help="shape of the example; default: one image")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(command="deploy")


def _add_doctor(commands: Any) -> None:
    parser = _described(
        commands.add_parser, _help.DOCTOR, name="doctor", help="versions, runtimes, threads, GPUs: what is here"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(command="doctor")


def _add_completion(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.COMPLETION, name="completion", help="completion script for a shell")
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.set_defaults(command="completion")


def _add_bench(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.BENCH, name="bench", help="time networks side by side")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names, checkpoints, or recipe:NAME")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="add the first network, converted by this plan")
    parser.add_argument("--input", type=sizes, metavar="N,C,H,W", help="shape of the input; default 1,3,224,224")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], metavar="N", help="batch sizes; default: 1")
    parser.add_argument("--runtime", nargs="+", help="torch | onnxruntime | openvino; default: those installed")
    parser.add_argument("--strategy", default="auto", help="auto | reuse | dense; default: auto")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of every runtime; default: 1")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--processor-time", action="store_true", help="not the wall's clock: for a busy machine")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(command="bench")


def _add_sweep(commands: Any) -> None:
    parser = _described(
        commands.add_parser,
        _help.SWEEP,
        name="sweep",
        help="many runs: recipes, values, seeds, folds; and their summary",
    )
    parser.add_argument("sweep", type=folder, metavar="SWEEP", help="YAML file, or a name under sweeps/")
    _add_data(parser)
    parser.add_argument("--out", type=folder, metavar="DIR", help="default: runs/NAME")
    parser.add_argument(
        "--results", type=folder, metavar="DIR", help="of summary and copies of results; default: --out"
    )
    parser.add_argument("--seeds", type=seeds, metavar="N,N", help="in place of the file's")
    parser.add_argument("--folds", type=seeds, metavar="N,N", help="in place of the file's")
    parser.add_argument("--methods", type=names, metavar="A,B", help="only these")
    parser.add_argument("--max-steps", type=at_least_1, metavar="N", help="at most so many steps a run, for a trial")
    _add_resources(parser)
    parser.add_argument("--overwrite", action="store_true", help="begin runs anew whose recipe has changed")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(command="sweep")


def _add_reproduce(commands: Any) -> None:
    parser = _described(
        commands.add_parser,
        _help.REPRODUCE,
        name="reproduce",
        help="run a table of the paper, print it beside its numbers",
    )
    parser.add_argument("table", metavar="TABLE", help="YAML file, or a name under tables/")
    _add_data(parser)
    parser.add_argument("--budget", default="smoke", help="smoke | short | full; default: smoke")
    parser.add_argument("--rows", type=names, metavar="A,B", help="only these")
    parser.add_argument("--seeds", type=at_least_1, default=1, metavar="N", help="how many, from 0; default: 1")
    parser.add_argument("--folds", type=seeds, metavar="N,N", help="sounds: default 1 with smoke, else 1,2,3,4,5")
    parser.add_argument("--out", type=folder, metavar="DIR", help="default: runs/reproduce/TABLE-BUDGET")
    _add_resources(parser)
    parser.add_argument("--overwrite", action="store_true", help="begin runs anew whose recipe has changed")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(command="reproduce")


def _add_report(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.REPORT, name="report", help="write one page on runs, with figures")
    parser.add_argument("runs", nargs="+", type=folder, metavar="RUN", help="folder of a run, or of several; or a file")
    out = Path("report.html")
    parser.add_argument("--out", type=folder, default=out, metavar="FILE", help="the page; default: report.html")
    parser.add_argument("--figures", type=folder, metavar="DIR", help="every figure as SVG and PNG")
    parser.add_argument("--tables", type=folder, metavar="DIR", help="every table as Markdown, CSV and LaTeX")
    parser.add_argument(
        "--bench", action="append", type=folder, default=[], metavar="FILE", help="what `epitorch bench --out` wrote"
    )
    parser.add_argument(
        "--deployment",
        action="append",
        type=folder,
        default=[],
        metavar="FILE",
        help="what `epitorch deploy --report` wrote; both may be repeated",
    )
    parser.add_argument("--dense", type=folder, metavar="DIR", help="checkpoint of the plain network, to compare with")
    parser.add_argument("--published", metavar="NAME", help="draw published results too: cifar10 | imagenet")
    parser.add_argument("--title", default="epitorch report", metavar="TEXT", help="of the page")
    parser.add_argument("--static", action="store_true", help="pictures only, without plotly's script of 4.8 MB")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the methods and the files as JSON")
    parser.set_defaults(command="report")


def _add_push(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.PUSH, name="push", help="publish a checkpoint on the Hub")
    parser.add_argument("checkpoint", type=folder, metavar="RUN", help="folder of a run or of a checkpoint")
    parser.add_argument("repo_id", metavar="REPO_ID", help="OWNER/NAME on the Hub")
    parser.add_argument("--dtype", help="of the stored epitomes: float32 | float16 | bfloat16 | int8; default: float32")
    parser.add_argument("--learner", action="store_true", help="with the index learner, to go on training")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="made if missing; default: main")
    parser.add_argument("--message", default="Upload by epitorch", metavar="TEXT", help="of the commit")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print what was published as JSON")
    parser.set_defaults(command="push")


def _add_resources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=at_least_1, metavar="N", help="runs at a time; default: as many as fit")
    parser.add_argument(
        "--cpus-per-run", type=at_least_1, metavar="N", help="threads of a run; default: 1, or cores / jobs"
    )
    parser.add_argument(
        "--gpus-per-run", type=share, metavar="N", help="0.5: two runs on each; default: 1 if there are any"
    )
    parser.add_argument(
        "--address", metavar="ADDR", help="of a Ray cluster (auto, ray://HOST:PORT); default: this machine"
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="PATH", help="folder of the images, or the word digits")


def _add_allow_factory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-factory", action="store_true", help="run the package.module:factory that a checkpoint names"
    )


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="large images: processes that read, for each that trains; default: by the cores, 0 reads in the process",
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accelerator", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one"
    )
