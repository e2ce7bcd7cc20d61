"""Epitome convolutions: one N-d base, thin 1d, 2d and 3d classes, and the same transposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epitorch.errors import ShapeError, explain
from epitorch.nn._base import EpitomeLayer, Index
from epitorch.nn._padding import amounts_before_and_after, output_padding
from epitorch.spec import ChannelStarts, SpatialStarts

Size = int | tuple[int, ...]
Padding = Size | Literal["same", "valid"]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]

_FEW_ROWS = 1024  # samples times positions up to which a matrix product beats the convolution operator on a CPU
_CONV = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class _EpitomeConvNd(EpitomeLayer):
    """Shared by the N-d convolutions. The dense class checks the arguments and supplies the defaults."""

    dense_class: ClassVar[type[nn.Module]]
    spatial_dims: ClassVar[int]

    def _take_arguments(self, dense: Any) -> None:
        """Copy torch's own normalised arguments."""
        self.in_channels: int = dense.in_channels
        self.out_channels: int = dense.out_channels
        self.kernel_size: tuple[int, ...] = dense.kernel_size
        self.stride: tuple[int, ...] = dense.stride
        self.padding: tuple[int, ...] | str = dense.padding
        self.dilation: tuple[int, ...] = dense.dilation
        self.output_padding: tuple[int, ...] = dense.output_padding
        self.groups: int = dense.groups
        self.padding_mode: str = dense.padding_mode

    def _dense(self, bias: bool, arguments: dict[str, Any]) -> Any:
        """Torch's layer on the meta device; its complaints become ours."""
        for name in ("in_channels", "out_channels", "groups"):
            _check_sizes(type(self).__name__, name, arguments[name], least=1, axes=0)
        per_axis = {"kernel_size": 1, "stride": 1, "dilation": 1, "padding": 0, "output_padding": 0}
        for name, least in per_axis.items():
            _check_sizes(type(self).__name__, name, arguments.get(name, least), least, self.spatial_dims)
        try:
            return self.dense_class(bias=bias, device="meta", **arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            raise ShapeError(
                explain(
                    f"{error}",
                    expected=f"arguments that torch.nn.{self.dense_class.__name__} takes",
                    got=shown,
                    where=type(self).__name__,
                )
            ) from error

    def _check_input(self, input: Tensor) -> None:
        channels = input.shape[-1 - self.spatial_dims] if input.dim() > self.spatial_dims else None
        if input.dim() - self.spatial_dims not in (1, 2) or channels != self.in_channels:
            space = ", ".join(["size"] * self.spatial_dims)
            raise ShapeError(
                explain(
                    "the input does not fit the layer",
                    expected=f"shape (N, {self.in_channels}, {space}) or ({self.in_channels}, {space})",
                    got=tuple(input.shape),
                    where=self._where,
                )
            )

    def _arguments(self) -> dict[str, Any]:
        names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"]
        names += ["padding_mode", "output_padding"] if self.transposed else ["padding_mode"]
        return {name: getattr(self, name) for name in names}

    def to_dense(self) -> nn.Module:
        """Return torch's own convolution with the generated weight."""
        return self._fill_dense(self._dense(self.bias is not None, self._arguments()))

    def extra_repr(self) -> str:
        """Arguments, as torch shows them."""
        shown = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        shown += [f"padding={self.padding}"] if self.padding != (0,) * self.spatial_dims else []
        shown += [f"output_padding={self.output_padding}"] if any(self.output_padding) else []
        shown += [f"dilation={self.dilation}"] if self.dilation != (1,) * self.spatial_dims else []
        shown += [f"groups={self.groups}"] if self.groups != 1 else []
        shown += [f"padding_mode={self.padding_mode}"] if self.padding_mode != "zeros" else []
        shown += ["bias=False"] if self.bias is None else []
        return ", ".join([*shown, self._epitome_repr()])


class _EpitomeConv(_EpitomeConvNd):
    """A convolution whose weight `(C_out, C_in/groups, *K)` is generated from an epitome `(O, I, *L)`.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: K, a number or one per spatial axis.
        stride: Stride of the convolution.
        padding: Numbers, "same" or "valid".
        dilation: Spacing of the kernel's elements.
        groups: Blocked connections; all groups share the epitome, filter blocks run over all C_out.
        bias: Learn an additive bias.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        device: Where parameters are made.
        dtype: Of epitome and bias; starts are float32 or wider.
        epitome_shape: `(O, I, *L)`; with `flatten_kernel` `(O, I)`.
        block_out: beta_2, at most O; default O.
        block_in: beta_1, at most I; default I.
        spatial_starts: Which blocks own spatial starts: "in" (the paper), "out" (WSNet) or "grid".
        channel_starts: "separable" (the paper), or one start per pair of blocks: "grid" on both channel axes,
            "grid_out" on the filters, "grid_in" on the input channels; these two share partial products when deployed.
        index: "learner" (eta, section 3.2 of the paper), "direct" (starts are parameters) or "fixed" (WSNet).
        group_length: Super-index length l_g on the channel axes.
        flatten_kernel: View the weight as the matrix `(C_out, C_in/groups * prod K)`: the paper's general case.
        momentum: mu of the routing map's moving average.
        spatial_shift: Give spatial axes starts also where `L_k = K_k`.

    Raises:
        ShapeError: If sizes do not fit together.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        epitome_shape: Sequence[int],
        block_out: int | None = None,
        block_in: int | None = None,
        spatial_starts: SpatialStarts = "in",
        channel_starts: ChannelStarts = "separable",
        index: Index = "learner",
        group_length: int | None = None,
        flatten_kernel: bool = False,
        momentum: float = 0.97,
        spatial_shift: bool = False,
    ) -> None:
        super().__init__()
        arguments = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "kernel_size": kernel_size,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": groups,
            "padding_mode": padding_mode,
        }
        dense = self._dense(bias, arguments)
        self._take_arguments(dense)
        self._pad = amounts_before_and_after(self.padding, self.kernel_size, self.dilation)
        self._build(
            tuple(dense.weight.shape),
            epitome_shape,
            in_channels,
            bias,
            {"device": device, "dtype": dtype},
            block_out=block_out,
            block_in=block_in,
            spatial_starts=spatial_starts,
            channel_starts=channel_starts,
            index=index,
            group_length=group_length,
            flatten_kernel=flatten_kernel,
            momentum=momentum,
            spatial_shift=spatial_shift,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Convolve an input of shape (N, C_in, *space) or (C_in, *space)."""
        self._check_input(input)
        weight = self._weight_for(input)
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._pad, mode=self.padding_mode), 0
        if self._pointwise and _few_rows_on_cpu(input, self.spatial_dims):
            return _pointwise(input, weight, self.bias)
        convolve = _CONV[self.spatial_dims - 1]
        return convolve(input, weight, self.bias, self.stride, padding, self.dilation, self.groups)

    @property
    def _pointwise(self) -> bool:
        """A matrix product over channels: kernel and stride 1, no padding, one group."""
        ones = (1,) * self.spatial_dims
        unpadded = self.padding in ("same", "valid", (0,) * self.spatial_dims)
        return self.kernel_size == ones and self.stride == ones and self.groups == 1 and unpadded


