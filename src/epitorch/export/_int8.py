"""export_int8(model): a file with int8 weights and activations, calibrated on images, for ONNX Runtime or OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from epitorch._inputs import noted_input
from epitorch.deploy import ParityError
from epitorch.errors import EpitorchError, ExportError, InputError, check_is_model, explain, require, suggest
from epitorch.export._export import Batches, checked_path, published, staging
from epitorch.export._int8_onnx import write_int8_onnx
from epitorch.export._int8_openvino import write_int8_openvino
from epitorch.export._job import Job, first_lines, silent
from epitorch.export._onnx import check_opset, run_onnx
from epitorch.export._openvino import run_openvino
from epitorch.export._prepare import Dynamic, ExportStrategy, deployed, flat_output, tensor_arguments

Int8TargetName = Literal["onnx", "openvino"]
Items = list[tuple[Any, ...]]
FEWEST = 8  # ranges of activations that come from fewer inputs say little
_COMPARED = 32  # calibration inputs that are compared with torch
_WORST = 1.0  # an error as large as the output itself


@dataclass(frozen=True)
class _Target:
    packages: tuple[tuple[str, str], ...]
    write: Callable[[Job, Path, Items], tuple[str, ...]]
    run: Callable[[Path, Batches], list[list[Tensor]]]


_ONNX = (("onnx", "onnx"), ("onnxscript", "onnx"), ("onnxruntime", "onnx"))
_TARGETS: dict[str, _Target] = {
    "onnx": _Target(_ONNX, write_int8_onnx, run_onnx),
    "openvino": _Target((*_ONNX, ("openvino", "openvino"), ("nncf", "int8")), write_int8_openvino, run_openvino),
}


@dataclass(frozen=True)
class Int8Report:
    """What was written.

    Args:
        path: The file.
        target: Its format.
        strategy: How epitome layers run in it.
        dynamic: Axes that vary.
        bytes: Size, of both files for OpenVINO.
        images: Inputs that were calibrated on.
        compared: Of these, how many were compared with torch.
        error: There: norm of the difference to torch over the norm of torch's output, median over batches (of two the
            larger; batches for which both say zero do not count).
        agreement: There: share whose largest output is torch's; None where the model does not return one row per input.
        float_weights: Weights of convolutions and linear layers that were left in float.
    """

    path: str
    target: str
    strategy: str
    dynamic: str
    bytes: int
    images: int
    compared: int
    error: float
    agreement: float | None
    float_weights: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.target} in int8, {self.bytes:,} bytes, strategy {self.strategy}",
            f"calibrated on {self.images} inputs; relative error of the output on {self.compared}: {self.error:.3f}",
        ]
        if self.agreement is not None:
            lines.append(f"the same class as torch on {100 * self.agreement:.1f}% of them")
        if self.float_weights:
            lines.append(f"left in float: {', '.join(self.float_weights)}")
        return "\n".join(lines)


def export_int8(
    net_or_model: nn.Module,
    example_input: Tensor | tuple[Tensor, ...],
    calibration: Tensor | tuple[Tensor, ...],
    to: Int8TargetName = "onnx",
    out: str | Path | None = None,
    *,
    strategy: ExportStrategy = "size",
    dynamic: Dynamic = "batch",
    opset: int | None = None,
) -> Int8Report:
    """Write a model with int8 weights and activations: post-training static quantisation.

    ONNX files come from ONNX Runtime's `quantize_static`, OpenVINO's from NNCF. Weights are symmetric with a scale for
    each output channel, activations have one scale each. The file is written under another name, run in its runtime on
    the CPU, compared with torch on calibration inputs, and only then moved to `out`.

    Args:
        net_or_model: As for `export`.
        example_input: As for `export`.
        calibration: Inputs to take the ranges of activations from, stacked along the first axis, at least 8; a tuple
            for a model of several arguments. Preprocessed as the model wants them, of the training distribution, not
            test images. They are fed in batches of the example's size.
        to: "onnx" or "openvino" (.xml and .bin).
        out: As for `export`.
        strategy: "size": each epitome is stored once, in int8 with a scale for each row; when the file is loaded, the
            runtime makes the weights, rounds them with a scale for each output channel, and runs plain int8 kernels.
            "dense": the int8 weights are stored instead. "reuse": convolve with the epitome in int8, mix channels in
            float (see docs/howto/int8.md: seldom the fastest).
        dynamic: As for `export`.
        opset: As for `export`.

    Returns:
        Path, size, and how far the outputs are from torch's.

    Raises:
        InputError: If an argument is wrong, or there are too few calibration inputs.
        MissingExtraError: If the packages are not installed.
        ExportError: If torch, the quantiser or the runtime does not take the model, or nothing in it can be quantised.
        ParityError: If the error is as large as the output. No file is left then.

    Example:
        >>> from epitorch.export import export_int8
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        >>> images = torch.rand(16, 3, 8, 8)
        >>> export_int8(net, images[:1], images, "onnx", "/tmp/net.onnx").images
        16
    """
    check_is_model(net_or_model)
    path = checked_path(_known("to", to, Int8TargetName), out)
    _known("strategy", strategy, ExportStrategy)
    _known("dynamic", dynamic, Dynamic)
    check_opset(opset)
    target = _TARGETS[to]
    for package, extra in target.packages:
        require(package, extra)
    arguments = tensor_arguments(example_input)
    items = _items(arguments, tensor_arguments(calibration, "calibration"))
    net = deployed(net_or_model, arguments, strategy, fold_all=strategy == "size")
    compared = items[: max(1, _COMPARED // len(arguments[0]))]
    expected = [flat_output(net, one) for one in compared]
    _check_finite(expected)
    with staging(path) as folder:
        staged = folder / path.name
        job = Job(net, arguments, strategy, dynamic, opset, False, noted_input(net_or_model))
        float_weights = _written(target, job, staged, items)
        error, agreement = _compared(expected, _outputs(target, staged, compared))
        size = published(folder, path)
    n = len(arguments[0])
    counts = n * len(items), n * len(compared)
    return Int8Report(str(path), to, strategy, dynamic, size, *counts, error, agreement, float_weights)


def _known(name: str, value: str, words: Any) -> str:
    known: list[str] = list(get_args(words))
    if value not in known:
        got = f"{value!r}{suggest(str(value), known)}"
        raise InputError(explain(f"{name} is not known for int8", expected=" | ".join(known), got=got))
    return value


def _items(example: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> Batches:
    """Calibration inputs in batches of the example's size, a rest left out."""
    if [(value.shape[1:], value.dtype) for value in given] != [(value.shape[1:], value.dtype) for value in example]:
        told = [", ".join(f"{tuple(v.shape)} {v.dtype}" for v in values) for values in (example, given)]
        raise InputError(
            explain(
                "calibration inputs are not like the example",
                expected=f"{told[0]}, but for the first axis",
                got=told[1],
                fix="prepare them as the model wants them: its dtype, mean and standard deviation",
            )
        )
    size, number = len(example[0]), len(given[0])
    _check_numbers(given)
    if number < max(FEWEST, size):
        raise InputError(
            explain(
                "too few inputs to calibrate on",
                expected=f"at least {max(FEWEST, size)}, better a few hundred",
                got=number,
                fix="give more images; their ranges become the scales of the activations",
            )
        )
    _check_values(given)
    return [tuple(value[k : k + size] for value in given) for k in range(0, number - size + 1, size)]


