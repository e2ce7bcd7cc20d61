"""Epitome weights for subclasses of torch's layers: their own forward runs, on a generated weight."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from epitorch.errors import ConversionError, explain
from epitorch.nn._base import EpitomeLayer

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OWN = (
    "index",
    "qualified_name",
    "flatten_kernel",
    "weight_shape",
    "block_out",
    "block_in",
    "spec",
    "momentum",
    "epitome",
    "routing_map",
    "learner",
    "_learner_in_eval",
    "_generated",
)


class AdaptedLayer(EpitomeLayer):
    """A subclass of a dense layer that kept everything of its own but its weight, which is generated.

    `adapted_class` makes the concrete classes: they inherit from this one and from the layer's class, so that
    `isinstance` with that class holds. While its forward runs, `weight` is what the starts of this pass generate;
    whoever reads `weight` outside gets the one from the routing map, differentiable in epitome and direct starts.
    """

    adapts: ClassVar[type[nn.Module]]
    _generated: Tensor | None

    def _adapt(self, dense: Any, options: dict[str, Any]) -> None:
        _refuse_clashes(dense)
        self.__dict__.update(_shallow_state(dense))
        weight = self._parameters.pop("weight")
        assert weight is not None
        self._generated = None
        flat = options["flatten_kernel"] and len(weight.shape) > 2
        self._build(
            tuple(weight.shape),
            in_features=dense.in_features if isinstance(dense, nn.Linear) else dense.in_channels,
            bias=None,
            factory={"device": weight.device, "dtype": weight.dtype},
            **{**options, "flatten_kernel": flat},
        )

    @property
    def weight(self) -> Tensor:
        """The weight of the pass that is running, else that of the routing map."""
        return super().weight if self._generated is None else self._generated

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the adapted class's own forward; its first argument is what the index learner sees."""
        self._generated = self._weight_for(args[0] if args else next(iter(kwargs.values())))
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._generated = None

    def to_dense(self) -> nn.Module:
        """Return a layer of the adapted class with the generated weight; its submodules are shared with this one."""
        dense: Any = self.adapts.__new__(self.adapts)
        dense.__dict__.update(_shallow_state(self))
        for name in _OWN:
            for registry in (dense.__dict__, *(dense.__dict__[registry] for registry in _REGISTRIES)):
                registry.pop(name, None)
        weight = self.weight.detach().clone(memory_format=torch.contiguous_format)
        own = {name: _copied(value) for name, value in dense._parameters.items()}
        dense._parameters = {"weight": nn.Parameter(weight, requires_grad=self.epitome.requires_grad), **own}
        dense._buffers = {name: None if value is None else value.clone() for name, value in dense._buffers.items()}
        return dense

    def extra_repr(self) -> str:
        """The adapted class's own, then the epitome."""
        return ", ".join(part for part in (super().extra_repr(), self._epitome_repr()) if part)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (self.adapts,), self.__getstate__()


@cache
def adapted_class(kind: type[nn.Module]) -> type[AdaptedLayer]:
    """The epitome form of a subclass of a convolution or linear layer; the same class every time."""
    names = {"adapts": kind, "__module__": kind.__module__, "__doc__": f"{kind.__name__} on a generated weight."}
    return type(f"Epitome{kind.__name__}", (AdaptedLayer, kind), names)


def adapt(dense: nn.Module, options: dict[str, Any]) -> AdaptedLayer:
    """Make the epitome form of a layer; `dense` stays as it is, and both share its other tensors and submodules.

    Args:
        dense: A layer of a subclass of `torch.nn.ConvNd`, `ConvTransposeNd` or `Linear`, with a parameter `weight`.
        options: All keyword-only arguments of an epitome layer, as a `LayerPlan` has them.

    Raises:
        ConversionError: If the layer has attributes of names that an epitome layer needs.
        ShapeError: If sizes do not fit together.
    """
    layer = _blank(type(dense))
    layer._adapt(dense, options)
    return layer


def _blank(kind: type[nn.Module]) -> AdaptedLayer:
    made = adapted_class(kind)  # type: ignore[arg-type]
    return made.__new__(made)


def _shallow_state(module: nn.Module) -> dict[str, Any]:
    """Attributes as they are; the registries of tensors, submodules and hooks copied, not what they hold."""
    return {key: value.copy() if _is_registry(key, value) else value for key, value in module.__dict__.items()}


def _is_registry(key: str, value: Any) -> bool:
    return key in _REGISTRIES or (key.endswith("_hooks") and isinstance(value, dict))


def _copied(value: nn.Parameter | None) -> nn.Parameter | None:
    return None if value is None else nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)


def name_clashes(dense: nn.Module) -> list[str]:
    """Attributes of a subclass that an epitome layer would need for itself."""
    return [name for name in _OWN if hasattr(dense, name)]


def _refuse_clashes(dense: nn.Module) -> None:
    clashes = name_clashes(dense)
    if clashes:
        raise ConversionError(
            explain(
                f"{type(dense).__name__} has attributes of its own that an epitome layer needs",
                expected=f"none of {', '.join(_OWN)}",
                got=", ".join(clashes),
                fix="leave the layer out, or rename the attributes",
            )
        )
