"""EpitomeLayer: an epitome, its starts, and the weight generated from them. What every layer shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod, sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from epitorch.errors import ShapeError, StartsError, explain
from epitorch.functional import check_start_shapes, sample_weight
from epitorch.init import first_starts, interpolation_gain
from epitorch.nn._index import IndexLearner, RoutingMap, check_finite, distributed
from epitorch.spec import Axis, ChannelStarts, EpitomeSpec, SpatialStarts, semantic_order

Index = Literal["learner", "direct", "fixed"]
INDEX_KINDS = ("learner", "direct", "fixed")
_WATCHED = 16  # epitome elements in the fingerprint of a step
_PRINTED_MOMENTUM = 0.97  # of the routing map, in the paper; the default everywhere


class EpitomeLayer(nn.Module, ABC):
    """Base of all epitome layers (method sections 1 to 3).

    Attributes:
        epitome: Parameter E, shape `(O, I, *L)` (transposed convolutions: `(I, O, *L)`; `flatten_kernel`: `(O, I)`).
        routing_map: Starts used at evaluation; part of the state.
        learner: Index learner eta, or None (`index` is "direct" or "fixed", or the layer was deployed).
        spec: Shapes in semantic order `(out, in, *kernel)`.
        qualified_name: Name in the model that `convert_` gave; used in messages.
    """

    epitome: nn.Parameter
    bias: nn.Parameter | None
    learner: IndexLearner | None
    transposed = False

    def _build(
        self,
        weight_shape: tuple[int, ...],
        epitome_shape: Sequence[int],
        in_features: int,
        bias: bool | None,
        factory: dict[str, Any],
        *,
        index: Index,
        momentum: float,
        flatten_kernel: bool,
        block_out: int | None,
        block_in: int | None,
        spatial_starts: SpatialStarts,
        channel_starts: ChannelStarts,
        group_length: int | None,
        spatial_shift: bool,
    ) -> None:
        """Register everything. `weight_shape` and `epitome_shape` are in storage order.

        `bias` None leaves alone a bias that the layer has already.
        """
        self.index, self.qualified_name = self._checked_index(index), ""
        self.flatten_kernel = flatten_kernel
        self.weight_shape = weight_shape
        self.spec = EpitomeSpec.for_layer(
            weight_shape,
            epitome_shape,
            transposed=self.transposed,
            flatten_kernel=flatten_kernel,
            block_out=block_out,
            block_in=block_in,
            spatial_starts=spatial_starts,
            channel_starts=channel_starts,
            group_length=group_length,
            spatial_shift=spatial_shift,
        )
        self.momentum = _checked_momentum(momentum)
        self.epitome = nn.Parameter(_allocated(tuple(epitome_shape), factory))
        self._build_starts(in_features)
        self._learner_in_eval = False
        self._reset_epitome()
        if bias is not None:
            out_features = self.spec.weight_shape[0] * (getattr(self, "groups", 1) if self.transposed else 1)
            self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **factory)) if bias else None)
            self._reset_bias()

    def _build_starts(self, in_features: int) -> None:
        dtype = torch.promote_types(self.epitome.dtype, torch.float32)
        learned = self.index == "learner" and bool(self.spec.start_shapes)
        starts = self._first_starts(by_learner=learned)
        self.routing_map = RoutingMap(
            self.spec,
            starts,
            learned=self.index == "direct",
            momentum=self.momentum,
            dtype=dtype,
            watched=self.spec.num_starts + len(self._sample_of_epitome()) if learned else 0,
        )
        spatial_dims = len(self.weight_shape) - 2
        self.learner = (
            IndexLearner(in_features, self.spec, starts, spatial_dims=spatial_dims, dtype=dtype) if learned else None
        )

    def reset_parameters(self) -> None:
        """Spread the starts over whole positions, then draw the epitome: the output has the dense layer's variance.

        The bias is drawn as in torch. Works on memory that was never filled (`to_empty`).
        """
        self._reset_epitome()
        self._reset_bias()

    def _reset_epitome(self) -> None:
        starts = self._first_starts(by_learner=self.learner is not None)
        self.routing_map.reset(starts)
        if self.learner is not None:
            self.learner.squeeze.reset_parameters()
            self.learner.norm.reset_parameters()
            self.learner.reset(starts)
        self.init_epitome(std=self._bound() / sqrt(3))

    def _first_starts(self, *, by_learner: bool) -> dict[Axis, Tensor]:
        learned = self.index != "fixed"
        return first_starts(self.spec, learned=learned, by_learner=by_learner, device=self.epitome.device)

    def _reset_bias(self) -> None:
        if self.bias is not None:
            nn.init.uniform_(self.bias, -self._bound(), self._bound())

    def _bound(self) -> float:
        """Of torch's kaiming_uniform_(a=sqrt(5)); its fan-in is in storage order: C_out/groups * K where transposed."""
        return 1 / sqrt(prod(self.weight_shape[1:]))

    @torch.no_grad()
    def init_epitome(self, std: float) -> None:
        """Draw the epitome uniformly so that the generated weight has standard deviation `std`."""
        gain = interpolation_gain(self.starts(), self.spec) if not self.epitome.is_meta else 1.0
        bound = sqrt(3) * std / gain
        self.epitome.uniform_(-bound, bound)

    # ---- starts and weight ----

    @property
    def block_out(self) -> int:
        """Filters that share a start, beta_2."""
        return self.spec.block_out

    @property
    def block_in(self) -> int:
        """Input channels that share a start, beta_1."""
        return self.spec.block_in

    def starts(self) -> dict[Axis, Tensor]:
        """Evaluation starts by axis, in positions: `"out"` (R_out,), `"in"` (R_in,), `"spatial"` (R, axes).

        Only axes that have starts. With `channel_starts="grid"` the channel entries are `(R_out, R_in)`, with
        "grid_out" or "grid_in" the entry of that axis. The tensors are live: writing into them (under
        `torch.no_grad()`) moves the starts.
        """
        return self.routing_map.as_dict()

    def set_starts(self, starts: Mapping[Axis, Tensor]) -> None:
        """Overwrite the evaluation starts; a learner is made to return them too.

        With a group length g a learner reaches positions up to `size - g` only and returns the nearest that it can.

        Raises:
            StartsError: If axes or shapes differ from `starts()`, or a value is not finite.
        """
        check_start_shapes(starts, self.spec, self._where)
        for axis, value in starts.items():
            if not torch.isfinite(value).all():
                raise StartsError(
                    explain("starts must be finite", expected="numbers", got=f"{axis}: {value}", where=self._where)
                )
        self.routing_map.set(starts)
        if self.learner is not None:
            self.learner.reset(starts)

    @property
    def weight(self) -> Tensor:
        """The weight generated from the routing map, in torch's storage order, differentiable. Not cached.

        Raises:
            StartsError: If a start is not finite.
        """
        check_finite(self.starts(), self._where)
        return self._generate(self.starts())

    def _generate(self, starts: Mapping[Axis, Tensor]) -> Tensor:
        epitome = self.epitome.transpose(0, 1) if self.transposed else self.epitome
        weight = sample_weight(epitome, starts, self.spec)
        if self.flatten_kernel:
            weight = weight.reshape(semantic_order(self.weight_shape, self.transposed))
        return weight.transpose(0, 1) if self.transposed else weight

    def _weight_for(self, features: Tensor) -> Tensor:
        """The weight of this forward pass: from the learner in training, from the routing map otherwise."""
        learner = None if self.routing_map.is_frozen else self.learner
        empty = features.numel() == 0 and not (self.training and distributed())  # no rank may stay away
        if learner is None or not (self.training or self._learner_in_eval) or empty:
            starts = self.starts()
        else:
            starts = learner(features)
        if self.epitome.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere it would synchronise
            check_finite(starts, self._where)
        if learner is not None and self.training and not empty and not _recomputing():
            self._track({axis: value.detach() for axis, value in starts.items()}, learner)
        return self._generate(starts)

    def _track(self, starts: dict[Axis, Tensor], learner: IndexLearner) -> None:
        bias = learner.head.bias.detach()
        self.routing_map.update(starts, torch.cat([bias, self._sample_of_epitome().to(bias)]))

    def _sample_of_epitome(self) -> Tensor:
        flat = self.epitome.detach().reshape(-1)
        return flat[:: max(1, flat.numel() // _WATCHED)][:_WATCHED]

    # ---- routing ----

    def freeze_routing(self) -> None:
        """Stop the routing map and use it in training as well; the flag is part of the state."""
        self.routing_map.freeze(True)

    def unfreeze_routing(self) -> None:
        """Undo `freeze_routing`."""
        self.routing_map.freeze(False)

    def snap_routing(self) -> None:
        """Move the map to whole positions (multiples of the group length) and freeze it: cheaper to run.

        Raises:
            StartsError: If a start is not finite.
        """
        check_finite(self.starts(), self._where)
        self.routing_map.snap()
        self.freeze_routing()

    def drop_learner(self) -> None:
        """Remove the learner for good and freeze the map: the state of a deployed layer."""
        self._modules.pop("learner", None)  # a None left there would hide unexpected keys from a strict load
        self.learner = None
        self.index = "fixed" if self.index == "learner" else self.index
        self.freeze_routing()

    # ---- state ----

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        has_learner = any(key.startswith(prefix + "learner.") for key in state_dict)
        frozen = state_dict.get(prefix + "routing_map.frozen")
        if self.learner is not None and not has_learner and frozen is not None and bool(frozen):
            own = {name: value for name, value in self.state_dict().items() if not name.startswith("learner.")}
            given = {name: state_dict.get(prefix + name) for name in own}
            if all(getattr(given[name], "shape", None) == value.shape for name, value in own.items()):
                self.drop_learner()  # only now: a state that does not fit leaves the layer as it is
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # ---- conversion ----

    @abstractmethod
    def to_dense(self) -> nn.Module:
        """Return torch's own layer with the generated weight, same arguments, dtype, device and mode."""

    def _fill_dense(self, dense: nn.Module) -> nn.Module:
        """Copy weight and bias into a layer made on the meta device."""
        for name, value, like in (("weight", self.weight, self.epitome), ("bias", self.bias, self.bias)):
            if value is not None and like is not None:
                copy = value.detach().clone(memory_format=torch.contiguous_format)
                setattr(dense, name, nn.Parameter(copy, requires_grad=like.requires_grad))
        return dense.train(self.training)

    # ---- helpers ----

    @property
    def _where(self) -> str:
        return getattr(self, "qualified_name", "") or type(self).__name__

    def _checked_index(self, index: Index) -> Index:
        if index not in INDEX_KINDS:
            raise ShapeError(explain("index is not valid", expected=" | ".join(INDEX_KINDS), got=repr(index)))
        return index

    def _epitome_repr(self) -> str:
        spec = self.spec
        plain = EpitomeSpec.create(spec.weight_shape, spec.epitome_shape)
        names = ("block_out", "block_in", "spatial_starts", "channel_starts", "group_length", "spatial_shift")
        options = [f"epitome_shape={tuple(self.epitome.shape)}", f"index={self.index}"]
        options += [f"{name}={getattr(spec, name)}" for name in names if getattr(spec, name) != getattr(plain, name)]
        options += ["flatten_kernel=True"] if self.flatten_kernel else []
        told = self.index == "learner" and self.momentum != _PRINTED_MOMENTUM
        options += [f"momentum={self.momentum}"] if told else []
        return ", ".join(options)


@contextmanager
def learner_starts(model: nn.Module) -> Iterator[None]:
    """Inside, layers in eval mode take their starts from the learner on the batch; no routing map changes.

    Measures the gap between training and evaluation. Layers without a learner, or frozen, use the map as ever.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, EpitomeLayer)]
    before = [layer._learner_in_eval for layer in layers]
    for layer in layers:
        layer._learner_in_eval = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._learner_in_eval = value


def _recomputing() -> bool:
    """Whether autograd is running backward: a checkpointed forward pass is being repeated."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def _allocated(shape: tuple[int, ...], factory: dict[str, Any]) -> Tensor:
    """Memory for an epitome; a size that nobody can mean is refused in the family's words."""
    try:
        return torch.empty(shape, **factory)
    except RuntimeError as error:  # torch's allocators have no narrower one in common
        raise ShapeError(
            explain(
                "there is no memory for this epitome",
                expected="an epitome that fits the device, usually smaller than the layer's weight",
                got=f"epitome_shape={shape}, {prod(shape):,} elements ({str(error).splitlines()[0][:120]})",
                fix="give a smaller epitome_shape",
            )
        ) from error


def _checked_momentum(momentum: float) -> float:
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ShapeError(explain("momentum is not valid", expected="0 <= momentum < 1", got=repr(momentum)))
    return momentum
