"""One export: what all targets need of it."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from epitorch._inputs import ModelInput, input_metadata
from epitorch.cost._trace import quiet
from epitorch.errors import ExportError, explain
from epitorch.export._prepare import Arguments, Dynamic, ExportStrategy, dynamic_shapes, traced_arguments

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Job:
    """What is exported and how.

    Args:
        net: Deployed copy of the model.
        arguments: Example.
        strategy: How epitome layers run.
        dynamic: Axes that vary.
        opset: Of ONNX; None is the usual one.
        compress_to_fp16: OpenVINO stores float32 weights in 16 bits.
        input: Preprocessing and labels, where they are known.
    """

    net: nn.Module
    arguments: Arguments
    strategy: ExportStrategy
    dynamic: Dynamic
    opset: int | None
    compress_to_fp16: bool
    input: ModelInput | None = None

    def program(self) -> torch.export.ExportedProgram:
        """Trace the model.

        Raises:
            ExportError: If torch cannot trace it.
        """
        arguments = traced_arguments(self.arguments, self.dynamic)
        try:
            with quiet(self.net):
                return torch.export.export(
                    self.net, arguments, dynamic_shapes=dynamic_shapes(arguments, self.dynamic), strict=False
                )
        except Exception as error:
            raise ExportError(
                explain(
                    "torch.export cannot trace this model",
                    expected="a forward without branches on values, its batch on the first axis of every argument",
                    got=first_lines(error),
                    where=_where(self.net, error),
                    fix="if the batch or image size is fixed in the model, export with dynamic='none'",
                )
            ) from error

    def metadata(self) -> dict[str, str]:
        """What the file says of itself."""
        report: Any = getattr(self.net, "deployment", None)
        runs = Counter(layer.strategy for layer in report.layers) if report is not None else {}
        return {
            "epitorch_strategy": self.strategy,
            "epitorch_layers": ", ".join(f"{name} {count}" for name, count in sorted(runs.items())),
            "torch_version": torch.__version__,
            **input_metadata(self.input, self.arguments[0].shape[1:]),
        }


@contextmanager
def silent() -> Iterator[None]:
    """Keep warnings, logs and graphs of torch's and the runtimes' exporters off stderr: errors say what went wrong."""
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def first_lines(error: BaseException) -> str:
    """Kind and beginning of an error of torch's or a runtime's, and of the error that it comes from."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    said = _first_lines(error)
    return said if first is error else f"{said} (from {_first_lines(first)})"


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ".join(lines[:2])[:400]


def _where(net: nn.Module, error: BaseException) -> str | None:
    """The innermost module whose forward was running."""
    names = {id(module): name for name, module in net.named_modules()}
    found, step = None, error.__traceback__
    while step is not None:
        found = names.get(id(step.tb_frame.f_locals.get("self"))) or found
        step = step.tb_next
    return found
