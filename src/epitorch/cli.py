"""The command line: arguments in, one function call, exit code out. No logic of its own.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C (after the checkpoint is written).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epitorch import __version__, _help
from epitorch._arguments import amount, folder, sizes
from epitorch.errors import InputError, MissingExtraError, explain

DEBUG = "EPITORCH_DEBUG"
_EXTRAS = {
    "models": ("torchvision", "timm"),
    "train": (
        "pytorch_lightning",
        "tensorboard",
        "rich",
        "yaml",
        "pyarrow",
        "PIL",
        "safetensors",
        "psutil",
        "filelock",
        "numpy",
    ),
    "demo": ("sklearn",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("openvino",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; default those of the process.

    Returns:
        The exit code.
    """
    try:
        arguments = _parser().parse_args(argv)
        if "run" not in arguments:
            _parser().print_help()
            return 0
        arguments.run(arguments)
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
    extra = next((name for name, packages in _EXTRAS.items() if package in packages), None)
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


# ---- arguments ----


def _parser() -> argparse.ArgumentParser:
    parser = _described(argparse.ArgumentParser, _help.MAIN, prog="epitorch")
    parser.add_argument("--version", action="version", version=f"epitorch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_train(commands)
    _add_eval(commands)
    _add_count(commands)
    _add_plan(commands)
    _add_convert(commands)
    _add_export(commands)
    return parser


def _described(make: Any, text: str, **options: Any) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    description = textwrap.dedent(text).strip()
    return make(description=description, formatter_class=layout, **options)


def _add_demo(commands: Any) -> None:
    parser = _described(
        commands.add_parser, _help.DEMO, name="demo", help="train on handwritten digits, no data needed"
    )
    parser.add_argument("--out", type=folder, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=_demo)


def _add_train(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.TRAIN, name="train", help="train a recipe and measure the result")
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, or a name under recipes/")
    _add_data(parser)
    parser.add_argument("--out", type=folder, metavar="DIR", help="default: runs/RECIPE/seedN")
    parser.add_argument("--seed", type=int, metavar="N", help="default: the recipe's")
    parser.add_argument("--max-steps", type=int, metavar="N", help="at most so many steps, for a trial")
    parser.add_argument("--overwrite", action="store_true", help="replace the results in --out")
    _add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_train)


def _add_eval(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.EVAL, name="eval", help="measure a checkpoint on the test images")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or the run's")
    _add_data(parser)
    parser.add_argument("--split", default="test", metavar="NAME", help="default: test")
    _add_device(parser)
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_eval)


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
    parser.set_defaults(run=_count)


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
    parser.add_argument("--policy", default="uniform", help="uniform | front_heavy | sensitivity; default: uniform")
    parser.add_argument("--form", default="auto", help="starts: auto | separable | grid | fine; default: auto")
    parser.add_argument("--axes", default="auto", help="channel axes: auto | out | in | both; default: auto")
    parser.add_argument("--index", default="learner", help="learner | direct | fixed; default: learner")
    parser.add_argument("--align", type=int, default=1, metavar="N", help="epitome channels in multiples of N")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PAT", help="layers to leave, such as 'layer4.*'")
    parser.add_argument("--only", nargs="+", default=[], metavar="PAT", help="leave all layers but these")
    parser.add_argument("--depthwise", action="store_true", help="compress depthwise convolutions too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="plan.yaml or plan.json")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=_plan)


def _add_convert(commands: Any) -> None:
    parser = _described(commands.add_parser, _help.CONVERT, name="convert", help="write a model converted by a plan")
    parser.add_argument("model", metavar="MODEL", help="a model's name, or the checkpoint folder of a dense one")
    parser.add_argument("--plan", type=Path, required=True, metavar="FILE", help="what `epitorch plan` wrote")
    parser.add_argument("--out", type=folder, required=True, metavar="DIR", help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the fresh weights; default: 0")
    parser.add_argument(
        "--init",
        choices=("fresh", "least_squares"),
        default="fresh",
        help="least_squares: the epitomes nearest to the model's weights; default: fresh",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion in --out")
    _add_allow_factory(parser)
    parser.set_defaults(run=_convert)


def _add_export(commands: Any) -> None:
    parser = _described(
        commands.add_parser, _help.EXPORT, name="export", help="write a checkpoint's network for another runtime"
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder, or the run's")
    parser.add_argument("--to", default="onnx", help="onnx | openvino | pt2 | executorch; default: onnx")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .onnx, .xml, .pt2 or .pte")
    parser.add_argument("--strategy", default="reuse", help="reuse | size | dense; default: reuse")
    parser.add_argument("--dynamic", help="batch | all | none; default: batch (executorch: none)")
    parser.add_argument("--opset", type=int, metavar="N", help="of ONNX; default: 20")
    parser.add_argument("--fp16", action="store_true", help="openvino: store weights in 16 bits")
    parser.add_argument("--compiled", action="store_true", help="pt2: compile for this machine")
    parser.add_argument("--data", metavar="PATH", help="compare on test images from this folder, or the word digits")
    parser.add_argument("--input", type=sizes, metavar="N,C,H,W", help="shape of the example; default: one image")
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_export)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="PATH", help="folder of the images, or the word digits")


def _add_allow_factory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-factory", action="store_true", help="run the package.module:factory that a checkpoint names"
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accelerator", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one"
    )


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
    from epitorch.training.recipe import load_recipe
    from epitorch.training.run import train

    recipe = load_recipe(arguments.recipe)
    seed = recipe.training.seed if arguments.seed is None else arguments.seed
    out = arguments.out or Path("runs") / recipe.name / f"seed{seed}"
    result = train(
        recipe,
        arguments.data,
        out,
        seed=arguments.seed,
        accelerator=arguments.accelerator,
        max_steps=arguments.max_steps,
        overwrite=arguments.overwrite,
    )
    if arguments.json:
        _print_json(result_to_json(result))
    else:
        print(results_table([result]))
        print(f"written to {out}")


def _eval(arguments: argparse.Namespace) -> None:
    from epitorch.training.evaluation import evaluate_checkpoint

    report = evaluate_checkpoint(
        arguments.checkpoint,
        arguments.data,
        split=arguments.split,
        accelerator=arguments.accelerator,
        allow_factory=arguments.allow_factory,
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


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))