def _check_numbers(given: tuple[Tensor, ...]) -> None:
    """Raise InputError unless all arguments have as many inputs."""
    if len({len(value) for value in given}) > 1:
        got = " and ".join(str(len(value)) for value in given)
        raise InputError(
            explain("arguments differ in their number of calibration inputs", expected="as many of each", got=got)
        )


def _check_values(given: tuple[Tensor, ...]) -> None:
    """Raise InputError unless all values are finite, and inputs are not all the same."""
    if all(bool((value == value[:1]).all()) for value in given):
        got = f"the same one {len(given[0])} times"
        raise InputError(explain("calibration inputs say nothing of ranges", expected="different ones", got=got))
    for place, value in enumerate(given):
        wrong = (~torch.isfinite(value.flatten(1) if value.dim() > 1 else value[:, None])).any(1).nonzero().flatten()
        if len(wrong):
            raise InputError(
                explain(
                    "a calibration input is not finite",
                    expected="numbers: ranges of activations are taken from them",
                    got=f"NaN or infinity in {len(wrong)} of {len(value)}",
                    where=f"argument {place}, input {int(wrong[0])}",
                )
            )


def _check_finite(expected: list[list[Tensor]]) -> None:
    wrong = sum(not all(bool(torch.isfinite(value).all()) for value in outputs) for outputs in expected)
    if wrong:
        raise InputError(
            explain(
                "the model's own output is not finite: there is nothing to compare an int8 file with",
                expected="numbers from torch for every calibration input",
                got=f"NaN or infinity in {wrong} of {len(expected)} batches",
                fix="look for the cause in the model: a layer that divides by zero, a checkpoint that diverged",
            )
        )


