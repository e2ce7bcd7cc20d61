"""export(model): a file for another runtime, checked against torch before it appears under its name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from epitorch._inputs import ModelInput, noted_input
from epitorch.errors import EpitorchError, ExportError, InputError, check_is_model, explain, require, suggest
from epitorch.export._executorch import require_executorch, run_executorch, write_executorch
from epitorch.export._job import Job, first_lines, silent
from epitorch.export._onnx import check_opset, run_onnx, write_onnx
from epitorch.export._openvino import run_openvino, write_openvino
from epitorch.export._parity import compare
from epitorch.export._prepare import (
    Dynamic,
    ExportStrategy,
    deployed,
    flat_output,
    given_inputs,
    other_batch,
    other_size,
    tensor_arguments,
)
from epitorch.export._pt2 import require_compiler, run_compiled, run_pt2, write_compiled, write_pt2
from epitorch.nn import EpitomeLayer

TargetName = Literal["onnx", "openvino", "pt2", "executorch"]
Batches = list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Target:
    """A file format: its suffix, the packages it needs, who writes it and who runs it."""

    suffix: str
    extra: str
    packages: tuple[str, ...]
    write: Callable[[Job, Path], None]
    run: Callable[[Path, Batches], list[list[Tensor]]]


_ONNX = ("onnx", "onnxscript")
TARGETS: dict[str, Target] = {
    "onnx": Target(".onnx", "onnx", (*_ONNX, "onnxruntime"), write_onnx, run_onnx),
    "openvino": Target(".xml", "openvino", (*_ONNX, "openvino"), write_openvino, run_openvino),
    "pt2": Target(".pt2", "", (), write_pt2, run_pt2),
    "executorch": Target(".pte", "executorch", (), write_executorch, run_executorch),
}
_LARGE, _GRAPH = 1.1, 2**18  # a file above this share of the numbers, graph aside, holds dense weights
_COMPILED = Target(".pt2", "", (), write_compiled, run_compiled)


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Args:
        path: The file.
        target: Its format.
        strategy: How epitome layers run in it.
        dynamic: Axes that vary.
        bytes: Size, of both files for OpenVINO.
        difference: Largest difference to torch over all checked inputs, over the largest output.
        checked: Shapes of the inputs that were compared, of the first argument.
        trained_bytes: Of the numbers that the trained model keeps, learners not among them; None for a model without
            epitome layers, such as a deployed one.
    """

    path: str
    target: str
    strategy: str
    dynamic: str
    bytes: int
    difference: float
    checked: tuple[tuple[int, ...], ...]
    trained_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        shapes = ", ".join(str(shape) for shape in self.checked)
        lines = [
            f"{self.path}: {self.target}, {self.bytes:,} bytes, strategy {self.strategy}",
            f"difference to torch {self.difference:.1e} on inputs of shapes {shapes}",
        ]
        if self.strategy != "size" and self.trained_bytes and self.bytes > _LARGE * self.trained_bytes + _GRAPH:
            lines.append(
                f"the trained model is about {self.trained_bytes:,} bytes; the file holds dense weights of layers that "
                "are not reused: strategy size stores their epitomes instead"
            )
        return "\n".join(lines)


