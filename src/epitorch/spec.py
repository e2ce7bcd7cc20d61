"""EpitomeSpec: the shapes of one generated weight, checked once. Integers only, no torch.

Shapes here are *semantic*: `(out, in, *kernel)` whatever the storage order of the layer. A convolution's `out` axis is
`C_out` and its `in` axis `C_in/groups`; a transposed convolution's are `C_out/groups` and `C_in`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Literal

from epitorch.errors import ShapeError, explain

SpatialStarts = Literal["in", "out", "grid"]
ChannelStarts = Literal["separable", "grid", "grid_out", "grid_in"]
Axis = Literal["out", "in", "spatial"]

SPATIAL_STARTS = ("in", "out", "grid")
CHANNEL_STARTS = ("separable", "grid", "grid_out", "grid_in")


@dataclass(frozen=True)
class EpitomeSpec:
    """How a weight is cut into blocks and which start indices it has.

    Args:
        weight_shape: `(out, in, *K)`, semantic.
        epitome_shape: `(O, I, *L)`, semantic.
        block_out: Patch length along the filters (the paper's beta_2), at most `O`; default `O`.
        block_in: Patch length along the input channels (beta_1), at most `I`; default `I`.
        spatial_starts: Which blocks own the spatial starts: input blocks (the paper), output blocks (WSNet) or pairs.
        channel_starts: One start per block of an axis (the paper) or one per (output, input) pair of blocks: on both
            channel axes ("grid"), on the filters alone ("grid_out") or on the input channels alone ("grid_in").
        group_length: Length g of the super-index on the channel axes; None or 1 is plain interpolation.
        spatial_shift: Give every spatial axis longer than 1 starts, also where `L_k = K_k`.

    Raises:
        ShapeError: If sizes are not positive or do not fit together.
    """

    weight_shape: tuple[int, ...]
    epitome_shape: tuple[int, ...]
    block_out: int
    block_in: int
    spatial_starts: SpatialStarts = "in"
    channel_starts: ChannelStarts = "separable"
    group_length: int = 1
    spatial_shift: bool = False

    @classmethod
    def create(
        cls,
        weight_shape: Sequence[int],
        epitome_shape: Sequence[int],
        *,
        block_out: int | None = None,
        block_in: int | None = None,
        spatial_starts: SpatialStarts = "in",
        channel_starts: ChannelStarts = "separable",
        group_length: int | None = None,
        spatial_shift: bool = False,
    ) -> EpitomeSpec:
        """Fill in the defaults and check."""
        weight = _positive("weight shape", weight_shape)
        epitome = _positive("epitome shape", epitome_shape)
        if len(weight) != len(epitome):
            raise ShapeError(
                explain(
                    "the epitome has another number of axes than the weight",
                    expected=f"{len(weight)} sizes, as in the weight's {weight}",
                    got=f"{len(epitome)} sizes: {epitome}",
                    fix="give epitome_shape one size per axis of the weight",
                )
            )
        return cls(
            weight,
            epitome,
            epitome[0] if block_out is None else block_out,
            epitome[1] if block_in is None else block_in,
            spatial_starts,
            channel_starts,
            1 if group_length is None else group_length,
            spatial_shift,
        )

    @classmethod
    def for_layer(
        cls,
        weight_shape: Sequence[int],
        epitome_shape: Sequence[int],
        *,
        transposed: bool = False,
        flatten_kernel: bool = False,
        block_out: int | None = None,
        block_in: int | None = None,
        spatial_starts: SpatialStarts = "in",
        channel_starts: ChannelStarts = "separable",
        group_length: int | None = None,
        spatial_shift: bool = False,
    ) -> EpitomeSpec:
        """The same from shapes in a layer's storage order.

        Args:
            weight_shape: As the layer stores it; transposed convolutions have the input axis first.
            epitome_shape: Likewise.
            transposed: The layer is a transposed convolution.
            flatten_kernel: View the weight as the matrix `(out, in * prod K)`.
            block_out: See the class.
            block_in: See the class.
            spatial_starts: See the class.
            channel_starts: See the class.
            group_length: See the class.
            spatial_shift: See the class.
        """
        weight = semantic_order(_positive("weight shape", weight_shape), transposed)
        return cls.create(
            (weight[0], prod(weight[1:])) if flatten_kernel else weight,
            semantic_order(_positive("epitome shape", epitome_shape), transposed),
            block_out=block_out,
            block_in=block_in,
            spatial_starts=spatial_starts,
            channel_starts=channel_starts,
            group_length=group_length,
            spatial_shift=spatial_shift,
        )

    def __post_init__(self) -> None:
        _choice("spatial_starts", self.spatial_starts, SPATIAL_STARTS)
        _choice("channel_starts", self.channel_starts, CHANNEL_STARTS)
        for name, block, size in (
            ("block_out", self.block_out, self.epitome_shape[0]),
            ("block_in", self.block_in, self.epitome_shape[1]),
        ):
            if not _is_size(block) or block > size:
                raise ShapeError(
                    explain(
                        f"{name} does not fit its axis of the epitome",
                        expected=f"a whole number from 1 to {size}",
                        got=repr(block),
                        fix=f"leave {name} out (it is then {size}) or make it at most {size}",
                    )
                )
        self._check_group_length()

    def _check_group_length(self) -> None:
        g = self.group_length
        for name, size, has in (
            ("out", self.epitome_shape[0], self.has_out_starts),
            ("in", self.epitome_shape[1], self.has_in_starts),
        ):
            if not _is_size(g) or (has and size % g):
                raise ShapeError(
                    explain(
                        f"group_length does not divide the epitome's '{name}' axis",
                        expected=f"a divisor of {size}",
                        got=repr(g),
                        fix="choose an epitome size that is a multiple of group_length, or group_length=1",
                    )
                )

    # ---- axes and blocks ----

    @property
    def kernel(self) -> tuple[int, ...]:
        """The weight's spatial sizes `K`."""
        return self.weight_shape[2:]

    @property
    def window(self) -> tuple[int, ...]:
        """The epitome's spatial sizes `L`."""
        return self.epitome_shape[2:]

    @property
    def num_out_blocks(self) -> int:
        """R_cout: samplings along the filters."""
        return ceil(self.weight_shape[0] / self.block_out)

    @property
    def num_in_blocks(self) -> int:
        """R_cin: samplings along the input channels."""
        return ceil(self.weight_shape[1] / self.block_in)

    @property
    def has_out_starts(self) -> bool:
        """The filter axis is compressed and longer than 1."""
        return 1 < self.epitome_shape[0] < self.weight_shape[0]

    @property
    def has_in_starts(self) -> bool:
        """The input axis is compressed and longer than 1, or shifted by each output block of a grid."""
        if self.epitome_shape[1] == 1:
            return False
        shifted = self.owners("in") == "grid" and self.num_out_blocks > 1
        return self.epitome_shape[1] < self.weight_shape[1] or shifted

    @cached_property
    def spatial_axes(self) -> tuple[int, ...]:
        """The spatial axes (counted from 0) that have starts."""
        sizes = enumerate(zip(self.kernel, self.window, strict=True))
        return tuple(k for k, (K, L) in sizes if L > 1 and (K != L or self.spatial_shift))

    @cached_property
    def start_shapes(self) -> dict[Axis, tuple[int, ...]]:
        """Shape of each array of starts, in the order out, in, spatial; only those that exist."""
        pairs = (self.num_out_blocks, self.num_in_blocks)
        owned = {"in": pairs[1:], "out": pairs[:1], "grid": pairs}
        shapes: dict[Axis, tuple[int, ...]] = {}
        if self.has_out_starts:
            shapes["out"] = owned[self.owners("out")]
        if self.has_in_starts:
            shapes["in"] = owned[self.owners("in")]
        if self.spatial_axes:
            shapes["spatial"] = (*owned[self.owners("spatial")], len(self.spatial_axes))
        return shapes

    @cached_property
    def start_sizes(self) -> dict[Axis, tuple[int, ...]]:
        """Length of the epitome axis behind each start: one number, or one per spatial axis with starts."""
        sizes: dict[Axis, tuple[int, ...]] = {
            "out": self.epitome_shape[:1],
            "in": self.epitome_shape[1:2],
            "spatial": tuple(self.window[k] for k in self.spatial_axes),
        }
        return {axis: sizes[axis] for axis in self.start_shapes}

    def owners(self, axis: Axis) -> SpatialStarts:
        """Which blocks have starts of their own on an axis: output blocks, input blocks, or pairs of them."""
        if axis == "spatial":
            return self.spatial_starts
        return "grid" if self.channel_starts in ("grid", f"grid_{axis}") else axis

    def group(self, axis: Axis) -> int:
        """Distance of the grid that starts on this axis interpolate between: g on channels, 1 in space."""
        return 1 if axis == "spatial" else self.group_length

    # ---- sizes ----

    @cached_property
    def num_starts(self) -> int:
        """Numbers in the routing map."""
        return sum(prod(shape) for shape in self.start_shapes.values())

    @property
    def num_epitome(self) -> int:
        """Parameters in the epitome."""
        return prod(self.epitome_shape)

    @property
    def num_weight(self) -> int:
        """Parameters in the weight that is generated."""
        return prod(self.weight_shape)

    @property
    def ratio(self) -> float:
        """Compression ratio r: weight parameters over epitome plus routing map. Below 1 it is an expansion."""
        return self.num_weight / (self.num_epitome + self.num_starts)

    @property
    def separable(self) -> bool:
        """The weight is `A_out · E · A_in^T`: channel starts per block, spatial starts none or one for all blocks."""
        shared = "spatial" not in self.start_shapes or prod(self.start_shapes["spatial"][:-1]) == 1
        return self.channel_starts == "separable" and shared


def semantic_order(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Storage order to `(out, in, *kernel)`, or back."""
    sizes = tuple(shape)
    return (*sizes[1::-1], *sizes[2:]) if transposed else sizes


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _positive(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if len(sizes) < 2 or not all(_is_size(n) for n in sizes):
        raise ShapeError(
            explain(
                f"{name} is not valid",
                expected="at least two sizes (out, in, *kernel), each a whole number above 0",
                got=repr(sizes),
            )
        )
    return sizes


def _choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ShapeError(explain(f"{name} is not valid", expected=" | ".join(known), got=repr(value)))
