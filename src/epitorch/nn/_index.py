"""The index learner eta(F) and the routing map M that inference keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isfinite, prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epitorch.errors import StartsError, explain
from epitorch.spec import Axis, EpitomeSpec


class _KeepsPrecision(nn.Module):
    """Stays float32 or wider under `.half()` and `.to(torch.bfloat16)`: bfloat16 has a spacing of 4 near 1000."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _KeepsPrecision:
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = tensor.is_floating_point() and torch.finfo(moved.dtype).bits < 32
            return tensor.to(moved.device) if narrowed else moved

        return super()._apply(keep, recurse)


class RoutingMap(_KeepsPrecision):
    """The starts that inference uses: `map["out"]`, `map["in"]`, `map["spatial"]`, in positions of the axis.

    For a learner it is the moving average `M <- mu*M + (1-mu)*S(eta(F))`, once per optimiser step: outputs that come
    while the parameters stay as they are (accumulation, a module used twice) are averaged and count as one.

    Args:
        spec: The shapes.
        starts: Initial values.
        learned: The starts are parameters (`index="direct"`), not buffers.
        momentum: mu.
        dtype: Dtype of the values, float32 or wider.
        watched: Length of the fingerprint that `update` gets.
    """

    frozen: Tensor
    _base: Tensor
    _count: Tensor
    _seen: Tensor

    def __init__(
        self,
        spec: EpitomeSpec,
        starts: Mapping[Axis, Tensor],
        *,
        learned: bool,
        momentum: float,
        dtype: torch.dtype,
        watched: int = 0,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.momentum = momentum
        self.learned = learned
        for axis, value in starts.items():
            value = value.to(dtype).clone()
            if learned:
                self.register_parameter(_attribute(axis), nn.Parameter(value))
            else:
                self.register_buffer(_attribute(axis), value)
        device = next((t.device for t in starts.values()), None)
        self.register_buffer("frozen", torch.tensor(False, device=device))
        self._thawed = [True] * len(list(self.parameters()))  # requires_grad of learned starts before freezing
        self._is_frozen = False  # the flag again, outside the graph: no synchronisation, no data-dependent branch
        self._written: tuple[int, int] | None = None  # which tensor, in which version, that flag was read from
        zeros = torch.zeros(spec.num_starts, dtype=dtype, device=device)
        self.register_buffer("_base", zeros, persistent=False)
        self.register_buffer("_count", torch.zeros((), dtype=dtype, device=device), persistent=False)
        seen = torch.full((watched,), float("nan"), dtype=dtype, device=device)  # NaN equals nothing: a new step
        self.register_buffer("_seen", seen, persistent=False)

    # ---- reading ----

    def __getitem__(self, axis: Axis) -> Tensor:
        if axis not in self.spec.start_shapes:
            raise KeyError(axis)
        return getattr(self, _attribute(axis))

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.spec.start_shapes)

    def __len__(self) -> int:
        return len(self.spec.start_shapes)

    def keys(self) -> Iterator[Axis]:
        """The axes that have starts."""
        return iter(self)

    def items(self) -> Iterator[tuple[Axis, Tensor]]:
        """Pairs of axis and starts (live tensors)."""
        return ((axis, self[axis]) for axis in self)

    def as_dict(self) -> dict[Axis, Tensor]:
        """Live tensors by axis; detached where the map is frozen."""
        return {axis: value.detach() if self._is_frozen else value for axis, value in self.items()}

    @property
    def is_frozen(self) -> bool:
        """The map no longer changes and is used in training too."""
        self._follow_buffer()
        return self._is_frozen

    # ---- writing ----

    @torch.no_grad()
    def reset(self, starts: Mapping[Axis, Tensor]) -> None:
        """Begin anew from `starts`, not frozen; also where the memory was never filled (`to_empty`)."""
        self.freeze(False)
        for buffer in (self._base, self._count):
            buffer.zero_()
        self.set(starts)

    @torch.no_grad()
    def set(self, starts: Mapping[Axis, Tensor]) -> None:
        """Overwrite all starts; the running average begins anew from them."""
        for axis, value in self.items():
            value.copy_(starts[axis])
        self._seen.fill_(float("nan"))

    def freeze(self, frozen: bool = True) -> None:
        """Set the flag; learned starts stop (or resume) taking gradients."""
        self.frozen.fill_(frozen)
        self._sync_flag(frozen)

    def _follow_buffer(self) -> None:
        """Read the buffer if another than `freeze` wrote into it: `torch.optim.swa_utils.AveragedModel` copies it."""
        if torch.compiler.is_compiling() or not _is_readable(self.frozen) or self.frozen.is_inference():
            return
        now = (id(self.frozen), self.frozen._version)
        if now != self._written:  # hardly ever: reading waits for the device
            self._sync_flag(bool(self.frozen))
            self._written = now

    def _sync_flag(self, frozen: bool) -> None:
        if frozen and not self._is_frozen:
            self._thawed = [parameter.requires_grad for parameter in self.parameters()]
            self.requires_grad_(False)
        elif self._is_frozen and not frozen:
            for parameter, before in zip(self.parameters(), self._thawed, strict=True):
                parameter.requires_grad_(before)
        self._is_frozen = frozen

    @torch.no_grad()
    def snap(self) -> None:
        """Round every start to the nearest whole position (multiple of the group length), on the circle."""
        for axis, value in self.items():
            group = self.spec.group(axis)
            size = value.new_tensor(self.spec.start_sizes[axis])
            value.copy_(torch.remainder(torch.round(value / group) * group, size))

    @torch.no_grad()
    def update(self, starts: Mapping[Axis, Tensor], fingerprint: Tensor) -> None:
        """Take in one output of the learner.

        Args:
            starts: The scaled output S(eta(F)).
            fingerprint: Values that every optimiser step changes; as long as they are the same it is the same step.
                Tensor arithmetic, not a version counter, so that compiled graphs do it too.
        """
        new, now = _flat([starts[axis] for axis in self]), _flat([value for _, value in self.items()])
        same = torch.eq(self._seen, fingerprint).all()
        self._seen.copy_(fingerprint)
        self._base.copy_(torch.where(same, self._base, now))
        self._count.mul_(same).add_(1)
        target = torch.lerp(new, self._base, self.momentum)
        target = torch.where(target.isfinite(), target, now)  # a diverged step must not spoil the map
        average = torch.lerp(now, target, self._count.reciprocal())  # over the targets of this step
        for (_, value), part in zip(self.items(), _parts(average, self.spec), strict=True):
            value.copy_(part)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for axis in self:
            value = state_dict.get(prefix + _attribute(axis))
            if value is not None and not torch.isfinite(value).all():
                error_msgs.append(_not_finite(prefix.rstrip("."), axis, value))
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        _follow(self, ("_base", "_count", "_seen"), next((value for _, value in self.items()), self.frozen))
        self._seen.fill_(float("nan"))
        if prefix + "frozen" in state_dict:
            self._sync_flag(bool(state_dict[prefix + "frozen"]))

    def extra_repr(self) -> str:
        """Axes and shapes."""
        return f"{self.spec.start_shapes}, frozen={self._is_frozen}"


