"""Random fused stages with what the literal loops need to compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference_fused as loops
import torch
from hypothesis import strategies as st
from torch import Tensor

from epitorch.deploy._fused_block import ACTIVATIONS, GATES, Activation, Gate, Settings, Squeeze, Stage, Taps
from epitorch.functional import split_starts


@dataclass(frozen=True)
class Axis:
    """One epitome axis: starts (None: no epitome), its size, block length and group length."""

    starts: Any
    size: int
    block: int
    group: int

    def taps(self, channels: int) -> Taps:
        if self.starts is None:
            return Taps.identity(channels)
        shift = split_starts(torch.tensor(self.starts, dtype=torch.float64), self.size, self.group)
        position = torch.arange(channels)
        lower = (shift.base[position // self.block] + position % self.block) % self.size
        return Taps(lower, shift.fraction[position // self.block], self.size, self.group)

    def matrix(self, channels: int) -> loops.Array:
        starts = None if self.starts is None else np.array(self.starts)
        return loops.mixing(starts, channels, self.size, self.block, self.group)


@dataclass(frozen=True)
class Case:
    """Shapes and options of one inverted residual."""

    channels: tuple[int, int, int]  # input, expanded, output
    filters: Axis | None  # None: no first 1x1
    inputs: Axis
    kernel: int
    stride: int
    padding: int
    activations: tuple[Activation, Activation, Activation]
    shape: tuple[int, int, int]  # batch, rows, columns
    seed: int
    squeeze: tuple[int, Activation, Gate] | None = None  # width of the squeeze-excitation, activation, gate

    @property
    def residual(self) -> bool:
        keeps = self.stride == 1 and 2 * self.padding + 1 == self.kernel
        return keeps and self.channels[0] == self.channels[2]

    def stage(self) -> Stage:
        generator = torch.Generator().manual_seed(self.seed)
        first, hidden, last = self.channels

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        filters = self.filters or Axis(None, hidden, 1, 1)
        settings = Settings(
            "block",
            self.stride,
            self.padding,
            self.activations,
            self.residual,
            filters.group,
            self.inputs.group,
            None if self.squeeze is None else self.squeeze[1:],
        )
        return Stage(
            settings,
            draw(last, self.inputs.size) / self.inputs.size**0.5,
            draw(last),
            None if self.filters is None else draw(filters.size, first) / first**0.5,
            filters.taps(hidden),
            draw(hidden),
            draw(hidden),
            draw(hidden, 1, self.kernel, self.kernel) / self.kernel,
            draw(hidden),
            self.inputs.taps(hidden),
            self._squeeze(draw),
        )

    def _squeeze(self, draw: Callable[..., Tensor]) -> Squeeze | None:
        if self.squeeze is None:
            return None
        hidden, narrow = self.channels[1], self.squeeze[0]
        first, second = draw(narrow, hidden) / hidden**0.5, draw(hidden, narrow) / narrow**0.5
        return Squeeze(first, draw(narrow), second, draw(hidden))

    def input(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        batch, rows, columns = self.shape
        return torch.randn(batch, self.channels[0], rows, columns, generator=generator, dtype=torch.float64)

    def expected(self, stage: Stage) -> Tensor:
        """By literal loops, one image after the other."""
        images = [self._image(stage, x.numpy()) for x in self.input()]
        rows, columns = ((n + 2 * self.padding - self.kernel) // self.stride + 1 for n in self.shape[1:])
        return torch.tensor(np.array(images).reshape(self.shape[0], self.channels[2], rows, columns))

    def _image(self, stage: Stage, x: loops.Array) -> loops.Array:
        hidden, (first, second, third) = self.channels[1], self.activations
        p = x
        if self.filters is not None:
            assert stage.expand is not None
            p = loops.pointwise(self.filters.matrix(hidden) @ stage.expand.numpy(), x)
        assert stage.scale is not None
        assert stage.shift is not None
        assert stage.depthwise is not None
        assert stage.depthwise_bias is not None
        scale, shift = stage.scale.numpy()[:, None, None], stage.shift.numpy()[:, None, None]
        e = loops.apply(first, p * scale + shift)
        f = loops.depthwise(e, stage.depthwise.numpy()[:, 0], stage.depthwise_bias.numpy(), self.stride, self.padding)
        f = loops.apply(second, f)
        if self.squeeze is not None:
            assert stage.squeeze is not None
            a, b, c, d = (value.numpy() for value in stage.squeeze.tensors())
            f = loops.squeeze(f, (a, b), (c, d), *self.squeeze[1:])
        weight = stage.project.numpy() @ self.inputs.matrix(hidden).T  # the dense weight of the last 1x1
        y = loops.pointwise(weight, f) + stage.bias.numpy()[:, None, None]
        y = loops.apply(third, y)
        return y + x if self.residual else y


@st.composite
def axes(draw: st.DrawFn, channels: int) -> Axis:
    group = draw(st.sampled_from([1, 1, 1, 2, 4, 8]))
    size = group * draw(st.integers(1, max(1, min(channels, 44) // group)))
    block = draw(st.sampled_from([size, size, size, max(1, size // 2), max(1, size - 1)]))
    count = -(-channels // block)
    where = draw(st.sampled_from(["fractional", "whole", "mixed"]))
    seed = draw(st.integers(0, 1000))
    values = np.random.default_rng(seed).uniform(0, size, count)
    whole = np.floor(values / group) * group
    chosen = {"fractional": values, "whole": whole, "mixed": np.where(np.arange(count) % 2, values, whole)}[where]
    return Axis(tuple(chosen.tolist()), size, block, group)


@st.composite
def cases(draw: st.DrawFn, *, squeezed: bool = True) -> Case:
    hidden = draw(st.integers(1, 90))
    first = draw(st.integers(1, 20))
    expands = draw(st.integers(0, 4)) > 0
    first = first if expands else hidden
    last = draw(st.sampled_from([first, draw(st.integers(1, 40))]))
    kernel = draw(st.sampled_from([3, 3, 5, 7]))
    padding = draw(st.sampled_from([kernel // 2, kernel // 2, 0, 1]))
    least = max(1, kernel - 2 * padding)
    shape = (
        draw(st.sampled_from([1, 1, 3, 0])),
        draw(st.integers(least, least + 9)),
        draw(st.integers(least, least + 9)),
    )
    names = st.sampled_from(ACTIVATIONS)
    activations = (draw(names), draw(names), draw(st.sampled_from(["identity", draw(names)])))
    filters = draw(axes(hidden)) if expands else None
    inputs = draw(st.sampled_from([draw(axes(hidden)), Axis(None, hidden, 1, 1)]))
    stride = draw(st.sampled_from([1, 2]))
    seed = draw(st.integers(0, 10_000))
    squeeze = None
    if squeezed:
        squeeze = draw(st.sampled_from([None, (draw(st.integers(1, 20)), draw(names), draw(st.sampled_from(GATES)))]))
    return Case((first, hidden, last), filters, inputs, kernel, stride, padding, activations, shape, seed, squeeze)
