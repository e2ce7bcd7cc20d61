"""Layers that run on the epitome itself, by any exact strategy of method section 5 (`epitorch.cost.Strategy`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epitorch.conversion import refuse_derived
from epitorch.cost.diagonals import DiagonalLayout
from epitorch.cost.formulas import EXPANDED, INTEGRAL, WRAPPED
from epitorch.deploy._mixing import Run, Runs, channel_runs, expand_channels, wrap_channels
from epitorch.deploy.diagonals import Entries, Products, beginnings, entries_of, product_kernel, reach_of, reads_of
from epitorch.functional import sample_weight
from epitorch.nn import EpitomeLayer, EpitomeLinear, check_finite
from epitorch.nn._padding import amounts_before_and_after, output_padding
from epitorch.spec import Axis, EpitomeSpec, semantic_order

ReuseStrategy = Literal[
    "product_map", "wrapping", "both", "diagonals", "integral", "wrapped_diagonals", "wrapped_integral"
]

_CONV = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class ReuseLayer(nn.Module):
    """An epitome layer for inference that convolves with the epitome's channels.

    Its state is the epitome, the routing map and the bias, named as in the trained layer. What it convolves
    with (`kernel`) is the epitome, or made of it along the axes that are not reused; it is smaller than the
    weight.

    Args:
        layer: The trained layer; its tensors are taken, not copied.
        strategy: `product_map`: O filters, then `A_out`. `wrapping`: `A_in^T`, then I channels. `both`.

    Raises:
        ConversionError: If the epitome or the bias is made from other tensors.
        StartsError: If a start is not finite.
    """

    epitome: nn.Parameter
    bias: nn.Parameter | None
    kernel: Tensor | None
    channel_dim: int
    groups = 1
    transposed = False
    generates = False  # make the kernel in every pass, so that an exported file holds the epitome instead

    def __init__(self, layer: EpitomeLayer, strategy: ReuseStrategy) -> None:
        super().__init__()
        self.strategy: ReuseStrategy = strategy
        self.spec, self.weight_shape = layer.spec, layer.weight_shape
        for name in ("epitome", "bias"):
            if getattr(layer, name) is not None:
                refuse_derived(layer, name, layer.qualified_name or type(layer).__name__)
            self.register_parameter(name, getattr(layer, name))
        self._starts = {axis: value.detach().cpu().clone() for axis, value in layer.starts().items()}
        check_finite(self._starts, layer.qualified_name or type(layer).__name__)
        self.register_buffer("kernel", None, persistent=False)
        self._expand: tuple[Runs, ...] = ()
        self._wrap: tuple[Runs, ...] = ()

    @property
    def weight(self) -> Tensor:
        """The dense weight, made anew: for code that reads it (fused attention); this layer itself never does."""
        epitome = self.epitome.transpose(0, 1) if self.transposed else self.epitome
        starts = {axis: value.to(epitome.device) for axis, value in self._starts.items()}
        weight = sample_weight(epitome, starts, self.spec)
        weight = weight.reshape(semantic_order(self.weight_shape, self.transposed))
        return weight.transpose(0, 1) if self.transposed else weight

    def starts(self) -> dict[Axis, Tensor]:
        """Starts by axis, in positions, as the trained layer's routing map; on the CPU, never narrowed."""
        return dict(self._starts)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the kernel and the runs anew from the epitome and the routing map; loading a state does it."""
        self._expand = self._runs("out") if self._reuses_filters else ()
        self._wrap = self._runs("in") if self._wraps_inputs else ()
        self.kernel = self._make_kernel()

    def _runs(self, axis: Literal["out", "in"]) -> tuple[Runs, ...]:
        """For each partial product one: with starts per pair of blocks each block of the other axis has its own.

        Groups divide a convolution's filters and repeat its inputs; transposed it is the other way round.
        """
        dim = 0 if axis == "out" else 1
        repeated = (axis == "out") == self.transposed
        starts = self._starts.get(axis)
        parts = (starts,) if starts is None or starts.dim() == 1 else starts.unbind(1 - dim)
        return tuple(
            channel_runs(
                part,
                self.spec.weight_shape[dim],
                self.spec.epitome_shape[dim],
                self.spec.block_out if axis == "out" else self.spec.block_in,
                group_length=self.spec.group_length,
                repeats=self.groups if repeated else 1,
                shared_by=1 if repeated else self.groups,
            )
            for part in parts
        )

    @property
    def _parts(self) -> int:
        """Partial products of one pass: groups of the convolution, each with its part of the kernel."""
        return max(len(self._expand), len(self._wrap), 1)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer; shapes as the trained layer's."""
        return self._expanded(self._convolve(self._wrapped(input), self._convolution_bias))

    @property
    def _reuses_filters(self) -> bool:
        return self.strategy in EXPANDED

    @property
    def _wraps_inputs(self) -> bool:
        return self.strategy in WRAPPED

    @property
    def _convolution_bias(self) -> Tensor | None:
        return None if self._reuses_filters else self.bias

    def _wrapped(self, input: Tensor) -> Tensor:
        if not self._wraps_inputs:
            return input
        size = self.spec.epitome_shape[1] * self.groups
        wrapped = [wrap_channels(input, runs, size, self.channel_dim) for runs in self._wrap]
        return wrapped[0] if len(wrapped) == 1 else torch.cat(wrapped, self.channel_dim)

    def _expanded(self, product_map: Tensor) -> Tensor:
        if not self._reuses_filters:
            return product_map
        first, *others = self._expand
        filters = product_map.shape[self.channel_dim] // len(self._expand)
        part = product_map.narrow(self.channel_dim, 0, filters) if others else product_map
        total = expand_channels(part, first, self.channel_dim)
        for n, runs in enumerate(others, 1):
            part = product_map.narrow(self.channel_dim, n * filters, filters)
            term = expand_channels(part, runs, self.channel_dim)
            total = total + term if torch.compiler.is_exporting() else total.add_(term)
        return self._biased(total)

    def _biased(self, output: Tensor) -> Tensor:
        if self.bias is None:
            return output
        return output + self.bias.view(-1, *[1] * (-1 - self.channel_dim)).to(output.dtype)

    def _convolve(self, input: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    @property
    def _weight(self) -> Tensor:
        kernel = self._make_kernel() if self.generates else self.kernel
        return self.epitome if kernel is None else kernel

    def _make_kernel(self) -> Tensor | None:
        """The weight, reused axes left as short as the epitome's; None if that is the epitome itself."""
        spec = self._kernel_spec()
        repeats = self.groups if self._shared_axis_is_reused else 1
        plain = spec.weight_shape == spec.epitome_shape and not spec.start_shapes and len(self._expand) < 2
        if plain and repeats == 1 and self.epitome.dim() == len(self.weight_shape):
            return None
        epitome = self.epitome.transpose(0, 1) if self.transposed else self.epitome
        starts = {axis: self._starts[axis].to(epitome.device) for axis in spec.start_shapes}
        kernel = sample_weight(epitome, starts, spec)
        space = self.weight_shape[2:]
        kernel = kernel.reshape(kernel.shape[0], -1, *space)  # flatten_kernel: (O, in * prod K) -> (O, in, *K)
        if len(self._expand) > 1:  # filters of all input blocks one after the other
            kernel = kernel.unflatten(1, (len(self._expand), -1)).transpose(0, 1).flatten(0, 1)
        kernel = kernel.transpose(0, 1) if self.transposed else kernel
        return kernel.repeat(repeats, 1, *[1] * len(space)).contiguous()

    def _kernel_spec(self) -> EpitomeSpec:
        (out, in_, *space), (filters, inputs) = self.spec.weight_shape, self.spec.epitome_shape[:2]
        if self._reuses_filters:
            out = filters
        if self._wraps_inputs:
            in_ = inputs
        block_out = filters if self._reuses_filters else self.spec.block_out
        block_in = inputs if self._wraps_inputs else self.spec.block_in
        return replace(
            self.spec,
            weight_shape=(out, in_, *space),
            block_out=block_out,
            block_in=block_in,
            channel_starts="separable",  # an axis that is reused has no starts here
        )

    @property
    def _shared_axis_is_reused(self) -> bool:
        """The groups divide an axis among them that is now the epitome's: each needs a copy of it."""
        return self._wraps_inputs if self.transposed else self._reuses_filters

    # ---- state: the starts are constants of `forward`, kept under the trained layer's names ----

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._map_state().items():
            destination[prefix + name] = value

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
        own = {name: state_dict.get(prefix + name) for name in self._map_state()}
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in own}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys += [prefix + name for name, value in own.items() if strict and value is None]
        for axis, old in self._starts.items():
            new = own[f"routing_map.{axis}_starts"]
            if new is None:
                continue
            if new.shape != old.shape or not torch.isfinite(new).all():
                error_msgs.append(
                    f"{prefix}routing_map.{axis}_starts: expected {tuple(old.shape)} finite starts, got {new}"
                )
                return
            self._starts[axis] = new.detach().to("cpu", torch.promote_types(new.dtype, torch.float32)).clone()
        self.refresh()

    def _map_state(self) -> dict[str, Tensor]:
        state = {f"routing_map.{axis}_starts": value for axis, value in self._starts.items()}
        return state | {"routing_map.frozen": torch.tensor(True)}

    def extra_repr(self) -> str:
        """Strategy and shapes."""
        return f"{self.strategy}, weight={self.weight_shape}, epitome={tuple(self.epitome.shape)}"


