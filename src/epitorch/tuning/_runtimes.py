"""Run a network for inference in one of the runtimes: a call that can be timed, and the bytes that it is stored in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from epitorch.cost._trace import quiet
from epitorch.errors import InputError, explain, suggest
from epitorch.export import export, open_onnx, open_openvino

Runtime = Literal["torch", "onnxruntime", "openvino"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
_NEEDS = {"torch": ("torch",), "onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino", "onnx")}


@dataclass(frozen=True)
class Running:
    """A network that is ready to run.

    Args:
        call: One pass on the example.
        stored: Bytes of its file; for torch of its state.
        file: The file; None for torch.
    """

    call: Callable[[], object]
    stored: int
    file: Path | None = None


def check_runtime(runtime: object) -> None:
    """Refuse a runtime that is not known.

    Raises:
        InputError: If so.
    """
    if runtime not in RUNTIMES:
        hint = suggest(str(runtime), list(RUNTIMES))
        raise InputError(explain("runtime is not known", expected=" | ".join(RUNTIMES), got=f"{runtime!r}{hint}"))


def installed_runtimes() -> tuple[Runtime, ...]:
    """Those whose packages are there."""
    return tuple(name for name in RUNTIMES if all(find_spec(package) for package in _NEEDS[name]))


def runtime_version(runtime: Runtime) -> str:
    """Of its package."""
    return version(_NEEDS[runtime][0])


def load(
    net: nn.Module, arguments: tuple[Tensor, ...], runtime: Runtime, folder: Path, name: str, threads: int
) -> Running:
    """Make a network ready.

    Args:
        net: Deployed, or without epitomes; in eval mode, on the CPU.
        arguments: Example; every call runs on it.
        runtime: One of `RUNTIMES`.
        folder: Of the files.
        name: Of the file, without suffix.
        threads: Of the runtime's own pool. torch's is set for the whole process: see `epitorch.timing.torch_threads`.

    Raises:
        MissingExtraError: If the runtime is not installed.
        ExportError: If it does not take the network.
    """
    if runtime == "torch":
        return Running(_torch_call(*_own_copy(net, arguments)), _state_bytes(net))
    onnx = runtime == "onnxruntime"
    file = folder / f"{name}{'.onnx' if onnx else '.xml'}"
    report = export(net, arguments, "onnx" if onnx else "openvino", file, dynamic="none")
    run = (open_onnx if onnx else open_openvino)(file, threads)
    feeds = [value.numpy() for value in arguments]
    return Running(lambda: run(feeds), report.bytes, file)


def _own_copy(net: nn.Module, arguments: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """What is timed shares nothing with `net`: a forward may count its calls or write into its input.

    Images are laid out with channels last, in which torch's 2-D convolutions are fastest on a CPU.
    """
    with quiet(net):
        own, given = copy.deepcopy(net), copy.deepcopy(arguments)
        if any(isinstance(value, Tensor) and value.dim() == 4 for value in given):
            own = own.to(memory_format=torch.channels_last)
    return own, tuple(_moved(value) for value in given)


def _moved(value: Any) -> Any:
    image = isinstance(value, Tensor) and value.dim() == 4
    return value.to(memory_format=torch.channels_last) if image else value


def _torch_call(net: nn.Module, arguments: tuple[Any, ...]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():  # in inference mode a forward that takes gradients of its own would fail
            return net(*arguments)

    return call


def _state_bytes(net: nn.Module) -> int:
    tensors = {value.data_ptr(): value.numel() * value.element_size() for value in net.state_dict().values()}
    return sum(tensors.values())
