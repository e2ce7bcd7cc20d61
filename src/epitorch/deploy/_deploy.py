"""deploy(model): a plain module for inference that computes what the trained model computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from epitorch.conversion import keep_hooks, replace_modules, to_dense_
from epitorch.cost._trace import Trace, as_arguments, epitome_layers, quiet, tensors, trace
from epitorch.cost.analysis import geometry_of
from epitorch.cost.formulas import Choice, dense_madds
from epitorch.deploy._parity import ParityError, check_parity
from epitorch.deploy.choose import DEPLOY_STRATEGIES, DeployStrategy, choices
from epitorch.deploy.report import Deployment, LayerDeployment
from epitorch.deploy.reuse import reuse_layer
from epitorch.errors import InputError, check_is_model, explain, suggest
from epitorch.nn import EpitomeLayer

_AMPLIFIED = 100  # on the tolerance, where float64 shows that a difference in float32 is rounding, made larger


def deploy(model: nn.Module, example_input: Tensor | tuple[Any, ...], strategy: DeployStrategy = "reuse") -> nn.Module:
    """Make a module for inference without learners that computes what `model` computes in eval mode.

    "dense" folds every epitome into a plain torch layer. "reuse" runs each layer by product map, channel
    wrapping or sums along diagonals (method section 5), whichever executes the fewest operations on the example, and
    never makes the dense weight; a layer to which no reuse applies, or that saves nothing, is folded and listed. In
    the end both models run on the example and must agree; where float32 differs by more than rounding usually does,
    because the model amplifies it, they must agree in float64.

    Args:
        model: The trained model; it stays as it is.
        example_input: A tensor, or a tuple of the model's arguments.
        strategy: "dense" or "reuse".

    Returns:
        A copy in eval mode. Its attribute `deployment` is the report (`Deployment`); copies keep it.

    Raises:
        InputError: If the strategy is not known, or the example holds no tensor.
        StartsError: If a start is not finite.
        ParityError: If the outputs on the example differ.

    Example:
        >>> import torch
        >>> from epitorch.nn import EpitomeLinear
        >>> net = deploy(EpitomeLinear(8, 64, epitome_shape=(8, 8)), torch.zeros(1, 8))
        >>> net.deployment.layers[0].strategy
        'product_map'
    """
    check_is_model(model)
    _check_strategy(strategy)
    with quiet(model):
        net = copy.deepcopy(model).eval()
    for name, layer in net.named_modules():
        if isinstance(layer, EpitomeLayer):
            layer.qualified_name = layer.qualified_name or name
    record = trace(net, as_arguments(example_input))
    chosen = choices(record, strategy)
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
    return check_parity(trained, output, slack=_AMPLIFIED)


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


def _check_strategy(strategy: str) -> None:
    known: list[str] = list(DEPLOY_STRATEGIES)
    if strategy not in known:
        raise InputError(
            explain(
                "strategy is not known",
                expected=" | ".join(known),
                got=f"{strategy!r}{suggest(str(strategy), known)}",
            )
        )


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
