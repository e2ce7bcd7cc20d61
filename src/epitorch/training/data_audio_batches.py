"""Batches of waveforms: random crops and gain, normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from epitorch.errors import InputError, explain
from epitorch.training.data_audio import FULL_SCALE
from epitorch.training.ranks import ALONE, Ranks

QUIET = 32  # of 32768, -60 dB: what lies below at both ends of a clip counts as silence


def crop_sounds(waves: Tensor, first: Tensor, length: int) -> Tensor:
    """Cut a window out of each clip; outside the clip there are zeros.

    Args:
        waves: shape: (B, C, T), any dtype.
        first: First sample of each window, shape: (B,), whole numbers; may be negative.
        length: Samples in a window.

    Returns:
        shape: (B, C, length), dtype of `waves`.
    """
    batch, channels, samples = waves.shape
    at = first[:, None] + torch.arange(length, device=waves.device)  # shape: (B, length)
    index = at.clamp(0, samples - 1)[:, None].expand(batch, channels, length)
    return waves.gather(2, index).masked_fill(((at < 0) | (at >= samples))[:, None], 0)


def sounding_part(waves: Tensor) -> tuple[Tensor, Tensor]:
    """Return first and one past the last sample above -60 dB of full scale; the whole clip if there is none.

    Args:
        waves: shape: (B, 1, T), int16.

    Returns:
        `(begin, end)`, each of shape (B,), int64.
    """
    samples = waves.shape[-1]
    loud = (waves > QUIET).logical_or_(waves < -QUIET)[:, 0]  # abs(-32768) does not exist in int16
    whole = ~loud.any(1)
    begin = loud.to(torch.uint8).argmax(1).masked_fill(whole, 0)
    end = samples - loud.flip(1).to(torch.uint8).argmax(1)
    return begin, end.masked_fill(whole, samples)


class SoundAugment(nn.Module):
    """A random crop and a random gain for each clip of a batch; the identity in eval mode.

    Many clips are short sounds followed by silence, so crops are drawn around the sounding part: the window begins
    at most half its length before that part and ends at most half its length after it.

    Args:
        length: Samples of a crop.
        gain_db: The gain is drawn between minus and plus this many decibels; 0 leaves it out.

    Raises:
        InputError: If a value is not usable.
    """

    def __init__(self, length: int, gain_db: float = 6.0) -> None:
        super().__init__()
        if type(length) is not int or length < 1 or not 0 <= gain_db < 100:
            raise InputError(
                explain(
                    "wrong crop or gain",
                    expected="a whole number of samples, and decibels from 0",
                    got=f"length {length!r}, gain_db {gain_db!r}",
                )
            )
        self.length, self.gain_db = length, gain_db

    def forward(self, waves: Tensor, generator: torch.Generator | None = None, *, ranks: Ranks = ALONE) -> Tensor:
        """Augment a batch in training mode.

        Args:
            waves: shape: (B, 1, T), int16.
            generator: Where the random numbers come from; torch's default generator if None.
            ranks: Processes that hold the parts of one batch, as for images.

        Returns:
            shape: (B, 1, length), float32 on the scale -1 to 1; `waves` itself in eval mode.
        """
        if not self.training:
            return waves
        source = generator.device if generator else waves.device
        drawn = torch.rand((2, ranks.world * len(waves)), generator=generator, device=source)
        own = slice(ranks.rank * len(waves), (ranks.rank + 1) * len(waves))
        place, gain = drawn[:, own].to(waves.device)
        crops = crop_sounds(waves, self._first(waves, place), self.length).float() / FULL_SCALE
        return crops * (10 ** (self.gain_db * (2 * gain - 1) / 20))[:, None, None]

    def _first(self, waves: Tensor, place: Tensor) -> Tensor:
        begin, end = sounding_part(waves)
        margin = self.length // 2
        one, other = begin - margin, end + margin - self.length
        low, high = torch.minimum(one, other), torch.maximum(one, other)
        return low + (place.double() * (high - low + 1)).long().clamp_max(high - low)

    def extra_repr(self) -> str:
        """Arguments, for `repr`."""
        return f"length={self.length}, gain_db={self.gain_db}"


class NormalizeSound(nn.Module):
    """`(x - mean) / std` with x on the scale -1 to 1; int16 waveforms are divided by 32768 first.

    Args:
        mean: One number; see `sound_stats`.
        std: One number above 0.
    """

    mean: Tensor  # shape: ()
    std: Tensor  # shape: ()

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != 1 or len(std) != 1 or not std[0] > 0:
            raise InputError(
                explain("wrong mean or std", expected="one mean, one std above 0", got=f"mean {mean}, std {std}")
            )
        self.register_buffer("mean", torch.tensor(float(mean[0])))
        self.register_buffer("std", torch.tensor(float(std[0])))

    def forward(self, waves: Tensor) -> Tensor:
        """Normalise a batch. shape: (B, 1, T), int16 or floating -> the same, floating.

        Raises:
            InputError: If there is more than one channel.
        """
        if waves.ndim != 3 or waves.shape[1] != 1:
            raise InputError(
                explain("cannot normalise this", expected="waveforms (B, 1, T)", got=f"shape {tuple(waves.shape)}")
            )
        if waves.dtype == torch.int16:
            return (waves.to(self.mean.dtype) / FULL_SCALE - self.mean) / self.std
        return (waves - self.mean.to(waves.dtype)) / self.std.to(waves.dtype)