class _EpitomeConvTranspose(_EpitomeConvNd):
    """A transposed convolution whose weight `(C_in, C_out/groups, *K)` is generated from an epitome `(I, O, *L)`.

    Arguments as torch's, then as the convolutions' (`EpitomeConv2d`). The names of blocks and starts are semantic:
    "out" is the axis `C_out/groups`, "in" is the axis `C_in`.

    Raises:
        ShapeError: If sizes do not fit together.
    """

    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: Literal["zeros"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        epitome_shape: Sequence[int],
        block_out: int | None = None,
        block_in: int | None = None,
        spatial_starts: SpatialStarts = "in",
        channel_starts: ChannelStarts = "separable",
        index: Index = "learner",
        group_length: int | None = None,
        flatten_kernel: bool = False,
        momentum: float = 0.97,
        spatial_shift: bool = False,
    ) -> None:
        super().__init__()
        arguments = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "kernel_size": kernel_size,
            "stride": stride,
            "padding": padding,
            "output_padding": output_padding,
            "groups": groups,
            "dilation": dilation,
            "padding_mode": padding_mode,
        }
        dense = self._dense(bias, arguments)
        self._take_arguments(dense)
        self._build(
            tuple(dense.weight.shape),
            epitome_shape,
            in_channels,
            bias,
            {"device": device, "dtype": dtype},
            block_out=block_out,
            block_in=block_in,
            spatial_starts=spatial_starts,
            channel_starts=channel_starts,
            index=index,
            group_length=group_length,
            flatten_kernel=flatten_kernel,
            momentum=momentum,
            spatial_shift=spatial_shift,
        )

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Convolve an input of shape (N, C_in, *space) or (C_in, *space); `output_size` as in torch."""
        self._check_input(input)
        weight = self._weight_for(input)
        extra = self.output_padding if output_size is None else output_padding(self, input, output_size, self._where)
        convolve = _CONV_TRANSPOSE[self.spatial_dims - 1]
        padding: Any = self.padding
        return convolve(input, weight, self.bias, self.stride, padding, extra, self.groups, self.dilation)


class EpitomeConv1d(_EpitomeConv):
    """`torch.nn.Conv1d` with an epitome; arguments as `EpitomeConv2d`."""

    dense_class, spatial_dims = nn.Conv1d, 1


class EpitomeConv2d(_EpitomeConv):
    __doc__ = (
        (_EpitomeConv.__doc__ or "")
        + """
    Example:
        >>> layer = EpitomeConv2d(64, 128, 3, padding=1, epitome_shape=(32, 64, 3, 3))
        >>> layer(torch.zeros(1, 64, 8, 8)).shape, layer.weight.shape, layer.starts()["out"].shape
        (torch.Size([1, 128, 8, 8]), torch.Size([128, 64, 3, 3]), torch.Size([4]))
    """
    )

    dense_class, spatial_dims = nn.Conv2d, 2


class EpitomeConv3d(_EpitomeConv):
    """`torch.nn.Conv3d` with an epitome; arguments as `EpitomeConv2d`."""

    dense_class, spatial_dims = nn.Conv3d, 3


class EpitomeConvTranspose1d(_EpitomeConvTranspose):
    """`torch.nn.ConvTranspose1d` with an epitome; see `EpitomeConvTranspose2d`."""

    dense_class, spatial_dims = nn.ConvTranspose1d, 1


class EpitomeConvTranspose2d(_EpitomeConvTranspose):
    __doc__ = _EpitomeConvTranspose.__doc__

    dense_class, spatial_dims = nn.ConvTranspose2d, 2


class EpitomeConvTranspose3d(_EpitomeConvTranspose):
    """`torch.nn.ConvTranspose3d` with an epitome; see `EpitomeConvTranspose2d`."""

    dense_class, spatial_dims = nn.ConvTranspose3d, 3


def _few_rows_on_cpu(input: Tensor, spatial_dims: int) -> bool:
    """A small batch (not a single sample, whose rank is that of a batch with one axis less) in channels-last layout."""
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}.get(spatial_dims)
    if input.device.type != "cpu" or layout is None or input.dim() != spatial_dims + 2:
        return False
    few = input.numel() <= _FEW_ROWS * input.shape[1]
    return few and input.is_contiguous(memory_format=layout)


def _pointwise(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1x1 convolution of channels-last data as the matrix product that it is.

    On a CPU forward and backward of small maps (512 to 1024 rows of pixels) took 0.4 to 0.6 of the time that the
    convolution operator takes; from 2048 rows on there was no gain.
    """
    return F.linear(input.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def _check_sizes(layer: str, name: str, value: Any, least: int, axes: int) -> None:
    """A whole number from `least` up, or one per axis; words such as "same" are torch's to check."""
    many = isinstance(value, tuple | list)
    sizes = value if many else (value,)
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= least for size in sizes)
    if isinstance(value, str) or (whole and (not many or len(sizes) == axes)):
        return
    expected = f"a whole number from {least} up" + (f", or a tuple of {axes}" if axes else "")
    raise ShapeError(explain(f"{name} is not valid", expected=expected, got=repr(value), where=layer))
