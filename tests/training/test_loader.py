"""The loader: parts for several processes, its place in the epoch, and that nothing leaves the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epitorch.errors import DataError
from epitorch.training.data import ArrayLoader, BatchAugment, ImageArrays, Normalize
from epitorch.training.ranks import Ranks


def arrays(n: int = 23) -> ImageArrays:
    """Image i is filled with the value i."""
    images = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 3, 8, 8).contiguous()
    return ImageArrays(images, torch.arange(n) % 5, tuple("abcde"), "numbers")


def numbers(batch: tuple[Tensor, Tensor]) -> list[int]:
    return batch[0][:, 0, 0, 0].tolist()


def test_shuffled_batches_are_cut_into_parts() -> None:
    options = {"shuffle": True, "seed": 3, "drop_last": True}
    whole = [numbers(batch) for batch in ArrayLoader(arrays(), 6, **options)]  # type: ignore[arg-type]
    loaders = [ArrayLoader(arrays(), 6, ranks=Ranks(rank, 3), **options) for rank in range(3)]  # type: ignore[arg-type]
    parts = [[numbers(batch) for batch in loader] for loader in loaders]
    assert [len(loader) for loader in loaders] == [3, 3, 3]
    assert [a + b + c for a, b, c in zip(*parts, strict=True)] == whole


@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_in_order_are_dealt_out_whole(world: int) -> None:
    loaders = [ArrayLoader(arrays(), 6, ranks=Ranks(rank, world)) for rank in range(world)]
    dealt = [[numbers(batch) for batch in loader] for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(batches) for batches in dealt]
    assert sorted(batch for batches in dealt for batch in batches) == [
        numbers(batch) for batch in ArrayLoader(arrays(), 6)
    ]


def test_every_process_sees_all_where_there_are_fewer_batches() -> None:
    for rank in range(5):
        assert len(list(ArrayLoader(arrays(), 6, ranks=Ranks(rank, 5)))) == 4


@pytest.mark.parametrize("options", [{"batch_size": 7, "drop_last": True}, {"batch_size": 6, "drop_last": False}])
def test_batches_that_cannot_be_cut_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(DataError, match="a multiple of the 2 processes, with drop_last"):
        ArrayLoader(arrays(), shuffle=True, ranks=Ranks(0, 2), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, 1, 3, 4])
def test_a_pass_goes_on_at_its_place(given: int) -> None:
    loader, other = (ArrayLoader(arrays(), 5, shuffle=True, seed=1) for _ in range(2))
    loader.set_epoch(2)
    batches = iter(loader)
    for _ in range(given):
        next(batches)
    other.load_state_dict(loader.state_dict())
    other.set_epoch(2)
    assert [numbers(batch) for batch in other] == [numbers(batch) for batch in batches]
    assert len(list(other)) == 5  # only once


def test_the_place_of_another_epoch_is_forgotten() -> None:
    loader = ArrayLoader(arrays(), 5, shuffle=True)
    loader.load_state_dict({"epoch": 1, "batches": 5})
    loader.set_epoch(2)
    assert len(list(loader)) == 5


@pytest.mark.parametrize("world", [2, 4])
def test_images_are_augmented_as_by_one_process(world: int) -> None:
    images = torch.randint(256, (8, 3, 8, 8), dtype=torch.uint8)
    augment = BatchAugment(2)
    whole = augment(images, torch.Generator().manual_seed(5))
    parts = [
        augment(part, torch.Generator().manual_seed(5), ranks=Ranks(rank, world))
        for rank, part in enumerate(images.chunk(world))
    ]
    assert torch.equal(torch.cat(parts), whole)
    alone = [augment(part, torch.Generator().manual_seed(5)) for part in images.chunk(world)]
    assert not torch.equal(torch.cat(alone), whole)


def test_images_stay_on_their_device_and_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device whatever reads a value, or moves a batch, fails."""
    monkeypatch.setattr(ImageArrays, "__post_init__", lambda self: None)  # it looks at the labels, once for the set
    loader = ArrayLoader(arrays().to("meta"), 5, shuffle=True, drop_last=True)
    augment, normalize = BatchAugment(2), Normalize([0.5] * 3, [0.25] * 3).to("meta")
    seen = 0
    for images, labels in loader:
        result = normalize(augment(images))
        assert {result.device.type, images.device.type, labels.device.type} == {"meta"}
        assert result.shape == (5, 3, 8, 8)
        seen += 1
    assert seen == 4
