"""ImageArrays: a labelled set of equally sized images in memory, its statistics and its split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from epitorch.errors import DataError, explain

_CHUNK = 2048  # images per step of a pass over the set: bounds the memory of the wider integers


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Images and labels of one split, whole in memory, on one device.

    Args:
        images: shape: (N, C, H, W), uint8.
        labels: shape: (N,), int64, indices into `classes`.
        classes: Name of each class.
        source: Where the images come from, for logs and results.

    Raises:
        DataError: If shapes, types or label range do not fit, or the set is empty.
    """

    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    classes: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        self._check_images(4, torch.uint8, "uint8 of shape (N, C, H, W)")
        self._check_labels()

    def _check_images(self, ndim: int, dtype: torch.dtype, expected: str) -> None:
        if self.images.ndim != ndim or self.images.dtype != dtype or len(self.images) == 0:
            raise self._error("the images are not usable", f"{expected}, N >= 1", self.images)

    def _check_labels(self) -> None:
        if self.labels.shape != (len(self.images),) or self.labels.dtype != torch.int64:
            raise self._error("the labels do not fit", f"int64 of shape ({len(self.images)},)", self.labels)
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.classes):
            raise DataError(
                explain(
                    "a label is out of range",
                    expected=f"0 to {len(self.classes) - 1}, one for each of {len(self.classes)} classes",
                    got=f"labels from {low} to {high}",
                    where=self.source,
                )
            )

    def _error(self, asked: str, expected: str, got: Tensor) -> DataError:
        shown = f"{got.dtype} of shape {tuple(got.shape)}"
        return DataError(explain(asked, expected=expected, got=shown, where=self.source))

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Number of classes, those without an image in this split included."""
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """`(C, H, W)` of every image."""
        return tuple(self.images.shape[1:])

    def to(self, device: torch.device | str) -> Self:
        """Return the same set on another device; itself where it is there already."""
        images, labels = self.images.to(device), self.labels.to(device)
        if images is self.images and labels is self.labels:
            return self
        return type(self)(images, labels, self.classes, self.source)

    def select(self, index: Tensor, source: str) -> Self:
        """Return the images of an index or mask.

        Args:
            index: shape: (n,) integers, or (N,) booleans.
            source: Name of the part.
        """
        at = index.to(self.images.device)
        return type(self)(self.images[at], self.labels[at], self.classes, source)


class Labelled(Protocol):
    """A set whose labels are known."""

    @property
    def labels(self) -> Tensor: ...  # noqa: D102
    @property
    def classes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102
    def __len__(self) -> int: ...
    def select(self, index: Tensor, source: str) -> Self: ...  # noqa: D102


AnySet = TypeVar("AnySet", bound=Labelled)


def split_holdout(arrays: AnySet, n: int, seed: int) -> tuple[AnySet, AnySet]:
    """Split into a training part and a held-out part that chooses between models.

    Every class gives its share of `n` to within one image. Both parts keep the order of the set; the same
    arguments give the same parts on every device.

    Args:
        arrays: The set to split.
        n: Number of held-out images.
        seed: Which images are held out.

    Returns:
        `(train, held_out)`, disjoint, together all of `arrays`.

    Raises:
        DataError: If `n` is below 1 or leaves a class without a training image.
    """
    labels = arrays.labels.cpu()
    counts = torch.bincount(labels, minlength=len(arrays.classes)).tolist()
    quotas = _quotas(arrays, counts, n)
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(arrays), dtype=torch.bool)
    for label, quota in enumerate(quotas):
        members = (labels == label).nonzero().flatten()
        held[members[torch.randperm(len(members), generator=generator)[:quota]]] = True
    part = f"{n:,} held out with seed {seed}"
    return arrays.select(~held, f"{arrays.source}, without {part}"), arrays.select(held, f"{arrays.source}, {part}")


def _quotas(arrays: Labelled, counts: list[int], n: int) -> list[int]:
    """Share `n` among the classes by largest remainder; ties go to the lower class."""
    total = len(arrays)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n < total:
        raise holdout_error(arrays, n, f"a whole number from 1 to {total - 1}")
    quotas = [n * count // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda c: (-(n * counts[c] % total), c))
    for label in by_remainder[: n - sum(quotas)]:
        quotas[label] += 1
    for label, (quota, count) in enumerate(zip(quotas, counts, strict=True)):
        if count and quota == count:
            name = arrays.classes[label]
            raise holdout_error(arrays, n, f"a number that leaves class '{name}' ({count} images) one to train on")
    return quotas


def holdout_error(arrays: Labelled, n: object, expected: str) -> DataError:
    """Return the error for a number of images that cannot be held out."""
    return DataError(
        explain(
            f"cannot hold out {n!r} of {len(arrays):,} images",
            expected=expected,
            got=repr(n),
            where=arrays.source,
            fix="hold out fewer images: data.holdout in the recipe (5000 where it says nothing)",
        )
    )


def channel_stats(arrays: ImageArrays) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel over all pixels, on the scale 0 to 1.

    Sums are whole numbers, so that the result depends neither on the order of the images nor on the device.

    Returns:
        `(mean, std)`, each of length C; the population's standard deviation.

    Raises:
        DataError: If a channel is constant, so that it cannot be normalised.
    """
    total = torch.zeros(arrays.image_shape[0], dtype=torch.int64)
    square = torch.zeros_like(total)
    for chunk in arrays.images.split(_CHUNK):
        wide = chunk.to(torch.int64)  # shape: (n, C, H, W)
        total += wide.sum((0, 2, 3)).cpu()
        square += wide.square().sum((0, 2, 3)).cpu()
    n = arrays.images.numel() // len(total)
    mean = [s / n for s in total.tolist()]
    # n*square - total^2 in Python integers: exact where the difference of two floats would cancel
    variance = [(n * q - s * s) / n**2 for s, q in zip(total.tolist(), square.tolist(), strict=True)]
    if min(variance) == 0:
        raise DataError(
            explain(
                "a channel cannot be normalised",
                expected="different pixel values in every channel",
                got=f"channel {variance.index(0)} holds one value only",
                where=arrays.source,
            )
        )
    return tuple(m / 255 for m in mean), tuple(v**0.5 / 255 for v in variance)
