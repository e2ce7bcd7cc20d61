"""Images in parquet files or tar files (shards), streamed: which process and worker reads which of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from epitorch.errors import DataError, explain, require
from epitorch.training.data_views import View
from epitorch.training.draws import seed_image


@dataclass(frozen=True)
class Span:
    """Consecutive images of one shard.

    Args:
        file: The shard.
        first: Its first image, from 0 in the shard.
        stop: The image after its last.
        number: Of the first image in the whole split, from 0.
    """

    file: Path
    first: int
    stop: int
    number: int

    def __len__(self) -> int:
        return self.stop - self.first

    def part(self, begin: int, end: int) -> Span:
        """Return the images from `begin` to before `end`, counted in the span."""
        return replace(self, first=self.first + begin, stop=self.first + end, number=self.number + begin)


@dataclass(frozen=True)
class Sample:
    """An encoded image: its bytes, its class, its place for messages, and its number in the whole split."""

    data: bytes
    label: int
    where: str
    number: int


Reader = Callable[[Span, Path], Iterator[Sample]]  # of a span of a data set's folder


@dataclass(frozen=True, eq=False)
class ShardImages:
    """Images of one split in shards.

    Args:
        root: The data set's folder.
        spans: What there is, in the order of the files; read in another order while training.
        labels: Of all images, shape: (N,), int64.
        classes: Name of each class.
        source: Where they come from, for logs and results.
        view: What becomes of each.
        read: Gives the images of a span.
    """

    root: Path
    spans: tuple[Span, ...] = field(repr=False)
    labels: np.ndarray = field(repr=False)
    classes: tuple[str, ...]
    source: str
    view: View
    read: Reader

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """`(3, H, W)` of every image that is given."""
        return self.view.shape

    def between(self, begin: int, end: int, source: str) -> ShardImages:
        """Return the images from `begin` to before `end`, in the order of the files."""
        return replace(self, spans=tuple(cut(self.spans, begin, end)), labels=self.labels[begin:end], source=source)


def cut(spans: Iterable[Span], begin: int, end: int) -> Iterator[Span]:
    """Lay spans end to end and yield the images from `begin` to before `end`, as spans."""
    at = 0
    for span in spans:
        low, high = max(begin - at, 0), min(end - at, len(span))
        if low < high:
            yield span.part(low, high)
        at += len(span)


def boundary(spans: Sequence[Span], at: int) -> int:
    """Return where the span begins in which image `at` lies, spans laid end to end."""
    ends = np.cumsum([0, *map(len, spans)])
    return int(ends[np.searchsorted(ends, at, side="right") - 1])


def shuffled(spans: Sequence[Span], seed: int, epoch: int) -> tuple[Span, ...]:
    """Return the spans in an epoch's order."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)  # as the loader of arrays
    return tuple(spans[i] for i in torch.randperm(len(spans), generator=generator).tolist())


@dataclass(frozen=True)
class Stretch:
    """What one process gives of an epoch: whole batches of consecutive images, spans laid end to end.

    Args:
        first: Its first image.
        batches: How many.
        size: Images of a batch; the last of all may have fewer.
    """

    first: int
    batches: int
    size: int

    def of_worker(self, worker: int, workers: int) -> Stretch:
        """Return a worker's share: consecutive batches too, as many as fall to it when they are given in turn."""
        shares = [len(range(w, self.batches, workers)) for w in range(workers)]
        return Stretch(self.first + sum(shares[:worker]) * self.size, shares[worker], self.size)


@dataclass(frozen=True)
class Pass:
    """One pass of one process over a stream.

    Args:
        images: What is streamed.
        spans: In the order of this pass.
        stretch: The part of this process.
        seed: Of the run.
        epoch: From 0.
        done: Batches that were given before the run was interrupted.
        shuffle_buffer: Images among which this process shuffles; 0 keeps the order.
    """

    images: ShardImages
    spans: tuple[Span, ...]
    stretch: Stretch
    seed: int
    epoch: int
    done: int
    shuffle_buffer: int

    def batches(self, worker: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a worker's batches: images uint8, shape (B, 3, H, W), labels (B,).

        After an interruption each worker goes on at the boundary of the span in which the last image that it gave would
        lie without shuffling, with an empty buffer.

        Raises:
            DataError: If a shard or an image cannot be read.
        """
        _, share, given = self._share(worker, workers)
        samples = self.samples(worker, workers)
        for _ in range(share.batches - given):
            yield self._batch(list(islice(samples, share.size)))

    def samples(self, worker: int, workers: int) -> Iterator[Sample]:
        """Yield what a worker makes batches of: encoded images, shuffled.

        Raises:
            DataError: If a shard cannot be read.
        """
        worker, share, given = self._share(worker, workers)
        begin = share.first
        if given:
            begin = max(begin, boundary(self.spans, share.first + given * share.size))
        own = cut(self.spans, begin, share.first + share.batches * share.size)
        return self._shuffled(chain_spans(self.images, own), worker, workers)

    def _share(self, asked: int, workers: int) -> tuple[int, Stretch, int]:
        """Return which worker of the pass this is, its share, and how many batches of it were given before."""
        worker = (asked + self.done) % workers  # the one that is asked first is the one whose turn it was
        return worker, self.stretch.of_worker(worker, workers), len(range(worker, self.done, workers))

    def _shuffled(self, samples: Iterator[Sample], worker: int, workers: int) -> Iterator[Sample]:
        if not self.shuffle_buffer:
            return samples
        size = max(1, self.shuffle_buffer // workers)
        rng = random.Random(f"{self.seed} {self.epoch} {self.stretch.first} {worker} {self.done}")
        return require("webdataset", "streaming").shuffle(size, initial=size, rng=rng)(samples)

    def _batch(self, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        view, images = self.images.view, []
        for sample in samples:
            if view.augmented:
                seed_image(self.seed, self.epoch, sample.number)
            images.append(view(sample.data, sample.where))
        # straight into shared memory: batches on the heap, between encoded images of the buffer, fragment it
        return default_collate(images), torch.tensor([sample.label for sample in samples])


def chain_spans(images: ShardImages, spans: Iterable[Span]) -> Iterator[Sample]:
    """Yield the images of spans.

    Raises:
        DataError: If a shard cannot be read, or holds fewer images than it did.
    """
    for span in spans:
        read = 0
        for sample in images.read(span, images.root):
            read += 1
            yield sample
        if read < len(span):
            raise DataError(
                explain(
                    "a shard has changed",
                    expected=f"{span.stop} images, as when the run began",
                    got=span.first + read,
                    where=str(span.file),
                )
            )


def spans_of(files: Sequence[Path], lengths: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    """Return one span for each part of each file.

    Args:
        files: The shards, in order.
        lengths: For each, the numbers of images of its parts: row groups, or the one whole.
    """
    spans, number = [], 0
    for file, parts in zip(files, lengths, strict=True):
        ends = np.cumsum([0, *parts]).tolist()
        spans += [Span(file, low, high, number + low) for low, high in pairwise(ends) if low < high]
        number += ends[-1]
    return tuple(spans)