def _follow(module: nn.Module, names: tuple[str, ...], loaded: Tensor) -> None:
    """Make buffers that no state holds where `load_state_dict(assign=True)` filled a module made on the meta device."""
    for name in names:
        buffer = getattr(module, name)
        if buffer.is_meta and not loaded.is_meta:
            setattr(module, name, torch.zeros_like(buffer, device=loaded.device))


class _Head(nn.Linear):
    """Its values come from `IndexLearner.reset`: loops that reset every module of a model leave them alone."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class IndexLearner(_KeepsPrecision):
    """eta(F): pooling, 1x1 convolution, normalisation, activation, 1x1 convolution, average, sigmoid, scaling S.

    The input is averaged over space first and no gradient goes back to it, so that the learner costs one read of it
    (the gradient would cost three more passes and is spread over the whole batch); normalisation is per sample, so that
    it does not depend on the rank. The output before the sigmoid is measured in positions (`size/4` times its
    logit): one step then moves a start about as far as it would move a start that is a parameter.

    Args:
        in_channels: Channels of F.
        spec: The shapes of the layer served.
        starts: Initial starts, which the fresh learner returns whatever its input.
        spatial_dims: Trailing axes of F to average over; 0 for a linear layer, whose leading axes are averaged instead.
        hidden: Width of the hidden layer.
    """

    _scale: Tensor
    _reach: Tensor

    def __init__(
        self,
        in_channels: int,
        spec: EpitomeSpec,
        starts: Mapping[Axis, Tensor],
        *,
        spatial_dims: int,
        hidden: int = 16,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        device = next(iter(starts.values())).device
        self.spec = spec
        self.spatial_dims = spatial_dims
        self.squeeze = nn.Linear(in_channels, hidden, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(hidden, device=device, dtype=dtype)
        self.head = _Head(hidden, spec.num_starts, device=device, dtype=dtype)
        scale, reach = _scales(spec)
        self.register_buffer("_scale", scale.to(device, dtype), persistent=False)
        self.register_buffer("_reach", reach.to(device, dtype), persistent=False)
        self.reset(starts)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        bias = state_dict.get(prefix + "head.bias")  # the head itself is loaded after this
        if bias is not None and local_metadata.get("assign_to_params_buffers"):
            _follow(self, ("_scale", "_reach"), bias)
        self._fill_constants()

    def _fill_constants(self) -> None:
        """`to_empty` leaves them without values."""
        for buffer, value in zip((self._scale, self._reach), _scales(self.spec), strict=True):
            if not buffer.is_meta:
                buffer.copy_(value)

    @torch.no_grad()
    def reset(self, starts: Mapping[Axis, Tensor]) -> None:
        """Make the learner return `starts` for every input, until it is trained."""
        self._fill_constants()
        turned = [
            torch.remainder(starts[axis], starts[axis].new_tensor(self.spec.start_sizes[axis])).reshape(-1)
            for axis in self.spec.start_shapes
        ]
        share = (torch.cat(turned).to(self._reach) / self._reach).clamp(1e-6, 1 - 1e-6)
        self.head.weight.zero_()
        self.head.bias.copy_(torch.logit(share) * self._scale)

    def forward(self, features: Tensor) -> dict[Axis, Tensor]:
        """Return starts in positions for a batch of features, shape (N, C, *space) or (..., C) for linear layers."""
        dtype = self.head.weight.dtype
        features = features.detach()
        with torch.autocast(features.device.type, enabled=False):
            if self.spatial_dims:
                pooled = features.mean(tuple(range(-self.spatial_dims, 0)), dtype=dtype)
                rows = pooled.reshape(-1, pooled.shape[-1])  # shape: (N, C)
                average = _mean(self._hidden(rows), self.training)
            else:
                rows = features.reshape(-1, features.shape[-1]).to(dtype)
                average = self._hidden(_mean(rows, self.training))
            bias, weight = self.head.bias, self.head.weight
            logits = torch.addmv(bias, weight, average, alpha=1 / sqrt(average.shape[-1])) / self._scale
            flat = self._reach * torch.sigmoid(logits)
        return dict(zip(self.spec.start_shapes, _parts(flat, self.spec), strict=True))

    def _hidden(self, rows: Tensor) -> Tensor:
        return F.relu(self.norm(self.squeeze(rows)))


def _scales(spec: EpitomeSpec) -> tuple[Tensor, Tensor]:
    """For every start: positions per unit of logit, and the end of the range that S reaches."""
    scale, reach = [], []
    for axis, shape in spec.start_shapes.items():
        sizes = spec.start_sizes[axis]
        owners = prod(shape) // len(sizes)
        group = spec.group(axis)
        reach += [size - group if group > 1 else size for size in sizes] * owners
        scale += [size / 4 for size in sizes] * owners
    # one group only: S is 0 for every output; keep the division in `reset` defined
    return torch.tensor(scale, dtype=torch.float32), torch.tensor(reach, dtype=torch.float32).clamp_min(1e-6)


def _flat(values: list[Tensor]) -> Tensor:
    return values[0].reshape(-1) if len(values) == 1 else torch.cat([value.reshape(-1) for value in values])


def _parts(flat: Tensor, spec: EpitomeSpec) -> list[Tensor]:
    """Cut a vector of all starts into one tensor per axis."""
    shapes = list(spec.start_shapes.values())
    parts = flat.split([prod(shape) for shape in shapes]) if len(shapes) > 1 else [flat]
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def distributed() -> bool:
    """Whether several ranks train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _mean(rows: Tensor, over_ranks: bool) -> Tensor:
    """Mean over the batch, in training the global one, so that every rank samples the same weight. (N, H) -> (H,)."""
    if not over_ranks or not distributed():
        return rows.mean(0)
    from torch.distributed.nn.functional import all_reduce

    count = rows.new_full((1,), rows.shape[0])
    total = all_reduce(torch.cat([rows.sum(0), count]))
    return total[:-1] / total[-1].detach()


def _attribute(axis: Axis) -> str:
    """`in` alone is a keyword, and generated code (`torch.export`) writes attributes out."""
    return f"{axis}_starts"


def check_finite(starts: Mapping[Axis, Tensor], where: str) -> None:
    """Raise StartsError naming the layer and axis if a start is NaN or infinite.

    Says nothing of starts without readable values: on the meta device, fake, inside `torch.func.vmap`, or
    while compiled.
    """
    for axis, value in starts.items():
        total = value.detach().sum()  # finite only if its terms are: two operations instead of six
        if _is_readable(total) and not isfinite(total.item()) and not torch.isfinite(value).all():
            raise StartsError(_not_finite(where, axis, value))


def _is_readable(value: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    plain = type(value) is Tensor  # a fake tensor is not
    return plain and not value.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _not_finite(where: str, axis: Axis, value: Tensor) -> str:
    return explain(
        "a start index is not a finite number",
        expected="finite starts",
        got=f"{int((~torch.isfinite(value)).sum())} of {value.numel()} starts of axis '{axis}' are NaN or infinite",
        where=where,
        fix="the training diverged: go back to an earlier checkpoint and lower the learning rate of the starts",
    )