def export(
    net_or_model: nn.Module,
    example_input: Tensor | tuple[Tensor, ...],
    to: TargetName = "onnx",
    out: str | Path | None = None,
    *,
    strategy: ExportStrategy = "reuse",
    dynamic: Dynamic | None = None,
    check_inputs: Tensor | tuple[Tensor, ...] | list[Any] | None = None,
    opset: int | None = None,
    compress_to_fp16: bool = False,
    compiled: bool = False,
    input: ModelInput | None = None,
) -> ExportReport:
    """Write a model for another runtime and check the file there against torch.

    A model with epitome layers is deployed first; a deployed one is taken as it is. The file is written under another
    name, run in its runtime on the CPU, compared with torch, and only then moved to `out`, in one step.

    Args:
        net_or_model: The trained or deployed model; it stays as it is. It is exported from the CPU, in eval mode.
        example_input: A tensor, or a tuple of the model's arguments, tensors all.
        to: "onnx", "openvino" (.xml and .bin), "pt2" (`torch.export`) or "executorch" (.pte, XNNPACK).
        out: The file, with the suffix of its format; its folder must exist, an older file is replaced.
        strategy: "reuse" or "dense" as for `deploy`; its "auto" is not here. "size" is "reuse" with every epitome
            stored once and nothing that is made from it: where "reuse" folds a layer, the graph makes the
            weight from the epitome. ONNX Runtime and OpenVINO do that once when they load the file;
            pt2 and ExecuTorch in every pass.
        dynamic: "batch": the first axis of every argument varies; "all": axes from the third on as well; "none".
            Default "batch", for ExecuTorch "none" (it plans its memory for one shape).
        check_inputs: Real inputs to compare on: one input, or a list of them. Default the example. Where the batch
            varies, each is compared in another batch size too; where image sizes vary and none of these inputs has
            another one than the example, the example is compared in another one, too.
        opset: Of ONNX, 18 to 23; default 20.
        compress_to_fp16: OpenVINO: store weights in 16 bits, which changes the numbers.
        compiled: pt2: compile an AOTInductor package for this machine (`torch._inductor.aoti_load_package` loads it)
            instead of a portable program (`torch.export.load`).
        input: Preprocessing and labels, which ONNX and OpenVINO files state (docs/howto/runtimes.md); default those of
            the checkpoint that the model was loaded from.

    Returns:
        Path, size, and the difference to torch.

    Raises:
        InputError: If an argument is wrong, or the folder of `out` is missing.
        MissingExtraError: If the format's packages are not installed.
        ExportError: If torch or the runtime does not take the model.
        ParityError: If the file computes something else. No file is left then.

    Example:
        >>> import torch
        >>> from epitorch.nn import EpitomeLinear
        >>> layer = EpitomeLinear(8, 64, epitome_shape=(8, 8))
        >>> export(layer, torch.randn(1, 8), "pt2", "/tmp/layer.pt2").checked
        ((1, 8), (3, 8))
    """
    check_is_model(net_or_model)
    path = checked_path(to, out)
    target = _COMPILED if compiled else TARGETS[to]
    dynamic = ("none" if to == "executorch" else "batch") if dynamic is None else dynamic
    _check_options(to, strategy, dynamic, opset, compress_to_fp16, compiled)
    _require(to, target, compiled)
    arguments = tensor_arguments(example_input)
    given = given_inputs(arguments, check_inputs)
    net = deployed(net_or_model, arguments, strategy)
    batches, expected = _checks(net, arguments, given, dynamic)
    known = _checked_input(input, arguments) or noted_input(net_or_model)
    job = Job(net, arguments, strategy, dynamic, opset, compress_to_fp16, known)
    with staging(path) as folder:
        staged = folder / path.name
        _written(job, target, staged)
        difference = _compared(target, staged, batches, expected, half=compress_to_fp16)
        size = published(folder, path)
    checked = tuple(tuple(batch[0].shape) for batch in batches)
    return ExportReport(str(path), to, strategy, dynamic, size, difference, checked, _trained_bytes(net_or_model))


def _trained_bytes(model: nn.Module) -> int | None:
    layers = [module for module in model.modules() if isinstance(module, EpitomeLayer)]
    if not layers:
        return None
    learners = {id(p) for layer in layers if layer.learner is not None for p in layer.learner.parameters()}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in learners)


