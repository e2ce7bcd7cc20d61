"""Parquet folders in every layout, their classes and images, and the real CIFAR-10."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from parquet_files import as_written, cells, encode, pixels, write
from PIL import Image

from epitorch.errors import DataError
from epitorch.training.data import CIFAR10_CLASSES, load_images


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


class TestLayouts:
    @pytest.mark.parametrize(
        "files",
        [
            ["train.parquet"],
            ["train-00000-of-00001.parquet"],
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            [f"plain_text/train-0000{i}-of-00003-0123456789abcdef.parquet" for i in range(3)],
            ["default/train/0000.parquet", "default/train/0001.parquet"],
            [f"train/{i:04d}.parquet" for i in range(3)],
        ],
    )
    @pytest.mark.parametrize("column", ["img", "image"])
    def test_found_and_read_in_order(self, folder: Path, files: list[str], column: str) -> None:
        names = {"train": files, "test": [name.replace("train", "test") for name in files]}
        for seed, shards in enumerate(names.values()):
            parts = list(np.array_split(np.arange(20), len(shards)))
            for name, part in zip(shards[::-1], parts[::-1], strict=True):
                write(folder / name, list(pixels(20, seed)[part]), [i % 10 for i in part], column=column)
        for seed, split in enumerate(names):
            read = load_images(folder, split)
            assert torch.equal(read.images, as_written(pixels(20, seed)))
            assert read.labels.tolist() == [*range(10), *range(10)]

    def test_the_folder_itself_comes_before_its_subfolders(self, folder: Path) -> None:
        for place, seed in (("", 1), ("data", 2), ("other", 3)):
            write(folder / place / "train.parquet", list(pixels(2, seed)), [0, 1])
        assert torch.equal(load_images(folder, "train").images, as_written(pixels(2, 1)))
        (folder / "train.parquet").unlink()
        assert torch.equal(load_images(folder, "train").images, as_written(pixels(2, 2)))

    def test_jpeg_grey_and_palette(self, folder: Path) -> None:
        colour, grey = pixels(1)[0], pixels(1, size=(32, 32))[0]
        palette = io.BytesIO()
        Image.fromarray(colour).convert("P").save(palette, "PNG")
        encoded = [encode(colour, "JPEG"), encode(grey), palette.getvalue()]
        write(folder / "train.parquet", [{"bytes": b, "path": None} for b in encoded], [0, 0, 1])
        images = load_images(folder, "train").images
        for image, data in zip(images, encoded, strict=True):
            expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
            assert torch.equal(image, as_written(expected[None])[0])
        assert torch.equal(images[1], torch.from_numpy(grey).expand(3, -1, -1))

    def test_more_rows_than_one_read(self, folder: Path) -> None:
        images = pixels(4500, size=(2, 3, 3))
        write(folder / "train.parquet", list(images), [0, 1] * 2250, row_group_size=1700)
        assert torch.equal(load_images(folder, "train").images, as_written(images))


class TestClasses:
    def test_names_from_the_file(self, folder: Path) -> None:
        write(folder / "train.parquet", list(pixels(3)), [2, 0, 2], names=["a", "b", "c"])
        assert load_images(folder, "train").classes == ("a", "b", "c")

    def test_ten_classes_of_32x32_are_those_of_cifar(self, folder: Path) -> None:
        write(folder / "train.parquet", list(pixels(10)), range(10))
        write(folder / "digits.parquet", list(pixels(10, size=(28, 28))), range(10))
        write(folder / "nine.parquet", list(pixels(9)), range(9))
        assert load_images(folder, "train").classes == CIFAR10_CLASSES
        (folder / "train.parquet").unlink()
        assert load_images(folder, "digits").classes == tuple("0123456789")
        assert load_images(folder, "nine").classes == tuple("012345678")

    def test_the_training_split_says_how_many_there_are(self, folder: Path) -> None:
        write(folder / "train.parquet", list(pixels(4)), [0, 1, 2, 3])
        write(folder / "test.parquet", list(pixels(2)), [3, 1])
        assert load_images(folder, "test").classes == ("0", "1", "2", "3")
        write(folder / "test.parquet", list(pixels(2)), [3, 4])
        with pytest.raises(DataError, match=r"(?s)test\.parquet, row 1.*got: +label 4"):
            load_images(folder, "test")


class TestImagesInFiles:
    @pytest.fixture
    def image_file(self, folder: Path) -> Path:
        (folder / "train").mkdir()
        file = folder / "train" / "a.png"
        file.write_bytes(encode(pixels(1)[0]))
        rows = [{"bytes": None, "path": "train/a.png"}, {"bytes": encode(pixels(1, 1)[0]), "path": "b.png"}]
        write(folder / "data" / "train.parquet", rows, [0, 1])
        return file

    def test_are_read_and_never_cached(self, folder: Path, image_file: Path, cache: Path) -> None:
        images = np.concatenate((pixels(1), pixels(1, 1)))
        assert torch.equal(load_images(folder, "train").images, as_written(images))
        image_file.write_bytes(encode(pixels(1, 2)[0]))
        assert torch.equal(load_images(folder, "train").images[:1], as_written(pixels(1, 2)))
        assert not cache.exists()

    def test_many_rows_of_both_kinds(self, folder: Path) -> None:
        """A chunk with files must not end the work of the chunks after it."""
        images = pixels(600, size=(4, 4, 3))
        rows = cells(images)
        (folder / "0.png").write_bytes(rows[0]["bytes"])
        rows[0] = {"bytes": None, "path": "0.png"}
        write(folder / "train.parquet", rows, [0, 1] * 300)
        assert torch.equal(load_images(folder, "train").images, as_written(images))

    def test_missing(self, folder: Path, image_file: Path) -> None:
        image_file.unlink()
        with pytest.raises(DataError, match=r"(?s)train\.parquet, row 0.*got: +train/a\.png"):
            load_images(folder, "train")

    @pytest.mark.parametrize("path", ["../outside.png", "{root}/outside.png"])
    def test_outside_the_folder_are_refused(self, folder: Path, path: str) -> None:
        (folder.parent / "outside.png").write_bytes(encode(pixels(1)[0]))
        rows = [{"bytes": None, "path": path.format(root=folder.parent)}]
        write(folder / "train.parquet", rows, [0])
        with pytest.raises(DataError, match=r"row 0: the image that a row names is missing"):
            load_images(folder, "train")


@pytest.mark.slow
@pytest.mark.parametrize("split, each", [("train", 5000), ("test", 1000)])
def test_real_cifar10(cifar10_dir: Path, split: str, each: int) -> None:
    real = load_images(cifar10_dir, split)
    assert real.image_shape == (3, 32, 32)
    assert torch.bincount(real.labels).tolist() == [each] * 10
    assert real.classes == CIFAR10_CLASSES
    column = pq.read_table(cifar10_dir / f"{split}.parquet", columns=["img"]).column(0)
    for row in (0, 1234, len(real) - 1):  # the stored path begins with the class name
        cell = column[row].as_py()
        assert cell["path"].split("/")[0] == real.classes[real.labels[row]]
        expected = np.asarray(Image.open(io.BytesIO(cell["bytes"])))
        assert torch.equal(real.images[row], as_written(expected[None])[0])