class ReuseLinear(ReuseLayer):
    """`EpitomeLinear` with reuse."""

    channel_dim = -1

    def __init__(self, layer: EpitomeLinear, strategy: ReuseStrategy) -> None:
        super().__init__(layer, strategy)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.refresh()

    def _convolve(self, input: Tensor, bias: Tensor | None) -> Tensor:
        if self._parts == 1:
            return F.linear(input, self._weight, bias)
        rows, columns = self._weight.shape[0] // self._parts, self._weight.shape[1]
        products = [
            F.linear(input.narrow(-1, n * columns, columns), self._weight.narrow(0, n * rows, rows))
            for n in range(self._parts)
        ]
        output = torch.cat(products, -1)
        return output if bias is None else output + bias


class _ReuseConvNd(ReuseLayer):
    """What convolutions share: torch's arguments."""

    def __init__(self, layer: Any, strategy: ReuseStrategy) -> None:
        super().__init__(layer, strategy)
        self.in_channels: int = layer.in_channels
        self.out_channels: int = layer.out_channels
        self.kernel_size: tuple[int, ...] = layer.kernel_size
        self.stride: tuple[int, ...] = layer.stride
        self.padding: tuple[int, ...] | str = layer.padding
        self.dilation: tuple[int, ...] = layer.dilation
        self.output_padding: tuple[int, ...] = layer.output_padding
        self.groups: int = layer.groups
        self.padding_mode: str = layer.padding_mode
        self.channel_dim = -1 - len(self.kernel_size)
        self.refresh()


