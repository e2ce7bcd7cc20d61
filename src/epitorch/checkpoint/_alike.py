"""Whether a rebuilt model is the one that was saved, beyond its tensors: the same modules, set up alike."""

from __future__ import annotations

from torch import nn

from epitorch.nn import EpitomeLayer

# Without effect at inference: whether one is there, and how it is set, is no difference.
_PASSING = ("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "DropPath", "StochasticDepth")


def first_difference(model: nn.Module, built: nn.Module) -> str:
    """Say where the two first differ in kind or settings of a module; empty if they do not.

    What a module computes is told by its class and `extra_repr` (strides, epsilons, kinds of pooling). A function that
    was put in place of a method of one object is a difference, too.
    """
    ours, theirs = (_modules(part) for part in (model, built))
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = (_told(modules.get(name)) for modules in (ours, theirs))
        if one != other:
            return f"{name or 'the model itself'} is {one}, rebuilt it is {other}"
    return ""


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """All modules by name but index learners, which a checkpoint may leave out."""
    layers = [module for module in model.modules() if isinstance(module, EpitomeLayer) and module.learner is not None]
    learners = {id(part) for layer in layers for part in layer.learner.modules()}  # type: ignore[union-attr]
    return {name: module for name, module in model.named_modules() if id(module) not in learners}


def _told(module: nn.Module | None) -> str:
    if module is None:
        return "not there"
    kind = type(module)
    if kind.__name__ in _PASSING:
        return "nothing at inference"
    own = ", its forward replaced" if "forward" in vars(module) else ""
    return f"{kind.__module__}.{kind.__qualname__}({module.extra_repr()}){own}"
