"""What is exported: a deployed copy in eval mode, its arguments, which of their axes vary, and inputs to check with."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from epitorch.cost._trace import as_arguments, epitome_layers, eval_copy, quiet, tensors
from epitorch.deploy import deploy_as
from epitorch.deploy.reuse import ReuseLayer
from epitorch.errors import InputError, explain
from epitorch.export._generate import GeneratedWeight

ExportStrategy = Literal["dense", "reuse", "size"]
Dynamic = Literal["batch", "all", "none"]
Arguments = tuple[Tensor, ...]


def tensor_arguments(example_input: Any, name: str = "example_input") -> Arguments:
    """The model's arguments, copied to the CPU; only tensors have a place in an exported file."""
    arguments = as_arguments(example_input)
    if not arguments or not all(isinstance(value, Tensor) and value.dim() > 0 for value in arguments):
        raise InputError(
            explain(
                f"{name} cannot be exported",
                expected="a tensor with at least one axis, or a tuple of such tensors",
                got=", ".join(type(value).__name__ for value in arguments) or "nothing",
                fix="wrap the model in a module whose forward takes tensors only",
            )
        )
    return tuple(value.cpu() for value in arguments)


def deployed(model: nn.Module, arguments: Arguments, strategy: ExportStrategy) -> nn.Module:
    """A copy for inference on the CPU.

    A model with epitome layers is deployed; one without is taken as it is. Under "size" no kernel and no dense weight
    made from an epitome is kept: the graph makes it.
    """
    trained = eval_copy(model).cpu()
    flat_output(trained, arguments)  # what does not run at all should fail with its own message
    net = trained
    if epitome_layers(trained):
        net = deploy_as(trained, arguments, "dense" if strategy == "dense" else "reuse")
    if strategy == "size":
        _generate_folded(net, trained)
        for layer in net.modules():
            if isinstance(layer, ReuseLayer):
                layer.kernel, layer.generates = None, True
    return net.requires_grad_(False)


def _generate_folded(net: Any, trained: nn.Module) -> None:
    """Give folded layers their epitome back."""
    report = getattr(net, "deployment", None)
    if report is None or net is trained:
        return
    for entry in report.folded:
        layer, dense = trained.get_submodule(entry.name), net.get_submodule(entry.name)
        if layer is not dense and not parametrize.is_parametrized(dense):
            parametrize.register_parametrization(dense, "weight", GeneratedWeight(layer))


# ---- axes that vary ----


def traced_arguments(arguments: Arguments, dynamic: Dynamic) -> Arguments:
    """Arguments to trace with: torch takes an axis of size 1 for a constant."""
    if dynamic == "none":
        return arguments
    return tuple(torch.cat([value, value]) if value.shape[0] == 1 else value for value in arguments)


def dynamic_shapes(arguments: Arguments, dynamic: Dynamic) -> tuple[dict[int, Any], ...] | None:
    """What `torch.export` takes: the batch is the first axis of every argument, space is what follows channels."""
    if dynamic == "none":
        return None
    batch = torch.export.Dim("batch")
    space = torch.export.Dim.DYNAMIC
    shapes: list[dict[int, Any]] = []
    for value in arguments:
        axes = range(2, value.dim()) if dynamic == "all" else range(0)
        shapes.append({0: batch, **dict.fromkeys(axes, space)})
    return tuple(shapes)


# ---- inputs to check with ----


def checked_inputs(example: Arguments, given: Any, dynamic: Dynamic) -> list[Arguments]:
    """The inputs on which the file must agree with torch: the given ones, else the example and another batch size."""
    if given is not None:
        inputs = [tensor_arguments(one, "check_inputs") for one in (given if isinstance(given, list) else [given])]
        if not inputs:
            raise InputError(explain("check_inputs is empty", expected="at least one input", got="[]"))
        return [one for each in inputs for one in _batches(each, dynamic)]
    return _batches(example, dynamic)


def _batches(arguments: Arguments, dynamic: Dynamic) -> list[Arguments]:
    if dynamic == "none":
        return [arguments]
    size = arguments[0].shape[0]
    other = 3 if size == 1 else 1
    return [arguments, tuple(_resized(value, other) for value in arguments)]


def _resized(value: Tensor, size: int) -> Tensor:
    """Another batch of the same kind: rows that are there, each moved along its last axis so that none are equal."""
    rows = [
        value[k % value.shape[0]].roll(k, -1) if value.dim() > 1 else value[k % value.shape[0]] for k in range(size)
    ]
    return torch.stack(rows)


def flat_output(net: nn.Module, arguments: Arguments) -> list[Tensor]:
    """What torch computes.

    Raises:
        InputError: If the model does not run on these arguments.
    """
    try:
        with quiet(net):
            return list(tensors(net(*as_arguments(arguments))))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shapes = [tuple(value.shape) for value in arguments]
        raise InputError(
            explain(
                f"the model does not run on inputs of shapes {shapes}",
                expected="example_input and check_inputs that the model takes, in every batch size",
                got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                fix="if the batch is fixed in the model, export with dynamic='none'",
            )
        ) from error
