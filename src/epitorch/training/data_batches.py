"""What is done to a batch of images where it lies: random crop and flip, normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epitorch.errors import InputError, explain, suggest
from epitorch.training.ranks import ALONE, Ranks

PaddingMode = Literal["zeros", "reflect"]


def crop_flip(
    images: Tensor, top: Tensor, left: Tensor, flip: Tensor, padding: int, mode: PaddingMode = "zeros"
) -> Tensor:
    """Pad every image, cut a window of the old size out of it, and mirror some windows left to right.

    One gather for the whole batch, whatever the offsets.

    Args:
        images: shape: (B, C, H, W), any dtype.
        top: First row of each window in the padded image, shape: (B,), integers in 0..2*padding.
        left: First column likewise, shape: (B,).
        flip: Which windows are mirrored, shape: (B,), bool.
        padding: Pixels added on each side.
        mode: What is added: `zeros`, or `reflect` (without repeating the edge; needs padding < H and < W).

    Returns:
        shape: (B, C, H, W), dtype and memory format of `images`.
    """
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device) + top[:, None]  # shape: (B, H)
    columns = torch.arange(width, device=images.device)
    columns = torch.where(flip[:, None], columns.flip(0), columns) + left[:, None]  # shape: (B, W)
    padded = F.pad(images, (padding,) * 4, "constant" if mode == "zeros" else "reflect")
    index = rows[:, :, None] * padded.shape[3] + columns[:, None, :]  # shape: (B, H, W)
    index = index.view(batch, 1, height * width).expand(-1, channels, -1)
    cut = padded.flatten(2).gather(2, index).view(batch, channels, height, width)
    return cut.contiguous(memory_format=_memory_format(images))


def _memory_format(images: Tensor) -> torch.memory_format:
    """The layout of a batch; contiguous where both would describe it."""
    last = torch.channels_last
    channels_last = images.is_contiguous(memory_format=last) and not images.is_contiguous()
    return last if channels_last else torch.contiguous_format


class BatchAugment(nn.Module):
    """Random crop after padding, and random mirroring, another one for each image of a batch.

    The identity in eval mode.

    Args:
        padding: Pixels added on each side before the crop; 0 leaves the crop out.
        flip: Mirror left to right with probability one half.
        mode: `zeros` or `reflect`.

    Raises:
        InputError: If `padding` is negative or the mode unknown.
    """

    def __init__(self, padding: int = 4, *, flip: bool = True, mode: PaddingMode = "zeros") -> None:
        super().__init__()
        if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
            raise InputError(explain("wrong padding", expected="a whole number from 0", got=repr(padding)))
        if mode not in get_args(PaddingMode):
            known = list(get_args(PaddingMode))
            asked = f"unknown padding mode{suggest(str(mode), known)}"
            raise InputError(explain(asked, expected=" or ".join(known), got=repr(mode)))
        self.padding = padding
        self.flip = flip
        self.mode: PaddingMode = mode

    def draw(
        self, batch: int, device: torch.device, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw what `crop_flip` needs for a batch.

        Random numbers come from the generator's own device, so that a CPU generator gives the same
        augmentation wherever the images are.

        Returns:
            `(top, left, flip)`, each of shape (B,), on `device`.
        """
        source = device if generator is None else generator.device
        offsets = torch.randint(2 * self.padding + 1, (2, batch), generator=generator, device=source)
        coins = torch.randint(2 if self.flip else 1, (batch,), generator=generator, device=source)
        top, left = offsets.to(device)
        return top, left, coins.to(device).bool()

    def forward(self, images: Tensor, generator: torch.Generator | None = None, *, ranks: Ranks = ALONE) -> Tensor:
        """Augment a batch in training mode.

        Args:
            images: shape: (B, C, H, W), uint8 or floating, on any device.
            generator: Where the random numbers come from; torch's default generator if None.
            ranks: Processes that hold the parts of one batch, with generators in the same state: an image is augmented
                as it would be by one process.

        Returns:
            shape: (B, C, H, W), same dtype, device and memory format.

        Raises:
            InputError: If `images` has no four axes or is too small to reflect.
        """
        if not self.training:
            return images
        self._check(images)
        own = slice(ranks.rank * len(images), (ranks.rank + 1) * len(images))
        top, left, flip = (value[own] for value in self.draw(ranks.world * len(images), images.device, generator))
        return crop_flip(images, top, left, flip, self.padding, self.mode)

    def _check(self, images: Tensor) -> None:
        shape = tuple(images.shape)
        too_small = self.mode == "reflect" and min(shape[2:], default=0) <= self.padding
        if images.ndim != 4 or too_small:
            size = f", H and W above the padding of {self.padding}" if self.mode == "reflect" else ""
            raise InputError(explain("cannot crop these images", expected=f"(B, C, H, W){size}", got=f"shape {shape}"))

    def extra_repr(self) -> str:
        """Arguments, for `repr`."""
        return f"padding={self.padding}, flip={self.flip}, mode={self.mode!r}"


class Normalize(nn.Module):
    """`(x - mean) / std` per channel, with x on the scale 0 to 1; uint8 images are divided by 255 first.

    Mean and standard deviation are part of the state, so that a checkpoint evaluates as it was trained.

    Args:
        mean: One per channel, scale 0 to 1; see `channel_stats`.
        std: One per channel, above 0.

    Raises:
        InputError: If the lengths differ or a value is not usable.
    """

    mean: Tensor  # shape: (C, 1, 1)
    std: Tensor  # shape: (C, 1, 1)

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        m, s = torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)
        usable = m.ndim == 1 and m.shape == s.shape and m.isfinite().all() and s.isfinite().all() and (s > 0).all()
        if not usable or not len(m):
            raise InputError(
                explain(
                    "wrong mean or std",
                    expected="one finite mean and one std above 0 for each channel",
                    got=f"mean {list(mean)}, std {list(std)}",
                )
            )
        self.register_buffer("mean", m[:, None, None])
        self.register_buffer("std", s[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Normalise a batch.

        Args:
            images: shape: (B, C, H, W), uint8 in 0..255 or floating in 0..1.

        Returns:
            shape: (B, C, H, W), dtype of `mean` for uint8 images, else their own; memory format kept.

        Raises:
            InputError: If the number of channels differs.
        """
        if images.ndim < 3 or images.shape[-3] != len(self.mean):
            raise InputError(
                explain(
                    "cannot normalise these images",
                    expected=f"(B, {len(self.mean)}, H, W)",
                    got=f"shape {tuple(images.shape)}",
                )
            )
        if images.dtype == torch.uint8:
            return (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        return (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)

    def extra_repr(self) -> str:
        """Mean and standard deviation, for `repr`."""
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"
