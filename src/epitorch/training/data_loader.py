"""The order of batches, and batches of images that lie on their device already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

import torch
from torch import Tensor

from epitorch.errors import DataError, explain
from epitorch.training.data_arrays import ImageArrays
from epitorch.training.ranks import ALONE, Ranks


class Sized(Protocol):
    """A set of images that says how many there are and where they come from."""

    @property
    def source(self) -> str: ...  # noqa: D102
    def __len__(self) -> int: ...


class PlacedLoader:
    """What loaders have in common: the order of an epoch's batches, its parts for the processes, the place in it.

    An epoch's order depends only on `seed` and on the epoch of the last `set_epoch`; without a call to
    `set_epoch` every pass has the same order. A Lightning trainer makes that call by itself (through
    `sampler`), on resuming too, and keeps in its checkpoints how many batches of the epoch were given: the next
    pass begins there.

    Several processes share the work. Shuffled: each gets its part of every batch, in order. Otherwise each gets every
    world-th batch whole (all get all of them where there are fewer batches than processes).

    Args:
        images: The set.
        batch_size: Images per batch, over all processes.
        shuffle: Another order in each epoch; else the order of the set.
        seed: Decides the orders.
        drop_last: Leave out a last batch that is not full.
        ranks: Which of the processes this is.

    Raises:
        DataError: If `batch_size` is below 1, above the number of images with `drop_last`, or, shuffled, no multiple of
            the processes.
    """

    batch_sampler = None  # Lightning asks for it where there is a `sampler`

    def __init__(
        self,
        images: Sized,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        most = len(images) if drop_last else None
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise _batch_size_error(images, batch_size, "a whole number from 1")
        if most is not None and batch_size > most:
            raise _batch_size_error(images, batch_size, f"at most the {most} images there are, with drop_last")
        if shuffle and (batch_size % ranks.world or (ranks.world > 1 and not drop_last)):
            raise _batch_size_error(images, batch_size, f"a multiple of the {ranks.world} processes, with drop_last")
        self.total = len(images)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.ranks = ranks
        self.epoch = 0
        self._given = 0  # batches of the present pass
        self._begin: tuple[int, int] | None = None  # epoch and batch at which the next pass begins

    @property
    def sampler(self) -> Self:
        """Itself: where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the passes that begin from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of batches in an epoch, on this process."""
        return len(range(*self._batches()))

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data; where Lightning looks for it."""
        return {"epoch": self.epoch, "batches": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass begin at that place if it is one of that epoch, otherwise at its beginning."""
        self._begin = (state["epoch"], state["batches"])

    def _start(self) -> int:
        """Begin a pass: return how many batches of it were given before."""
        epoch, begin = self._begin or (self.epoch, 0)
        self._begin = None
        self._given = begin if epoch == self.epoch else 0  # a state of another epoch: that one had ended
        return self._given

    def _own(self, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Begin a pass and yield the numbers of each batch's images, of this process's part."""
        start = self._start()
        for index in self._order().to(device).split(self.batch_size)[slice(*self._batches())][start:]:
            yield index.chunk(self.ranks.world)[self.ranks.rank] if self.shuffle else index

    def _batches(self) -> tuple[int, int, int]:
        """First, end and step of this process's batches among all."""
        every = self.total // self.batch_size if self.drop_last else -(-self.total // self.batch_size)
        if self.shuffle or every < self.ranks.world:
            return 0, every, 1
        return self.ranks.rank, every, self.ranks.world

    def _order(self) -> Tensor:
        """Return the order of this epoch, drawn on the CPU: the same for every device, shape: (N,)."""
        if not self.shuffle:
            return torch.arange(self.total)
        # the factor keeps (seed, epoch + 1) apart from (seed + 1, epoch)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.total, generator=generator)


class ArrayLoader(PlacedLoader):
    """Batches `(images, labels)` straight from arrays that lie on their device already. No worker processes.

    Every batch is a copy that may be changed in place. Order and parts are those of `PlacedLoader`.

    Args:
        arrays: The set, on the device that trains (`arrays.to(device)`).
        batch_size: As for `PlacedLoader`, and so all that follow.
        shuffle: See there.
        seed: See there.
        drop_last: See there.
        channels_last: Yield images in `torch.channels_last`.
        ranks: See there.

    Raises:
        DataError: As `PlacedLoader`.
    """

    def __init__(
        self,
        arrays: ImageArrays,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        channels_last: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(arrays, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, ranks=ranks)
        self.arrays = arrays
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `(images, labels)`, shapes (B, C, H, W) uint8 and (B,) int64."""
        for own in self._own(self.arrays.images.device):
            images = self.arrays.images.index_select(0, own)
            self._given += 1
            yield (
                images.contiguous(memory_format=self.memory_format),
                self.arrays.labels.index_select(0, own),
            )


def _batch_size_error(images: Sized, batch_size: object, expected: str) -> DataError:
    return DataError(explain("wrong batch_size", expected=expected, got=repr(batch_size), where=images.source))
