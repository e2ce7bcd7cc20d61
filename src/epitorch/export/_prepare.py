"""What is exported: a deployed copy in eval mode, its arguments, which of their axes vary, and inputs to check with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from epitorch.cost._trace import as_arguments, epitome_layers, eval_copy, quiet, tensors
from epitorch.deploy import deploy_as
from epitorch.deploy.reuse_layers import ReuseLayer
from epitorch.errors import EpitorchError, InputError, explain
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
                fix="stack inputs into one tensor for each argument; what else the model takes, give it in a module "
                "around it whose forward takes tensors only",
            )
        )
    if any(value.numel() == 0 for value in arguments):
        raise InputError(
            explain(
                f"{name} holds nothing",
                expected="at least one sample, and no axis of size 0",
                got=f"shapes {[tuple(value.shape) for value in arguments]}",
                fix="give a batch of one real input or more",
            )
        )
    return tuple(value.cpu() for value in arguments)


def deployed(model: nn.Module, arguments: Arguments, strategy: ExportStrategy, *, fold_all: bool = False) -> nn.Module:
    """A copy for inference on the CPU.

    A model with epitome layers is deployed; one without is taken as it is. Under "size" no kernel and no dense weight
    made from an epitome is kept: the graph makes it; with `fold_all` every layer runs with such a weight.
    """
    trained = eval_copy(model).cpu()
    flat_output(trained, arguments)  # what does not run at all should fail with its own message
    net = trained
    if epitome_layers(trained):
        net = deploy_as(trained, arguments, "dense" if fold_all or strategy == "dense" else "reuse")
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


def given_inputs(example: Arguments, given: Any) -> list[Arguments]:
    """The inputs to check with that the user gave, else the example."""
    if given is None:
        return [example]
    inputs = [tensor_arguments(one, "check_inputs") for one in (given if isinstance(given, list) else [given])]
    if not inputs:
        raise InputError(explain("check_inputs is empty", expected="at least one input", got="[]"))
    return inputs


def other_batch(arguments: Arguments) -> Arguments:
    """The same input in another batch size."""
    other = 3 if arguments[0].shape[0] == 1 else 1
    return tuple(_resized(value, other) for value in arguments)


def _resized(value: Tensor, size: int) -> Tensor:
    """Another batch of the same kind: rows that are there, each moved along its last axis so that none are equal."""
    rows = [
        value[k % value.shape[0]].roll(k, -1) if value.dim() > 1 else value[k % value.shape[0]] for k in range(size)
    ]
    return torch.stack(rows)


_SIZES: tuple[Callable[[int, int], int], ...] = (
    *(lambda axis, n: n + axis, lambda axis, n: n + 8, lambda axis, n: n + 32),  # the first makes no squares
    *(lambda axis, n: 2 * n, lambda axis, n: n + n // 2, lambda axis, n: n - 1, lambda axis, n: n // 2),
)


def other_size(net: nn.Module, example: Arguments, given: list[Arguments]) -> list[Arguments]:
    """The example in another image size that torch runs; nothing where the given inputs have one.

    Raises:
        InputError: If torch refuses every size that is tried.
    """
    axes = [(k, axis) for k, value in enumerate(example) for axis in range(2, value.dim())]
    if not axes or any(all(one[k].shape[a] != example[k].shape[a] for k, a in axes) for one in given):
        return []
    tried = []
    for size in _SIZES:
        other = tuple(_tiled(value, size) for value in example)
        try:
            flat_output(net, other)
            return [other]
        except InputError:
            tried.append(tuple(other[0].shape))
    raise InputError(
        explain(
            "the model runs in no other image size, so that dynamic='all' cannot be checked",
            expected="a model whose input may have another size",
            got=f"one that refuses {', '.join(map(str, tried))}",
            fix="give an input of another size as check_inputs, or export with dynamic='batch'",
        )
    )


def _tiled(value: Tensor, size: Callable[[int, int], int]) -> Tensor:
    """What is there, cut off or repeated along the axes from the third on."""
    for axis in range(2, value.dim()):
        n = value.shape[axis]
        value = value.index_select(axis, torch.arange(max(1, size(axis, n))) % n)
    return value


def flat_output(net: nn.Module, arguments: Arguments, *, derived: bool = False) -> list[Tensor]:
    """What torch computes.

    Args:
        net: The model.
        arguments: Its arguments.
        derived: They are another batch size of the user's.

    Raises:
        InputError: If the model does not run on these arguments, or returns something else than tensors.
    """
    try:
        with quiet(net):
            output = net(*as_arguments(arguments))
    except (EpitorchError, RuntimeError, ValueError, TypeError, IndexError) as error:
        shapes = [tuple(value.shape) for value in arguments]
        wanted = "example_input and check_inputs that the model takes"
        raise InputError(
            explain(
                f"the model does not run on inputs of shapes {shapes}",
                expected=f"{wanted}, in every batch size" if derived else wanted,
                got=_reason(error),
                fix="if the batch is fixed in the model, export with dynamic='none'" if derived else None,
            )
        ) from error
    _check_output(output)
    return list(tensors(output))


def _reason(error: Exception) -> str:
    """All that our own errors say, the first line of others."""
    if isinstance(error, EpitorchError):
        return "\n            ".join(str(error).splitlines())
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _check_output(output: Any) -> None:
    """A file has no place for numbers, strings or objects that a model returns beside its tensors."""
    others = sorted({type(leaf).__name__ for leaf in _leaves(output) if leaf is not None})
    if others or next(tensors(output), None) is None:
        raise InputError(
            explain(
                "the model's output cannot be exported",
                expected="outputs that are tensors, in tuples, lists or mappings",
                got=", ".join(others) or "no tensor",
                fix="wrap the model in a module whose forward returns tensors only",
            )
        )


def _leaves(value: Any) -> Iterator[Any]:
    """What is no tensor and no container."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif not isinstance(value, Tensor):
        yield value
