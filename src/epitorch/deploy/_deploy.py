"""deploy(model): a plain module for inference that computes what the trained model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from epitorch.conversion import keep_hooks, replace_modules, to_dense_
from epitorch.cost._trace import Trace, as_arguments, epitome_layers, quiet, tensors, trace
from epitorch.cost.analysis import geometry_of
from epitorch.cost.formulas import Choice, dense_madds
from epitorch.deploy._parity import AMPLIFIED, ParityError, check_parity
from epitorch.deploy.choose import DeployStrategy, choices
from epitorch.deploy.report import Deployment, LayerDeployment
from epitorch.deploy.reuse import reuse_layer
from epitorch.errors import check_is_model
from epitorch.nn import EpitomeLayer

Chooser = Callable[[nn.Module, Trace], dict[str, Choice]]


def deploy_as(
    model: nn.Module, example_input: Tensor | tuple[Any, ...], strategy: DeployStrategy = "reuse"
) -> nn.Module:
    """`epitorch.deploy` for "dense" and "reuse", which need no measurement; see there."""
    return deploy_by(model, example_input, strategy, lambda _, record: choices(record, strategy))


def deploy_by(model: nn.Module, example_input: Tensor | tuple[Any, ...], strategy: str, choose: Chooser) -> nn.Module:
    """Copy a model, choose how each epitome layer of the copy runs, make it so, and compare the outputs.

    Args:
        model: The trained model; it stays as it is.
        example_input: A tensor, or a tuple of the model's arguments.
        strategy: What was asked for, for the report.
        choose: From the copy and its trace on the example to a choice for every epitome layer, by name.

    Returns:
        The copy in eval mode with a report as `deployment`.

    Raises:
        StartsError: If a start is not finite.
        ParityError: If the outputs on the example differ.
    """
    check_is_model(model)
    with quiet(model):
        net = copy.deepcopy(model).eval()
    for name, layer in net.named_modules():
        if isinstance(layer, EpitomeLayer):
            layer.qualified_name = layer.qualified_name or name
    record = trace(net, as_arguments(example_input))
    chosen = choose(net, record)
    layers = tuple(_row(name, record, choice) for name, choice in chosen.items())
    net = _replaced(net, record, chosen)
    with quiet(net):
        output = net(*as_arguments(example_input))
    report = Deployment(strategy, layers, _difference(model, example_input, chosen, record.output, output))
    setattr(net, "deployment", report)  # noqa: B010 - nn.Module declares tensors and modules only
    return net


def _difference(model: nn.Module, example_input: Any, chosen: dict[str, Choice], trained: Any, output: Any) -> float:
    try:
        return check_parity(trained, output)
    except ParityError:
        if not _agree_in_double(model, example_input, chosen):
            raise
    return check_parity(trained, output, slack=AMPLIFIED)


def _agree_in_double(model: nn.Module, example_input: Any, chosen: dict[str, Choice]) -> bool:
    """Whether the same strategies give the same output once rounding is out of the way."""
    try:
        with quiet(model):
            net = copy.deepcopy(model).double().eval()
        record = trace(net, _doubled(example_input))
        net = _replaced(net, record, chosen)
        with quiet(net):
            output = net(*_doubled(example_input))
        # An output in float32 would show nothing: the model's own code casts.
        return all(t.dtype == torch.float64 for t in tensors(output) if t.is_floating_point()) and bool(
            check_parity(record.output, output) < 1
        )
    except Exception:  # the model's own code may insist on float32
        return False


def _doubled(example_input: Any) -> tuple[Any, ...]:
    arguments = copy.deepcopy(as_arguments(example_input))
    return tree_map_only(Tensor, lambda value: value.double() if value.is_floating_point() else value, arguments)


def _row(name: str, record: Trace, choice: Choice) -> LayerDeployment:
    layer: Any = record.calls[name].module
    return LayerDeployment(
        name,
        type(layer).__name__,
        choice.strategy,
        choice.reason,
        choice.declined,
        choice.operations.total,
        dense_madds(layer.spec, geometry_of(record.calls[name], record)),
        choice.seconds,
    )


def _replaced(net: nn.Module, record: Trace, chosen: dict[str, Choice]) -> nn.Module:
    """Put the reuse modules in, fold what is left."""
    new: dict[int, nn.Module] = {}
    for name, choice in chosen.items():
        layer: Any = record.calls[name].module
        if choice.strategy != "folded":
            new[id(layer)] = keep_hooks(layer, reuse_layer(layer, choice.strategy))
    if id(net) in new:
        return new[id(net)]
    replace_modules(net, new)
    return to_dense_(net).eval() if epitome_layers(net) else net