class _ReuseConv(_ReuseConvNd):
    """A convolution, padded as the layer's."""

    def _convolve(self, input: Tensor, bias: Tensor | None) -> Tensor:
        convolve = _CONV[len(self.kernel_size) - 1]
        padding: tuple[int, ...] | str | int = self.padding
        if self.padding_mode != "zeros":
            amounts = amounts_before_and_after(self.padding, self.kernel_size, self.dilation)
            input, padding = F.pad(input, amounts, mode=self.padding_mode), 0
        groups = self.groups * self._parts
        return convolve(input, self._weight, bias, self.stride, padding, self.dilation, groups)


class ReuseConv(_ReuseConv):
    """An epitome convolution with reuse, 1-D to 3-D: a convolution between `A_in^T` and `A_out` over its channels."""


class ReusePartialConv(_ReuseConv):
    """One with starts per pair of blocks on the reused axis: a group of the convolution for each block of the other.

    With "product_map" the groups' products are turned and added up in another way for each output block,
    `y[r] = sum over s of A_out[r, s] · (E[:, s] * x[s])`; with "wrapping" each output block has its own way to wrap the
    input, `y[r] = E[r] * (A_in[r]^T x)`.
    """


class ReuseConvTranspose(_ReuseConvNd):
    """An epitome transposed convolution with reuse, 1-D to 3-D."""

    transposed = True

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Apply the layer; `output_size` as in torch."""
        where = type(self).__name__
        extra = self.output_padding if output_size is None else output_padding(self, input, output_size, where)
        product_map = self._convolve(self._wrapped(input), self._convolution_bias, extra)
        return self._expanded(product_map)

    def _convolve(self, input: Tensor, bias: Tensor | None, extra: Sequence[int] = ()) -> Tensor:
        convolve: Any = _CONV_TRANSPOSE[len(self.kernel_size) - 1]
        return convolve(input, self._weight, bias, self.stride, self.padding, extra or 0, self.groups, self.dilation)


class ReuseDiagonals(_ReuseConvNd):
    """An epitome convolution by product positions and sums along diagonals, 1-D to 3-D.

    `kernel` is the epitome with its window unrolled, shape (groups * rows * prod(L), inputs per group).
    """

    index: Tensor
    shares: Tensor

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the kernel, the rows and the beginnings of the diagonals anew."""
        layout = DiagonalLayout(self.spec, self.groups, self.transposed, self._wraps_inputs)
        epitome = self.epitome.transpose(0, 1) if self.transposed else self.epitome
        starts = {axis: value.to(epitome.device) for axis, value in self._starts.items()}
        self.kernel = product_kernel(epitome, starts, layout)
        self._wrap = self._runs("in") if self._wraps_inputs else ()
        expand = self._runs("out")[0] if layout.compressed else (Run(0, 0, 0, self.out_channels, 0.0),)
        self._layout, reads = layout, reads_of(layout, expand)
        self._expand = (reads.runs,)
        entries = entries_of(reads, beginnings(layout, self._starts), self._integral)
        self._widths = entries.widths
        self.register_buffer("index", entries.index.to(epitome.device), persistent=False)
        shares = entries.shares.to(epitome.device, torch.promote_types(epitome.dtype, torch.float32))
        self.register_buffer("shares", shares, persistent=False)

    @property
    def _integral(self) -> bool:
        return self.strategy in INTEGRAL

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer; shapes as the trained layer's."""
        padding = amounts_before_and_after(self.padding, self.kernel_size, self.dilation)
        return self._respond(input, padding)

    def _respond(self, input: Tensor, padding: list[int]) -> Tensor:
        reach = reach_of(self, input, padding)
        features = self._wrapped(input if input.dim() > len(self.kernel_size) + 1 else input.unsqueeze(0))
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        products = Products(self._layout, reach, tuple(padding), mode, self._integral)
        found = products.responses(features, self._weight, Entries(self.index, self.shares, self._widths))
        output = self._biased(expand_channels(found, self._expand[0], self.channel_dim))
        return output if input.dim() == output.dim() else output.squeeze(0)


class ReuseDiagonalsTranspose(ReuseDiagonals):
    """An epitome transposed convolution of stride 1 by product positions and sums along diagonals, 1-D to 3-D."""

    transposed = True

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Apply the layer; `output_size` as in torch."""
        where = type(self).__name__
        extra = self.output_padding if output_size is None else output_padding(self, input, output_size, where)
        amounts: list[int] = []
        for k in reversed(range(len(self.kernel_size))):
            before = self.dilation[k] * (self.kernel_size[k] - 1) - self.padding[k]  # type: ignore[operator]
            amounts += [before, before + extra[k]]
        return self._respond(input, amounts)
