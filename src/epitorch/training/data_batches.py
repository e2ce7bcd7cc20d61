"""Batches of images on their device: the loader, random crop and flip, normalisation. No worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epitorch.errors import DataError, InputError, explain, suggest
from epitorch.training.data_arrays import ImageArrays

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

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augment a batch in training mode.

        Args:
            images: shape: (B, C, H, W), uint8 or floating, on any device.
            generator: Where the random numbers come from; torch's default generator if None.

        Returns:
            shape: (B, C, H, W), same dtype, device and memory format.

        Raises:
            InputError: If `images` has no four axes or is too small to reflect.
        """
        if not self.training:
            return images
        self._check(images)
        top, left, flip = self.draw(len(images), images.device, generator)
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


class ArrayLoader:
    """Batches `(images, labels)` straight from arrays that lie on their device already.

    An epoch's order depends only on `seed` and on the epoch of the last `set_epoch`; without a call to
    `set_epoch` every pass has the same order. A Lightning trainer makes that call by itself (through
    `sampler`), on resuming too. Every batch is a copy that may be changed in place.

    Args:
        arrays: The set, on the device that trains (`arrays.to(device)`).
        batch_size: Images per batch.
        shuffle: Another order in each epoch; else the order of the set.
        seed: Decides the orders.
        drop_last: Leave out a last batch that is not full.
        channels_last: Yield images in `torch.channels_last`.

    Raises:
        DataError: If `batch_size` is below 1, or above the number of images with `drop_last`.
    """

    batch_sampler = None  # Lightning asks for it where there is a `sampler`

    def __init__(
        self,
        arrays: ImageArrays,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        channels_last: bool = False,
    ) -> None:
        most = len(arrays) if drop_last else None
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise _batch_size_error(arrays, batch_size, "a whole number from 1")
        if most is not None and batch_size > most:
            raise _batch_size_error(arrays, batch_size, f"at most the {most} images there are, with drop_last")
        self.arrays = arrays
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.epoch = 0

    @property
    def sampler(self) -> ArrayLoader:
        """Itself: where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the passes that begin from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        n = len(self.arrays)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `(images, labels)`, shapes (B, C, H, W) uint8 and (B,) int64."""
        order = self._order().to(self.arrays.images.device)
        for index in order.split(self.batch_size)[: len(self)]:
            images = self.arrays.images.index_select(0, index)
            yield (
                images.contiguous(memory_format=self.memory_format),
                self.arrays.labels.index_select(0, index),
            )

    def _order(self) -> Tensor:
        """Return the order of this epoch, drawn on the CPU: the same for every device, shape: (N,)."""
        if not self.shuffle:
            return torch.arange(len(self.arrays))
        # the factor keeps (seed, epoch + 1) apart from (seed + 1, epoch)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(len(self.arrays), generator=generator)


def _batch_size_error(arrays: ImageArrays, batch_size: object, expected: str) -> DataError:
    return DataError(explain("wrong batch_size", expected=expected, got=repr(batch_size), where=arrays.source))
