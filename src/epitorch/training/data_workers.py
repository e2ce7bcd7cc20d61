"""Batches of images that worker processes read, decode and augment: torch's DataLoader over folders and shards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from epitorch.errors import DataError, EpitorchError
from epitorch.training.data_folder import FolderImages
from epitorch.training.data_loader import PlacedLoader
from epitorch.training.data_shards import Pass, ShardImages, Stretch, shuffled
from epitorch.training.draws import seed_image
from epitorch.training.ranks import ALONE, Ranks

Images = TypeVar("Images", FolderImages, ShardImages)
_MOST = 16  # workers by default: more of them seldom help


def default_workers(processes: int) -> int:
    """Return one worker for each core that this process may use, less one for the process itself.

    Args:
        processes: That train on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST, max(0, cores // processes - 1))


@dataclass(frozen=True)
class Failure:
    """What a worker gives in place of a batch: DataLoader would wrap an exception in a traceback."""

    message: str


class _WorkerLoader(PlacedLoader, Generic[Images]):
    """What the loaders with worker processes have in common."""

    def __init__(
        self,
        images: Images,
        batch_size: int,
        *,
        workers: int = 0,
        pinned: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(images, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, ranks=ranks)
        self.images: Images = images
        self.workers, self.pinned = workers, pinned

    def _given_by(self, dataset: Dataset[Any], sampler: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what the dataset gives, each item a batch."""
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=self.workers,
            pin_memory=self.pinned,
            worker_init_fn=_leave_signals,
            generator=torch.Generator().manual_seed(0),  # else it would draw from torch's own
        )
        for batch in loader:
            if isinstance(batch, Failure):
                raise DataError(batch.message)
            self._given += 1
            yield batch


def _leave_signals(worker: int) -> None:
    """Ctrl-C reaches the whole group of processes; the one that trains decides when its workers end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class FolderLoader(_WorkerLoader[FolderImages]):
    """Batches of images that are files.

    The order is that of `PlacedLoader`. What is drawn for an image depends on seed, epoch and image only, so that
    neither the number of workers nor that of processes changes any number.

    Args:
        images: The set.
        batch_size: As for `PlacedLoader`.
        workers: Processes that read; 0 reads in this one, and seeds the random generators of this process.
        pinned: Give batches in pinned memory, for a CUDA device.
        shuffle: As for `PlacedLoader`, and so all that follow.
        seed: See there.
        drop_last: See there.
        ranks: See there.

    Raises:
        DataError: As `PlacedLoader`; while reading, if an image cannot be read.
    """

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `(images, labels)`, shapes (B, 3, H, W) uint8 and (B,) int64."""
        numbers = (index.tolist() for index in self._own())
        yield from self._given_by(_FolderBatches(self.images, self.seed, self.epoch), numbers)


class _FolderBatches(Dataset[Any]):
    """Lists of numbers to batches."""

    def __init__(self, images: FolderImages, seed: int, epoch: int) -> None:
        self.images, self.seed, self.epoch = images, seed, epoch

    def __getitem__(self, numbers: list[int]) -> tuple[Tensor, Tensor] | Failure:
        try:
            return default_collate([self._read(number) for number in numbers]), self.images.labels[numbers]
        except EpitorchError as error:
            return Failure(str(error))

    def _read(self, number: int) -> Tensor:
        if self.images.view.augmented:
            seed_image(self.seed, self.epoch, number)
        return self.images.read(number)


class StreamLoader(_WorkerLoader[ShardImages]):
    """Batches of images streamed from shards.

    An epoch lays the spans of the shards end to end in an order of its own. Each process has an equal stretch of whole
    batches, each of its workers an equal share of that, so that every image is given at most once; a last part smaller
    than a batch is left out. Within a share the images pass through a shuffle buffer. Which images make a batch
    depends on seed, epoch and the numbers of processes and workers.

    A pass that goes on after an interruption begins, in every worker, at the boundary of a span (a tar file, or a row
    group of a parquet file).

    Args:
        images: The set.
        batch_size: As for `PlacedLoader`.
        workers: Processes that read; 0 reads in this one, and seeds the random generators of this process.
        pinned: Give batches in pinned memory, for a CUDA device.
        shuffle: As for `PlacedLoader`, and so all that follow.
        seed: See there.
        drop_last: See there.
        ranks: See there.

    Raises:
        DataError: As `PlacedLoader`; while reading, if a shard or an image cannot be read.
    """

    RESUMES = (
        "streamed data go on at the boundary of a shard (parquet: row group): in the epoch that was interrupted, "
        "images near that boundary or in the shuffle buffer may come twice, and as many others not at all"
    )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `(images, labels)`, shapes (B, 3, H, W) uint8 and (B,) int64."""
        yield from self._given_by(_StreamBatches(self.next_pass()))

    def next_pass(self) -> Pass:
        """Begin a pass: say which images this process gives in it."""
        done, images = self._start(), self.images
        spans = shuffled(images.spans, self.seed, self.epoch) if self.shuffle else images.spans
        buffer = images.view.section.shuffle_buffer if self.shuffle else 0
        return Pass(images, spans, self._stretch(), self.seed, self.epoch, done, buffer)

    def _stretch(self) -> Stretch:
        batches, world, rank = len(self), self.ranks.world, self.ranks.rank
        if self.shuffle:
            size = self.batch_size // world
            return Stretch(rank * batches * size, batches, size)
        start, every, step = self._batches()
        before = sum(len(range(other, every, step)) for other in range(start)) if step > 1 else 0
        return Stretch(before * self.batch_size, batches, self.batch_size)


class _StreamBatches(IterableDataset[Any]):
    """A pass, in whichever worker it is."""

    def __init__(self, one: Pass) -> None:
        self.one = one

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor] | Failure]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        try:
            yield from self.one.batches(worker, workers)
        except EpitorchError as error:
            yield Failure(str(error))
