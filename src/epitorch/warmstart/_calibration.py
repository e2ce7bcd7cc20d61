"""What a few batches of the user's data say: activation moments and batch norm statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from epitorch.errors import DataError, check_is_model, explain
from epitorch.nn import EpitomeLayer

Forward = Callable[[nn.Module, Any], object]
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def first_argument(model: nn.Module, batch: Any) -> object:
    """Call the model on a batch as data loaders give it: a tensor, or a tuple or list that begins with the input."""
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


@torch.no_grad()
def activation_moments(
    model: nn.Module, batches: Iterable[Any], *, centred: bool = False, forward: Forward = first_argument
) -> dict[str, Tensor]:
    """Mean square of each input channel of every convolution and linear layer, over a few batches.

    The model runs in eval mode and is left as it was.

    With `centred` it is the variance. A batch norm behind the layer whose statistics are estimated again afterwards
    takes out whatever the error does to the mean of an output, so there the variance is what counts; for a layer
    without one, such as a classifier, it is the mean square.

    Args:
        model: Any module; layers are named as in `model.named_modules()`, under all their names.
        batches: Tensors, or tuples whose first element is the input.
        centred: Variances instead of mean squares.
        forward: How to call the model on a batch, if not by its first element.

    Returns:
        By layer name: shape `(C_in/groups,)`, the mean over groups, float64 on the layer's device. Layers that never
        ran are not there.

    Raises:
        DataError: If there are no batches, or they hold no samples or values that are not finite.
    """
    check_is_model(model)
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        features = args[0] if args else kwargs.get("input")
        if isinstance(features, Tensor) and features.numel():
            total, count = _sums(module, features.detach().double())
            sums[id(module)] = sums.get(id(module), 0) + total
            counts[id(module)] = counts.get(id(module), 0) + count

    layers = {n: m for n, m in model.named_modules(remove_duplicate=False) if _takes_channels(m)}
    unique = {id(module): module for module in layers.values()}.values()
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in unique]
    try:
        with _modes(model, train=()):
            _run(model, batches, forward, "activation moments")
    finally:
        for hook in hooks:
            hook.remove()
    means = {key: total / counts[key] for key, total in sums.items()}  # shape: (2, C_in/groups), of x and of x^2
    moments = {key: (m[1] - m[0] ** 2).clamp_min(0) if centred else m[1] for key, m in means.items()}
    found = {name: moments[id(module)] for name, module in layers.items() if id(module) in moments}
    wrong = next((name for name, value in found.items() if not value.isfinite().all()), None)
    if wrong is not None or (layers and not found):
        got = "no layer saw a sample" if wrong is None else f"other numbers at the input of '{wrong}'"
        raise DataError(explain("the batches give no moments", expected="samples with finite values", got=got))
    return found


@torch.no_grad()
def reestimate_batch_norm_(model: nn.Module, batches: Iterable[Any], *, forward: Forward = first_argument) -> nn.Module:
    """Reset the running statistics of every batch norm and average them anew over a few batches, in place.

    `torch.optim.swa_utils.update_bn` puts the whole model into training mode: dropout and stochastic depth would then
    shape the statistics, and index learners would move their routing maps. Here only the batch norms that keep
    statistics train, with a cumulative average in which every batch counts alike; all other modules are in eval mode.
    Modes and momenta are put back.

    Args:
        model: Any module.
        batches: Tensors, or tuples whose first element is the input; give batches of equal size, at least 32 samples.
        forward: How to call the model on a batch, if not by its first element.

    Returns:
        The model.

    Raises:
        DataError: If there are no batches, or they make statistics that are not finite; these are then as they were.
    """
    check_is_model(model)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return model
    buffers = [{name: value.clone() for name, value in norm.named_buffers(recurse=False)} for norm in norms]
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch's cumulative average
        with _modes(model, train=norms):
            _run(model, batches, forward, "batch norm statistics")
        _refuse_useless(norms)
    except BaseException:
        _put_back(norms, buffers)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    _put_back_unused(norms, buffers)
    return model


def _refuse_useless(norms: list[_BatchNorm]) -> None:
    """NaN in the data makes the statistics NaN."""
    for norm in norms:
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        if not norm.num_batches_tracked:
            continue
        if not (mean.isfinite().all() and variance.isfinite().all()):
            raise DataError(
                explain(
                    "the batches give no statistics",
                    expected="samples with finite values",
                    got=f"mean {mean[:3].tolist()}, variance {variance[:3].tolist()}",
                )
            )


def _put_back(norms: list[_BatchNorm], buffers: list[dict[str, Tensor]]) -> None:
    for norm, saved in zip(norms, buffers, strict=True):
        for name, value in saved.items():
            getattr(norm, name).copy_(value)


def _put_back_unused(norms: list[_BatchNorm], buffers: list[dict[str, Tensor]]) -> None:
    """A batch norm that no batch reached keeps its statistics."""
    unused = [i for i, norm in enumerate(norms) if not norm.num_batches_tracked]
    _put_back([norms[i] for i in unused], [buffers[i] for i in unused])


def _takes_channels(module: nn.Module) -> bool:
    return isinstance(module, (*_CONVS, nn.Linear, EpitomeLayer))


def _sums(module: Any, features: Tensor) -> tuple[Tensor, int]:
    """Sums of x and of x^2 per input channel of one group, shape (2, C_in/groups), and how many values each sums."""
    both = torch.stack([features, features.square()])
    if not hasattr(module, "kernel_size"):  # linear: channels last
        rows = both.reshape(2, -1, both.shape[-1])
        return rows.sum(1), rows.shape[1]
    rows = both.flatten(-len(module.kernel_size)).sum(-1)
    rows = rows.reshape(2, -1, module.in_channels)  # a sample without batch axis: one row
    count = features.numel() // module.in_channels
    if getattr(module, "transposed", False):
        return rows.sum(1), count
    return rows.reshape(2, -1, module.in_channels // module.groups).sum(1), count * module.groups


def _run(model: nn.Module, batches: Iterable[Any], forward: Forward, what: str) -> None:
    ran = False
    for batch in batches:
        given = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if isinstance(given, Tensor) and not given.numel():
            got = f"a batch of shape {tuple(given.shape)}"
            raise DataError(explain(f"{what} need data", expected="batches with samples", got=got))
        forward(model, batch)
        ran = True
    if not ran:
        raise DataError(explain(f"{what} need data", expected="at least one batch", got="none"))


@contextmanager
def _modes(model: nn.Module, train: Iterable[nn.Module]) -> Iterator[None]:
    """Everything in eval mode but the modules `train`; afterwards each module's own mode again."""
    before = [(module, module.training) for module in model.modules()]
    training = {id(module) for module in train}
    for module, _ in before:
        module.training = id(module) in training
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
