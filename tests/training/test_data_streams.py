"""Which process and worker gives which images: streamed and from folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import LAYOUTS, numbers, write_set

from epitorch.errors import DataError
from epitorch.training.data import ArrayLoader
from epitorch.training.data_images import load_image_training
from epitorch.training.data_kinds import first_images, make_loader
from epitorch.training.data_shards import Pass, Sample, ShardImages, Span, Stretch, boundary, cut, shuffled, spans_of
from epitorch.training.data_workers import StreamLoader, default_workers
from epitorch.training.ranks import Ranks
from epitorch.training.recipe_images import ImagesSection

CPU = torch.device("cpu")


class Plain:
    """In place of a view: an image is its own number."""

    augmented = False

    def __call__(self, data: bytes, where: str) -> torch.Tensor:
        return torch.tensor(int(data))


def read(span: Span, root: Path) -> Iterator[Sample]:
    for i in range(len(span)):
        yield Sample(str(span.number + i).encode(), 0, f"{span.file}, row {span.first + i}", span.number + i)


def stream(lengths: list[list[int]]) -> ShardImages:
    spans = spans_of([Path(f"{i}.tar") for i in range(len(lengths))], lengths)
    view: Any = Plain()
    return ShardImages(Path(), spans, np.zeros(sum(map(sum, lengths)), np.int64), ("0",), "made up", view, read)


def in_turn(one: Pass, workers: int) -> list[list[int]]:
    """What DataLoader gives: a batch of each worker in turn, without those that have ended."""
    active = [one.batches(worker, workers) for worker in range(workers)]
    given: list[list[int]] = []
    while active:
        for worker in list(active):
            batch = next(worker, None)
            if batch is None:
                active.remove(worker)
            else:
                given.append(batch[0].tolist())
    return given


def one_pass(images: ShardImages, rank: int, world: int, batch: int, *, epoch: int = 0, done: int = 0, buffer: int = 0):  # type: ignore[no-untyped-def]
    steps = len(images) // (batch * world)
    spans = shuffled(images.spans, 0, epoch)
    return Pass(images, spans, Stretch(rank * steps * batch, steps, batch), 0, epoch, done, buffer)


LENGTHS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 20))
def test_every_image_at_most_once_on_one_process(
    lengths: list[list[int]], world: int, workers: int, batch: int, buffer: int
) -> None:
    images = stream(lengths)
    given = [in_turn(one_pass(images, rank, world, batch, buffer=buffer), workers) for rank in range(world)]
    steps = len(images) // (batch * world)
    assert [len(batches) for batches in given] == [steps] * world
    assert all(len(one) == batch for batches in given for one in batches)
    flat = [number for batches in given for one in batches for number in one]
    assert len(set(flat)) == len(flat) == steps * batch * world
    assert set(flat) <= set(range(len(images)))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.data())
def test_where_every_image_is_a_shard_an_interrupted_pass_loses_nothing(
    total: int, workers: int, batch: int, data: st.DataObject
) -> None:
    images = stream([[1]] * total)
    whole = in_turn(one_pass(images, 0, 1, batch, buffer=1), workers)
    done, given = 0, []
    while done < len(whole):  # interrupted again and again
        more = data.draw(st.integers(1, len(whole) - done))
        given += in_turn(one_pass(images, 0, 1, batch, done=done, buffer=1), workers)[:more]
        done += more
    assert given == whole


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 4), st.integers(0, 8), st.data())
def test_an_interrupted_pass_goes_on_at_boundaries(
    lengths: list[list[int]], workers: int, batch: int, buffer: int, data: st.DataObject
) -> None:
    images = stream(lengths)
    steps = len(images) // batch
    done = data.draw(st.integers(0, steps))
    again = one_pass(images, 0, 1, batch, done=done, buffer=buffer)
    rest = in_turn(again, workers)
    assert len(rest) == steps - done
    assert rest == in_turn(one_pass(images, 0, 1, batch, done=done, buffer=buffer), workers)
    flat = [number for one in rest for number in one]
    assert len(set(flat)) == len(flat)
    place = {
        number: at
        for at, number in enumerate(n for span in again.spans for n in range(span.number, span.number + len(span)))
    }
    for worker in range(workers):
        share = again.stretch.of_worker(worker, workers)
        own = [place[n] for n in flat if share.first <= place[n] < share.first + share.batches * batch]
        given = len(range(worker, done, workers))
        if own and given:
            assert min(own) >= max(share.first, boundary(again.spans, share.first + given * batch))


def test_a_pass_that_goes_on_repeats_images_of_the_shard_it_was_in() -> None:
    """What the documentation says happens, on numbers: shards of 6, batches of 4, no shuffling."""
    images = stream([[6], [6]])
    spans = images.spans
    assert in_turn(Pass(images, spans, Stretch(0, 3, 4), 0, 0, 2, 0), 1) == [[6, 7, 8, 9]]  # 6 and 7 came before
    assert in_turn(Pass(images, spans, Stretch(0, 3, 4), 0, 0, 0, 0), 1)[2] == [8, 9, 10, 11]


@given(LENGTHS, st.data())
def test_cut_lays_spans_end_to_end(lengths: list[list[int]], data: st.DataObject) -> None:
    spans = stream(lengths).spans
    total = sum(map(len, spans))
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    parts = list(cut(spans, begin, end))
    assert [part.number + i for part in parts for i in range(len(part))] == list(range(begin, end))
    assert all(part.first >= 0 and len(part) > 0 for part in parts)
    rows = [(part.file, part.first + i) for part in parts for i in range(len(part))]
    every = [(span.file, span.first + i) for span in spans for i in range(len(span))]
    assert rows == every[begin:end]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    spans = stream([[2]] * 20).spans
    orders = {shuffled(spans, seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(set(order) == set(spans) for order in orders)


# ---- files on disk ----


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {layout: write_set(tmp_path_factory.mktemp(layout), layout) for layout in LAYOUTS}


def loader(root: Path, *, batch: int = 8, rank: int = 0, world: int = 1, workers: int = 0, part: str = "train") -> Any:
    data = load_image_training(root, ImagesSection(size=16, shuffle_buffer=10), 6)
    return make_loader(
        getattr(data, part), batch, CPU, shuffle=part == "train", ranks=Ranks(rank, world, rank), workers=workers
    )


def given_by(made: Any) -> list[list[int]]:
    return [numbers(images) for images, _ in made]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_two_processes_share_an_epoch(layout: str, workers: int, sets: dict[str, Path]) -> None:
    first, second = (given_by(loader(sets[layout], rank=rank, world=2, workers=workers)) for rank in (0, 1))
    assert len(first) == len(second) == 54 // 8
    assert all(len(batch) == 4 for batch in first + second)
    flat = Counter(number for batch in first + second for number in batch)
    assert set(flat.values()) == {1}
    assert len(flat) == 48


@pytest.mark.parametrize("layout", LAYOUTS)
def test_labels_belong_to_their_images(layout: str, sets: dict[str, Path]) -> None:
    for images, labels in loader(sets[layout]):
        assert [number % 3 for number in numbers(images)] == labels.tolist()
        assert (images.shape[1:], images.dtype, labels.dtype) == ((3, 16, 16), torch.uint8, torch.int64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_held_out_images_are_given_once_and_never_trained_on(layout: str, sets: dict[str, Path]) -> None:
    trained = {n for batch in given_by(loader(sets[layout])) for n in batch}
    for world, workers in ((1, 0), (1, 2), (2, 2)):
        parts = [
            given_by(loader(sets[layout], batch=2, rank=r, world=world, workers=workers, part="heldout"))
            for r in range(world)
        ]
        held = [n for part in parts for batch in part for n in batch]
        assert len(held) == len(set(held)) == 6
        assert not trained & set(held)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_single_evaluation_batch_goes_to_every_process(layout: str, sets: dict[str, Path]) -> None:
    first, second = (given_by(loader(sets[layout], rank=rank, world=2, part="heldout")) for rank in (0, 1))
    assert first == second
    assert len(first) == 1
    assert len(first[0]) == 6


def test_folders_do_not_depend_on_workers_or_processes(sets: dict[str, Path]) -> None:
    def batches(**options: Any) -> list[torch.Tensor]:
        return [images for images, _ in loader(sets["folder"], **options)]

    alone = batches()
    torch.testing.assert_close(batches(workers=2), alone, rtol=0, atol=0)
    halves = [batches(rank=rank, world=2) for rank in (0, 1)]
    joined = [torch.cat(pair) for pair in zip(*halves, strict=True)]
    torch.testing.assert_close(joined, alone, rtol=0, atol=0)
    assert given_by(loader(sets["folder"])) != sorted(given_by(loader(sets["folder"])))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epochs_differ_and_repeat(layout: str, sets: dict[str, Path]) -> None:
    made = loader(sets[layout])
    orders = []
    for epoch in (0, 1, 0):
        made.sampler.set_epoch(epoch)
        orders.append(given_by(made))
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_goes_on_from_its_state(layout: str, workers: int, sets: dict[str, Path]) -> None:
    whole = given_by(loader(sets[layout], workers=workers))
    made = loader(sets[layout], workers=workers)
    batches = iter(made)
    for _ in range(3):
        next(batches)
    state = made.state_dict()
    assert state == {"epoch": 0, "batches": 3}
    del batches
    rests = []
    for _ in range(2):
        other = loader(sets[layout], workers=workers)
        other.load_state_dict(state)
        rests.append(given_by(other))
        assert other.state_dict()["batches"] == 6
    assert rests[0] == rests[1]
    assert len(rests[0]) == 3
    assert len({n for batch in rests[0] for n in batch}) == 24
    if layout == "folder":
        assert rests[0] == whole[3:]
    other.sampler.set_epoch(1)
    assert len(given_by(other)) == 6  # the next epoch begins at its beginning


def test_the_generators_of_this_process_are_left_alone_by_workers(sets: dict[str, Path]) -> None:
    state = torch.get_rng_state()
    given_by(loader(sets["folder"], workers=1))
    given_by(loader(sets["tar"], workers=1))
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


def test_the_first_images(sets: dict[str, Path]) -> None:
    data = load_image_training(sets["tar"], ImagesSection(size=16), 6)
    assert numbers(first_images(data.heldout, 2)) == [54, 55]


def test_a_batch_that_cannot_be_shared_is_refused(sets: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="a multiple of the 3 processes"):
        loader(sets["tar"], world=3)


def test_workers_by_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [default_workers(n) for n in (1, 2, 8, 100)] == [7, 3, 0, 0]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(200)), raising=False)
    assert default_workers(1) == 16


def test_the_shuffle_buffer_mixes_shards(sets: dict[str, Path]) -> None:
    def order(buffer: int) -> list[int]:
        images = load_image_training(sets["tar"], ImagesSection(size=16, shuffle_buffer=buffer), 6).train
        return [n for batch in given_by(StreamLoader(images, 1, shuffle=True, drop_last=True)) for n in batch]

    plain, mixed = order(1), order(30)
    jumps = [sum(b != a + 1 for a, b in pairwise(given)) for given in (plain, mixed)]
    assert jumps[0] <= 2  # from shard to shard only
    assert jumps[1] > 30
    assert sorted(plain) == sorted(mixed) == list(range(54))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_for_a_gpu_are_pinned(layout: str, sets: dict[str, Path]) -> None:
    images = load_image_training(sets[layout], ImagesSection(size=16), 6).train
    pinned = [make_loader(images, 4, torch.device(kind), workers=2) for kind in ("cpu", "cuda")]
    assert [made.pinned for made in pinned if not isinstance(made, ArrayLoader)] == [False, True]