@contextmanager
def staging(path: Path) -> Iterator[Path]:
    """A folder beside the file, gone afterwards; what the file system refuses is said with the path.

    Raises:
        InputError: If the folder of `path` cannot be written into.
        ExportError: If the file cannot be.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix=".epitorch.", dir=path.parent)
    except OSError as error:
        raise InputError(_refused(path, error)) from error
    with temporary as folder:
        try:
            yield Path(folder)
        except OSError as error:
            if isinstance(error, EpitorchError):
                raise
            raise ExportError(_refused(path, error)) from error


def _refused(path: Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return explain("the file cannot be written", expected="a place that can be written to", got=f"{reason}: {path}")


def _checks(
    net: nn.Module, example: tuple[Tensor, ...], given: Batches, dynamic: Dynamic
) -> tuple[Batches, list[list[Tensor]]]:
    """Inputs on which the file must agree with torch, and what torch computes there."""
    made = [] if dynamic == "none" else [other_batch(one) for one in given]
    sizes = other_size(net, example, given) if dynamic == "all" else []
    expected = [flat_output(net, one) for one in [*given, *sizes]]
    return [*given, *sizes, *made], [*expected, *(flat_output(net, one, derived=True) for one in made)]


def _written(job: Job, target: Target, staged: Path) -> None:
    try:
        with silent():
            target.write(job, staged)
    except (EpitorchError, OSError):
        raise
    except Exception as error:
        raise ExportError(
            explain(
                "this model cannot be written",
                expected=f"operators that the exporter to {target.suffix} knows",
                got=first_lines(error),
            )
        ) from error


def _compared(target: Target, staged: Path, batches: Batches, expected: Any, *, half: bool) -> float:
    try:
        with silent():
            got = target.run(staged, batches)
    except Exception as error:
        raise ExportError(
            explain(
                "the runtime does not run the exported file",
                expected=f"a file that runs on inputs of shapes {[tuple(one[0].shape) for one in batches]}",
                got=first_lines(error),
                fix="if the batch is fixed in the model, export with dynamic='none'; if a type has no kernel on the"
                " CPU, export model.float()",
            )
        ) from error
    triples = zip(expected, got, batches, strict=True)
    return max(compare(wanted, found, tuple(one[0].shape), half=half) for wanted, found, one in triples)


def published(folder: Path, path: Path) -> int:
    """Move the files that were written to where they belong, the named one last; their size."""
    files = sorted(folder.iterdir(), key=lambda file: file.name == path.name)
    size = 0
    for file in files:
        size += file.stat().st_size
        os.chmod(file, 0o644)
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(file, path.parent / file.name)
    return size


# ---- arguments ----


def checked_path(to: str, out: str | Path | None) -> Path:
    if not isinstance(to, str) or to not in TARGETS:
        expected = " | ".join(TARGETS)
        raise InputError(explain("to is not known", expected=expected, got=f"{to!r}{suggest(str(to), list(TARGETS))}"))
    suffix = TARGETS[to].suffix
    if not isinstance(out, str | Path) or Path(out).suffix != suffix or "\0" in str(out):
        expected, got = f"a file whose name ends in {suffix}", "None" if out is None else repr(out)
        raise InputError(explain("out is not a file of this format", expected=expected, got=got))
    path = Path(out)
    _check_names(path, [path, path.with_suffix(".bin")] if to == "openvino" else [path])
    if not path.parent.is_dir():
        raise InputError(
            explain(
                "the folder of the output is missing",
                expected="a folder that exists",
                got=str(path.parent),
                fix=f"mkdir -p {path.parent}",
            )
        )
    return path


def _check_names(path: Path, files: list[Path]) -> None:
    try:
        folders = [file for file in files if file.is_dir()]
    except OSError as error:  # such as a name that is too long
        raise InputError(_refused(path, error)) from error
    if folders:
        expected, got = "a file, new or old", f"a folder: {folders[0]}"
        raise InputError(explain("out is not a file", expected=expected, got=got, fix="give another name"))


def _check_options(
    to: str, strategy: str, dynamic: str, opset: int | None, compress_to_fp16: bool, compiled: bool
) -> None:
    for name, value, known in (("strategy", strategy, ExportStrategy), ("dynamic", dynamic, Dynamic)):
        words: Sequence[str] = get_args(known)
        if value not in words:
            got = f"{value!r}{suggest(str(value), list(words))}"
            raise InputError(explain(f"{name} is not known", expected=" | ".join(words), got=got))
    check_opset(opset)
    for name, given, owners in (
        ("opset", opset is not None, ("onnx", "openvino")),
        ("compress_to_fp16", compress_to_fp16, ("openvino",)),
        ("compiled", compiled, ("pt2",)),
    ):
        if given and to not in owners:
            raise InputError(
                explain(f"{name} says nothing for this format", expected=f"to={' or '.join(owners)}", got=f"to={to}")
            )
    if to == "executorch" and dynamic != "none":
        got = f"dynamic={dynamic}"
        raise InputError(explain("ExecuTorch plans memory for one shape", expected="dynamic=none", got=got))


def _checked_input(given: ModelInput | None, arguments: tuple[Tensor, ...]) -> ModelInput | None:
    if given is not None and tuple(given.shape[:1]) != tuple(arguments[0].shape[1:2]):
        expected, got = f"channels of an example of shape {tuple(arguments[0].shape)}", f"shape {given.shape}"
        raise InputError(explain("input is not what this model gets", expected=expected, got=got))
    return given


def _require(to: str, target: Target, compiled: bool) -> None:
    for package in target.packages:
        require(package, target.extra)
    if to == "executorch":
        require_executorch()
    if compiled:
        require_compiler()
