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

from epitorch import __version__
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
}

_MAIN = """
    Compress convolutional networks by generating their weights from small learned epitomes.

    examples:
      epitorch demo                                        train on handwritten digits, no data needed
      epitorch train cifar10-short/dense --data DIR        train a recipe on CIFAR-10
      epitorch count epitorch:mobilenetv2                  parameters and multiply-adds

    exit codes: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C.
    EPITORCH_DEBUG=1 shows where an error came from.
"""
_DEMO = """
    Train one small network on scikit-learn's handwritten digits (they come with scikit-learn: no network access) in
    three forms, dense, narrowed, and as epitomes within the narrowed one's parameters, and print what each reached.
    Takes about a minute on two cores.

    writes to --out (default runs/demo): results.json, and a folder for each run with its checkpoint, metrics and log.

    examples:
      epitorch demo
      epitorch demo --out /tmp/demo --seed 1
"""
_TRAIN = """
    Train what a recipe says and measure it: accuracy on the test images (read once, at the end) with the routing map
    and with the index learner, parameters, multiply-adds, time, memory.

    RECIPE is a YAML file, or a name under recipes/ such as cifar10-short/dense. --data is a folder of parquet files
    (train.parquet and test.parquet, or Hugging Face shards), the folder that torchvision's CIFAR10 writes, or the word
    `digits`.

    writes to --out (default runs/RECIPE/seedN): results.json, checkpoint/ (model.safetensors and config.json, what
    `epitorch eval` reads), lightning/last.ckpt (the state of training), logs/ (metrics.csv, TensorBoard events),
    train.log. After Ctrl-C the checkpoint is there too, and no results.json. Decoded images are cached under
    $EPITORCH_CACHE (default ~/.cache/epitorch; about 180 MB for CIFAR-10).

    CIFAR-10 itself: python -c "import torchvision; torchvision.datasets.CIFAR10('DIR', download=True)". The recipes
    under cifar10-short take half an hour to an hour each on one CPU core.

    examples:
      epitorch train digits/epitome --data digits
      epitorch train cifar10-short/epitome-0.18-learner --data DIR --seed 1 --out runs/epitome-1
"""
_EVAL = """
    Measure a checkpoint on the test images: accuracy with the routing map and, where the model has index learners in
    use, with the learner on the same batches. Writes nothing.

    CHECKPOINT is a folder with config.json and model.safetensors, or a run's folder.

    examples (after the ones of `epitorch train` and `epitorch demo`):
      epitorch eval runs/demo/epitome --data digits
      epitorch eval runs/digits/epitome/seed0/checkpoint --data digits --json
"""
_COUNT = """
    Count a model's parameters (epitomes, routing maps, all others) and multiply-adds, layer by layer and in total.
    Writes nothing.

    MODEL is epitorch:NAME, timm:NAME, torchvision:NAME or package.module:factory (which is called without arguments).
    Or give a checkpoint's folder: then the trained network is counted.

    examples:
      epitorch count torchvision:mobilenet_v2
      epitorch count epitorch:digits_cnn --input 1,1,8,8 --json
"""


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
    parser = _described(argparse.ArgumentParser, _MAIN, prog="epitorch")
    parser.add_argument("--version", action="version", version=f"epitorch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_train(commands)
    _add_eval(commands)
    _add_count(commands)
    return parser


def _described(make: Any, text: str, **options: Any) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    description = textwrap.dedent(text).strip()
    return make(description=description, formatter_class=layout, **options)


def _add_demo(commands: Any) -> None:
    parser = _described(commands.add_parser, _DEMO, name="demo", help="train on handwritten digits, no data needed")
    parser.add_argument("--out", type=_folder, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=_demo)


def _add_train(commands: Any) -> None:
    parser = _described(commands.add_parser, _TRAIN, name="train", help="train a recipe and measure the result")
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, or a name under recipes/")
    _add_data(parser)
    parser.add_argument("--out", type=_folder, metavar="DIR", help="default: runs/RECIPE/seedN")
    parser.add_argument("--seed", type=int, metavar="N", help="default: the recipe's")
    parser.add_argument("--max-steps", type=int, metavar="N", help="at most so many steps, for a trial")
    parser.add_argument("--overwrite", action="store_true", help="replace the results in --out")
    _add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_train)


def _add_eval(commands: Any) -> None:
    parser = _described(commands.add_parser, _EVAL, name="eval", help="measure a checkpoint on the test images")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or the run's")
    _add_data(parser)
    parser.add_argument("--split", default="test", metavar="NAME", help="default: test")
    _add_device(parser)
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_eval)


def _add_count(commands: Any) -> None:
    parser = _described(commands.add_parser, _COUNT, name="count", help="parameters and multiply-adds of a model")
    parser.add_argument("model", metavar="MODEL", help="a model's name, or a checkpoint's folder")
    parser.add_argument(
        "--input",
        type=_sizes,
        metavar="N,C,H,W",
        help="shape of the input; default 1,3,224,224, for a checkpoint that of its images",
    )
    _add_allow_factory(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_count)


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


def _folder(text: str) -> Path:
    if not text.strip():
        raise ValueError(text)
    return Path(text)


_folder.__name__ = "folder"


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if not sizes or min(sizes) < 1:
        raise ValueError(text)
    return sizes


_sizes.__name__ = "shape"  # argparse names it: "invalid shape value"


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


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))