def _written(target: _Target, job: Job, staged: Path, items: Batches) -> tuple[str, ...]:
    try:
        with silent():
            return target.write(job, staged, [tuple(value.numpy() for value in item) for item in items])
    except (EpitorchError, OSError):
        raise
    except Exception as error:
        raise ExportError(
            explain(
                "this model cannot be quantised",
                expected="operators that the quantiser knows",
                got=first_lines(error),
                fix="export it in float: epitorch.export",
            )
        ) from error


def _outputs(target: _Target, staged: Path, batches: Batches) -> list[list[Tensor]]:
    try:
        with silent():
            return target.run(staged, batches)
    except Exception as error:
        raise ExportError(
            explain("the runtime does not run the int8 file", expected="a file that runs", got=first_lines(error))
        ) from error


def _errors(expected: list[list[Tensor]], got: list[list[Tensor]]) -> Tensor:
    """Of each batch the norm of the difference over the norm of torch's output, all its outputs together.

    Where torch's output is zero, as after a ReLU, there is none, and the batch is left out if the file says zero too.
    """
    squares: list[list[Tensor]] = []
    for one, other in zip(expected, got, strict=True):
        pairs = [(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
        columns = zip(*((((a - b).square().sum(), a.square().sum()) for a, b in pairs)), strict=True)
        squares.append([torch.stack(column).sum() for column in columns])
    difference, size = torch.tensor(squares, dtype=torch.float64).unbind(1)
    known = (size != 0) | (difference != 0)
    if (size > 0).any():
        size = torch.where(size > 0, size, size[size > 0].median())
    return (difference / size).sqrt()[known]


def _middle(values: Tensor) -> float:
    """The median, of two the larger: with two batches one that is lost must show."""
    if torch.isnan(values).any():
        return float("nan")
    return float(values.sort().values[len(values) // 2]) if len(values) else 0.0


def _compared(expected: list[list[Tensor]], got: list[list[Tensor]]) -> tuple[float, float | None]:
    """Median relative error of a batch, and how often the largest entry of the first output's rows is the same."""
    # the median: one input with huge outputs would hide what becomes of all others
    error = _middle(_errors(expected, got))
    if not error < _WORST:
        raise ParityError(
            explain(
                "the int8 file does not compute what torch computes",
                expected=f"a relative error below {_WORST}",
                got=f"{error:.3f}",
                fix="calibrate on images like those that the model was trained on, preprocessed as for training",
            )
        )
    first = [(one[0], other[0]) for one, other in zip(expected, got, strict=True)]
    if any(a.dim() != 2 or a.shape[1] < 2 for a, _ in first):
        return error, None
    same = torch.cat([a.argmax(1) == b.argmax(1) for a, b in first])
    return error, float(same.float().mean())
