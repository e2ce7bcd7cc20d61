"""Every kind of damage to a parquet folder, and the cache of decoded images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from parquet_files import IMAGE, as_written, cells, encode, pixels, write

from epitorch.errors import DataError
from epitorch.training import data_cache, data_parquet
from epitorch.training.data import load_images


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("EPITORCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "set"
    made.mkdir()
    return made


def half_written(folder: Path) -> None:
    file = write(folder / "train.parquet", list(pixels(6)), [0, 1] * 3)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty_file(folder: Path) -> None:
    (folder / "train.parquet").touch()


def damaged_pages(folder: Path) -> None:
    """The footer is whole, what it points to is not."""
    file = write(folder / "train.parquet", list(pixels(6)), [0, 1] * 3)
    raw = bytearray(file.read_bytes())
    raw[4:-3000] = bytes(len(raw) - 3004)
    file.write_bytes(raw)


def shards(folder: Path, second: list[Any], labels: Sequence[Any] = (1, 0), **options: Any) -> None:
    """Two shards, the first of them right."""
    write(folder / "data" / "train-00000-of-00002.parquet", list(pixels(3)), [0, 1, 0], **options)
    write(folder / "data" / "train-00001-of-00002.parquet", second, labels, **options)


def cut_image(folder: Path) -> None:
    good, bad = encode(pixels(1)[0]), encode(pixels(1)[0], "JPEG")
    shards(folder, [{"bytes": good, "path": ""}, {"bytes": bad[: len(bad) // 2], "path": ""}])


def no_image(folder: Path) -> None:
    shards(folder, [*cells(pixels(1)), {"bytes": b"GIF89a nothing", "path": ""}])


def sixteen_bits(folder: Path) -> None:
    shards(folder, [*cells(pixels(1)), {"bytes": encode(np.full((32, 32), 70, np.uint16)), "path": ""}])


def null_image(folder: Path) -> None:
    shards(folder, [*cells(pixels(1)), None])


def other_size(folder: Path) -> None:
    shards(folder, cells([pixels(1)[0], pixels(1, size=(32, 31, 3))[0]]))


def table(file: Path, **columns: Any) -> None:
    pq.write_table(pa.table(columns), file)


def two_names(folder: Path) -> None:
    shards(folder, cells(pixels(2)), names=["a", "b"])
    write(folder / "data" / "train-00001-of-00002.parquet", list(pixels(2)), [1, 0], names=["b", "a"])


def missing_shard(folder: Path) -> None:
    shards(folder, cells(pixels(2)))
    (folder / "data" / "train-00000-of-00002.parquet").unlink()


def two_configs(folder: Path) -> None:
    for name in ("coarse", "fine"):
        write(folder / name / "train.parquet", list(pixels(2)), [0, 1])


def whole_and_shards(folder: Path) -> None:
    shards(folder, cells(pixels(2)))
    write(folder / "data" / "train.parquet", list(pixels(2)), [0, 1])


SECOND = r"data/train-00001-of-00002\.parquet"
IMAGES = pa.array([{"bytes": b"", "path": ""}], IMAGE)

DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (half_written, r"train\.parquet: cannot be read.*half-written"),
    (empty_file, r"train\.parquet: cannot be read"),
    (damaged_pages, r"train\.parquet: cannot be read"),
    (lambda f: (f / "train.parquet").symlink_to(f / "blob"), r"train\.parquet: cannot be read.*No such file"),
    (cut_image, rf"{SECOND}, row 1: an image cannot be decoded.*truncated"),
    (no_image, rf"{SECOND}, row 1: an image cannot be decoded.*14 bytes"),
    (sixteen_bits, rf"{SECOND}, row 1: an image cannot be decoded.*I;16"),
    (null_image, rf"{SECOND}, row 1: a row without an image"),
    (other_size, rf"{SECOND}, row 1: images of different sizes.*32x32.*32x31"),
    (
        lambda f: shards(f, cells(pixels(2)), [1, None]),
        rf"{SECOND}, row 1: a label is missing.*got: +label null",
    ),
    (lambda f: shards(f, cells(pixels(2)), [0, -1]), rf"{SECOND}, row 1: .*got: +label -1"),
    (lambda f: shards(f, cells(pixels(2)), [3, 0]), rf"{SECOND}, row 0: .*no image has class 2.*label 3"),
    (
        lambda f: shards(f, cells(pixels(2)), [1, 2], names=["a", "b"]),
        rf"{SECOND}, row 1: .*a class from 0 to 1.*label 2",
    ),
    (lambda f: write(f / "train.parquet", [], []), r"train\.parquet: split 'train' is empty"),
    (
        lambda f: table(f / "train.parquet", img=IMAGES, fine_label=[1], coarse_label=[0]),
        r"train\.parquet: the columns.*'img' \(struct.*'fine_label' \(int64\), 'coarse_label' \(int64\)",
    ),
    (lambda f: table(f / "train.parquet", img=[b"x"], label=[0]), r"the columns.*'img' \(binary\)"),
    (lambda f: table(f / "train.parquet", img=IMAGES, label=["cat"]), r"the columns.*'label' \(string\)"),
    (lambda f: table(f / "train.parquet", label=[0]), r"the columns.*'label' \(int64\)"),
    (two_names, rf"{SECOND}: the shards name different classes"),
    (
        lambda f: write(f / "train.parquet", list(pixels(1)), [0], metadata=b"{half"),
        r"train\.parquet: the 'huggingface' metadata cannot be read",
    ),
    (
        lambda f: write(f / "train.parquet", list(pixels(1)), [0], metadata=b"[1]"),
        r"train\.parquet: the 'huggingface' metadata cannot be read",
    ),
    (missing_shard, r"lacks a shard.*train-00000-of-00002\.parquet.*1 of 2"),
    (two_configs, r"more than one choice.*coarse.*fine.*subfolder"),
    (whole_and_shards, r"more than one choice.*train\.parquet"),
    (lambda f: write(f / "trian.parquet", list(pixels(1)), [0]), r"no split 'train'; did you mean 'trian'\?"),
]


class TestDamage:
    @pytest.mark.parametrize("damage, message", DAMAGE)
    def test_is_named_by_file_and_row(self, folder: Path, damage: Any, message: str, cache: Path) -> None:
        damage(folder)
        with pytest.raises(DataError, match=f"(?s){message}"):
            load_images(folder, "train")
        assert not list(cache.glob("*"))

    def test_rows_are_counted_through_the_whole_file(self, folder: Path) -> None:
        rows = [*cells(pixels(1, size=(2, 2, 3))) * 2500, {"bytes": b"", "path": ""}]
        write(folder / "train.parquet", rows, [0] * 2501, row_group_size=1000)
        with pytest.raises(DataError, match=r"train\.parquet, row 2500: an image cannot be decoded"):
            load_images(folder, "train")

    def test_the_same_shards_undamaged(self, folder: Path) -> None:
        """Negative control: nothing but the damage is refused above."""
        shards(folder, cells(pixels(2)))
        assert load_images(folder, "train").labels.tolist() == [0, 1, 0, 1, 0]

    def test_no_such_split_lists_those_there_are(self, folder: Path) -> None:
        write(folder / "train.parquet", list(pixels(1)), [0])
        write(folder / "config" / "extra" / "0000.parquet", list(pixels(1)), [0])
        with pytest.raises(DataError, match=r"got: +splits extra, train"):
            load_images(folder, "test")


class TestCache:
    @pytest.fixture
    def decodings(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Notes every decoding of a whole split."""
        calls: list[int] = []

        def counted(batches: Any, total: int) -> Any:
            calls.append(total)
            return decode(batches, total)

        decode = data_parquet.decode_batches
        monkeypatch.setattr(data_parquet, "decode_batches", counted)
        return calls

    @pytest.fixture
    def images(self, folder: Path) -> torch.Tensor:
        write(folder / "train.parquet", list(pixels(5)), [0, 1, 0, 1, 0])
        return as_written(pixels(5))

    def test_decodes_once(self, folder: Path, images: torch.Tensor, decodings: list[int], cache: Path) -> None:
        for _ in range(3):
            assert torch.equal(load_images(folder, "train").images, images)
        assert decodings == [5]
        assert [file.suffix for file in cache.iterdir()] == [".npz"]

    def test_is_really_read(self, folder: Path, images: torch.Tensor, decodings: list[int], cache: Path) -> None:
        """Negative control: an entry that is whole but says something else is believed."""
        load_images(folder, "train")
        (entry,) = cache.iterdir()
        data_cache.write_entry(entry.stem.removeprefix("images-"), 255 - images.numpy())
        assert torch.equal(load_images(folder, "train").images, 255 - images)
        assert decodings == [5]

    def test_depends_on_the_content_not_on_the_name(
        self, folder: Path, images: torch.Tensor, decodings: list[int]
    ) -> None:
        load_images(folder, "train")
        (folder / "train.parquet").rename(folder / "moved-00000-of-00001.parquet")
        assert torch.equal(load_images(folder, "moved").images, images)
        assert decodings == [5]
        write(folder / "train.parquet", list(pixels(5, 1)), [0, 1, 0, 1, 0])
        assert torch.equal(load_images(folder, "train").images, as_written(pixels(5, 1)))
        assert decodings == [5, 5]

    @pytest.mark.parametrize("at", [0, 200, 3000, -3000, -1, None])
    def test_a_damaged_entry_is_made_anew(
        self, folder: Path, images: torch.Tensor, decodings: list[int], cache: Path, at: int | None
    ) -> None:
        load_images(folder, "train")
        (entry,) = cache.iterdir()
        raw = bytearray(entry.read_bytes())
        if at is None:
            del raw[len(raw) // 2 :]
        else:
            raw[at] ^= 255
        entry.write_bytes(raw)
        for _ in range(2):
            assert torch.equal(load_images(folder, "train").images, images)
        if at not in (0, -1):  # the zip format may forgive its first and last byte
            assert decodings == [5, 5]

    def test_a_checksum_that_does_not_fit(
        self, folder: Path, images: torch.Tensor, decodings: list[int], cache: Path
    ) -> None:
        """The entry's own checksum counts, not the zip format's alone."""
        load_images(folder, "train")
        (entry,) = cache.iterdir()
        np.savez(entry, images=255 - images.numpy(), digest=np.zeros(32, np.uint8))
        assert torch.equal(load_images(folder, "train").images, images)
        np.savez(entry, images=np.array([{"a": 1}]), digest=np.zeros(32, np.uint8))  # pickled inside
        assert torch.equal(load_images(folder, "train").images, images)
        assert decodings == [5, 5, 5]

    def test_works_without_a_place_to_write(
        self,
        folder: Path,
        images: torch.Tensor,
        decodings: list[int],
        cache: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        cache.write_text("a file where the folder should be")
        with caplog.at_level(logging.INFO, "epitorch"):
            for _ in range(2):
                assert torch.equal(load_images(folder, "train").images, images)
        assert decodings == [5, 5]
        assert sum("not cached" in line for line in caplog.messages) == 2

    def test_works_without_a_home(self, folder: Path, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EPITORCH_CACHE", "~nobody-of-this-name/cache")
        assert torch.equal(load_images(folder, "train").images, images)

    def test_an_interrupted_write_leaves_nothing(
        self, folder: Path, images: torch.Tensor, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(stream: Any, **arrays: Any) -> None:
            stream.write(b"half")
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(np, "savez", interrupted)
            with pytest.raises(KeyboardInterrupt):
                load_images(folder, "train")
        assert list(cache.iterdir()) == []
        assert torch.equal(load_images(folder, "train").images, images)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_cache.cache_dir().name == "cache"
    for value in ("", None):
        monkeypatch.delenv("EPITORCH_CACHE", raising=False)
        if value is not None:
            monkeypatch.setenv("EPITORCH_CACHE", value)
        assert data_cache.cache_dir() == Path("~/.cache/epitorch")
