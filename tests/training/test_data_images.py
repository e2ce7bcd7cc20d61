"""Layouts of large images, their splits and classes, what is held out, and every kind of damage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import (
    LAYOUTS,
    colour,
    cycle,
    members,
    numbers,
    write_folder,
    write_parquets,
    write_set,
    write_tar,
    write_tars,
)
from parquet_files import cells, encode, write

from epitorch.errors import DataError
from epitorch.training.data_images import load_image_split, load_image_training
from epitorch.training.data_kinds import make_loader
from epitorch.training.data_views import imagenet_stats
from epitorch.training.recipe_images import ImagesSection

SECTION = ImagesSection(size=16, shuffle_buffer=4)


def training(root: Path, holdout: int = 6) -> Any:
    return load_image_training(root, SECTION, holdout)


def split(root: Path, name: str, holdout: int = 6) -> Any:
    return load_image_split(root, name, SECTION, holdout)


def given(images: Any, workers: int = 0) -> list[int]:
    batches = make_loader(images, 5, torch.device("cpu"), workers=workers)
    return [number for pixels, _ in batches for number in numbers(pixels)]


# ---- layouts ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_set(layout: str, tmp_path: Path) -> None:
    root = write_set(tmp_path, layout)
    data = training(root)
    assert (len(data.train), len(data.heldout), data.tested, data.notes) == (54, 6, True, ())
    assert data.train.classes == (("class00", "class01", "class02") if layout == "folder" else ("0", "1", "2"))
    assert data.train.image_shape == (3, 16, 16)
    assert data.train.view.augmented
    assert not data.heldout.view.augmented
    assert sorted(given(data.train) + given(data.heldout)) == list(range(60))
    for name in ("test", "val" if layout == "folder" else "validation"):
        assert sorted(given(split(root, name))) == list(range(1000, 1012))
    assert given(split(root, "heldout")) == given(data.heldout)
    assert sorted(given(split(root, "train"))) == list(range(60))
    with pytest.raises(DataError, match=r"no split 'trian'; did you mean 'train'"):
        split(root, "trian")


def test_held_out_of_folders_is_each_class_s_share(tmp_path: Path) -> None:
    heldout = training(write_set(tmp_path, "folder"), 9).heldout
    assert torch.bincount(heldout.labels).tolist() == [3, 3, 3]
    assert given(heldout) == given(training(tmp_path, 9).heldout)


@pytest.mark.parametrize("layout", ["parquet", "tar"])
def test_held_out_of_shards_are_the_last(layout: str, tmp_path: Path) -> None:
    assert given(training(write_set(tmp_path, layout), 25).heldout) == list(range(35, 60))


@pytest.mark.parametrize(
    "names",
    [
        ("imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar"),
        ("train/0000.tar", "val/0000.tar"),
        ("train-000000.tar", "valid-000000.tar"),
        ("shards_train/a.tar", "shards_test/a.tar"),
    ],
)
def test_names_of_tar_files(names: tuple[str, str], tmp_path: Path) -> None:
    for name, first in zip(names, (0, 1000), strict=True):
        write_tar(tmp_path / name, members(range(12), cycle(12), first))
    assert len(training(tmp_path).train) == 6
    assert given(split(tmp_path, "test")) == list(range(1000, 1012))


def test_the_validation_split_is_the_test_where_the_test_images_have_no_labels(tmp_path: Path) -> None:
    write_set(tmp_path, "parquet")
    write_parquets(tmp_path, "test", [-1] * 6)
    assert sorted(given(split(tmp_path, "test"))) == list(range(1000, 1012))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_split_to_test_on_the_held_out_images_stand_in(layout: str, tmp_path: Path) -> None:
    data = training(write_set(tmp_path, layout, val=0))
    assert not data.tested
    assert "no split to test on" in data.notes[0]
    images = split(tmp_path, "test")
    assert given(images) == given(data.heldout)
    assert "standing in for a test split that is not there" in images.source


def test_a_single_file_of_any_name_with_one_image_a_class(tmp_path: Path) -> None:
    write(tmp_path / "sample.parquet", [colour(i) for i in range(20)], list(range(20)), column="image")
    data = training(tmp_path, 5000)
    assert (len(data.train), len(data.heldout), len(data.train.classes)) == (16, 4, 20)
    assert data.notes[1:] == (
        "data.holdout = 5000 is too many of 20 images: 4 are held out",
        "4 of 20 classes have no training image",
    )


def test_class_names_of_parquet_files(tmp_path: Path) -> None:
    for name, first in (("train", 0), ("validation", 100)):
        images = [colour(first + i) for i in range(9)]
        write(tmp_path / f"{name}.parquet", images, cycle(9), column="image", names=["a", "b", "c"])
    assert training(tmp_path, 3).train.classes == ("a", "b", "c")


def test_rows_that_name_their_file(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for i in range(6):
        (tmp_path / "files" / f"{i}.png").write_bytes(encode(colour(i)))
    rows = [{"bytes": None, "path": f"files/{i}.png"} for i in range(6)]
    write(tmp_path / "train.parquet", rows, cycle(6), column="image")
    assert given(split(tmp_path, "train")) == list(range(6))


def test_normalisation_is_imagenet_s() -> None:
    mean, std = imagenet_stats()
    assert (mean, std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_the_classes_of_tar_files_are_cached_until_a_file_changes(tmp_path: Path, monkeypatch: Any) -> None:
    import epitorch.training.data_shards_tar as module

    files = write_tars(tmp_path, "train", cycle(12))
    reads = []
    real = module._read_labels
    monkeypatch.setattr(module, "_read_labels", lambda file: reads.append(file) or real(file))
    first = split(tmp_path, "train").labels
    np.testing.assert_array_equal(split(tmp_path, "train").labels, first)
    assert reads == files
    write_tar(files[0], members(range(5), [1, 0, 2, 1, 0]))
    os.utime(files[0], ns=(1, 1))
    assert split(tmp_path, "train").labels.tolist() == [1, 0, 2, 1, 0, *first[4:]]


# ---- what is refused before training ----


def assert_refused(root: Path, *parts: str, holdout: int = 6) -> None:
    with pytest.raises(DataError) as caught:
        training(root, holdout)
    for part in parts:
        assert part in str(caught.value)
    assert "expected:" in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nothing", "no data folder", "got:      nothing")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "no data folder", "got:      a file")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path, "no images in this folder", str(tmp_path), "got:      nothing")


@pytest.mark.parametrize("second", ["parquet", "tar"])
def test_two_layouts(second: str, tmp_path: Path) -> None:
    write_set(tmp_path, "folder")
    if second == "parquet":
        write(tmp_path / "train.parquet", [colour(0)], [0])
    else:
        write_set(tmp_path, "tar")
    assert_refused(tmp_path, "cannot tell which images to read", "keep them in folders of their own")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_validation_split_alone_is_not_trained_on(layout: str, tmp_path: Path) -> None:
    name = "val" if layout == "folder" else "validation"
    {"folder": write_folder, "parquet": write_parquets, "tar": write_tars}[layout](tmp_path, name, cycle(12))
    assert_refused(tmp_path, "no split 'train'", f"splits {name}")
    assert sorted(given(split(tmp_path, "test"))) == list(range(12))  # but may be measured on


def test_an_empty_class_folder(tmp_path: Path) -> None:
    write_set(tmp_path, "folder")
    (tmp_path / "train" / "class01b").mkdir()
    assert_refused(tmp_path, "a class folder has no image", str(tmp_path / "train" / "class01b"))


def test_other_class_folders_for_testing(tmp_path: Path) -> None:
    write_set(tmp_path, "folder")
    (tmp_path / "val" / "class01").rename(tmp_path / "val" / "klass01")
    assert_refused(tmp_path, "different classes", "lacks class01; has also klass01")


def test_validation_images_without_class_folders(tmp_path: Path) -> None:
    write_folder(tmp_path, "train", cycle(30))
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").write_bytes(encode(colour(0), "JPEG"))
    assert_refused(tmp_path, "no class folder", "sort the images into a folder for each class")


def test_labels_out_of_range(tmp_path: Path) -> None:
    labels = cycle(12)
    labels[7] = 9
    assert_refused(write_set(tmp_path / "a", "parquet"), "cannot hold out", holdout=60)
    write_parquets(tmp_path / "b", "train", labels, shards=1)
    assert_refused(tmp_path / "b", "out of range", "train-00000-of-00001.parquet, row 7", "label 9")
    write_tars(tmp_path / "c", "train", labels, shards=1)
    assert_refused(tmp_path / "c", "out of range", "tiny-train-0000.tar, member k0007.cls", "class 9")


@pytest.mark.parametrize("layout", ["parquet", "tar"])
def test_a_validation_label_that_training_has_not(layout: str, tmp_path: Path) -> None:
    writer = {"parquet": write_parquets, "tar": write_tars}[layout]
    writer(tmp_path, "train", cycle(30))
    writer(tmp_path, "validation", [0, 1, 2, 3], shards=1)
    assert_refused(tmp_path, "out of range", "row 3" if layout == "parquet" else "member k0003.cls")


def test_other_names_for_testing(tmp_path: Path) -> None:
    for name, classes in (("train", ["a", "b", "c"]), ("validation", ["a", "b", "d"])):
        write(tmp_path / f"{name}.parquet", [colour(i) for i in range(9)], cycle(9), column="image", names=classes)
    assert_refused(tmp_path, "different classes", "lacks c; has also d")


def test_shards_sorted_by_class(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", sorted(cycle(60)))
    write_tars(tmp_path, "validation", cycle(12))
    assert_refused(tmp_path, "classes are left without a training image", "shuffle the images", holdout=20)


@pytest.mark.parametrize("holdout", [60, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_many_held_out(layout: str, holdout: int, tmp_path: Path) -> None:
    assert_refused(write_set(tmp_path, layout), "cannot hold out", "data.holdout", holdout=holdout)


def test_a_missing_shard(tmp_path: Path) -> None:
    files = write_parquets(tmp_path, "train", cycle(30))
    files[0].unlink()
    assert_refused(tmp_path, "lacks a shard", files[0].name)


@pytest.mark.parametrize("layout", ["parquet", "tar"])
def test_a_truncated_shard(layout: str, tmp_path: Path) -> None:
    write_set(tmp_path, layout)
    file = sorted(tmp_path.rglob("*train*"))[1]
    file.write_bytes(file.read_bytes()[:1700])
    assert_refused(tmp_path, "cannot be read", str(file), "half-written")


def test_a_tar_file_cut_between_two_images(tmp_path: Path) -> None:
    (file,) = write_tars(tmp_path, "train", cycle(30), shards=1)
    images = split(tmp_path, "train")
    file.write_bytes(file.read_bytes()[: 20 * 4 * 512])  # two headers and two contents of a block each, 20 images
    assert_stops(images, f"{file}, member after k0019.cls", "its end is missing")
    assert_refused(tmp_path, "its end is missing")


@pytest.mark.parametrize("layout", ["parquet", "tar"])
def test_a_shard_that_is_replaced_by_a_smaller_one(layout: str, tmp_path: Path) -> None:
    writer = {"parquet": write_parquets, "tar": write_tars}[layout]
    (file,) = writer(tmp_path, "train", cycle(30), shards=1)
    images = split(tmp_path, "train")
    writer(tmp_path, "train", cycle(28), shards=1)
    assert_stops(images, f"{file}: a shard has changed", "expected: 30 images", "got:      28")


def test_a_shard_that_is_no_tar_file(tmp_path: Path) -> None:
    write_set(tmp_path, "tar")
    (tmp_path / "tiny-train-0001.tar").write_bytes(b"<html>" * 2000)
    assert_refused(tmp_path, "a shard cannot be read", "tiny-train-0001.tar", "uncompressed")


IMAGE = encode(colour(1))
MEMBERS: dict[str, tuple[list[tuple[str, bytes]], str]] = {
    "no class": ([("a.png", IMAGE), ("b.png", IMAGE), ("b.cls", b"0")], "member a"),
    "no image": ([("a.png", IMAGE), ("a.cls", b"0"), ("b.cls", b"0")], "member b"),
    "two images": ([("a.png", IMAGE), ("a.jpg", IMAGE), ("a.cls", b"0")], "cls, jpg, png"),
    "twice": ([("a.png", IMAGE), ("a.png", IMAGE), ("a.cls", b"0")], "duplicate"),
    "no number": ([("a.png", IMAGE), ("a.cls", b"cat")], "member a.cls"),
    "empty": ([], "a shard is empty"),
    "only notes": ([("__meta__/x.json", json.dumps({}).encode()), ("README", b"")], "a shard is empty"),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_that_make_no_image(kind: str, tmp_path: Path) -> None:
    content, part = MEMBERS[kind]
    write_tar(tmp_path / "train-0000.tar", content)
    assert_refused(tmp_path, part, "train-0000.tar")


# ---- what shows while reading ----


def assert_stops(images: Any, *parts: str) -> None:
    for workers in (0, 2):
        with pytest.raises(DataError) as caught:
            given(images, workers)
        assert "Traceback" not in str(caught.value)
        for part in parts:
            assert part in str(caught.value)


def test_a_corrupt_file(tmp_path: Path) -> None:
    write_set(tmp_path, "folder")
    images = split(tmp_path, "train")
    file = tmp_path / "train" / "class01" / "0004.png"
    file.write_bytes(file.read_bytes()[:60])
    assert_stops(images, f"{file}: an image cannot be decoded")
    file.unlink()
    assert_stops(images, f"{file}: an image cannot be read")


def test_a_corrupt_row(tmp_path: Path) -> None:
    rows = cells([colour(i) for i in range(12)])
    rows[8]["bytes"] = rows[8]["bytes"][:60]
    file = write(tmp_path / "train.parquet", rows, cycle(12), column="image")
    assert_stops(split(tmp_path, "train"), f"{file}, row 8: an image cannot be decoded")
    rows[8] = {"bytes": None, "path": None}
    write(tmp_path / "train.parquet", rows, cycle(12), column="image")
    assert_stops(split(tmp_path, "train"), f"{file}, row 8: a row without an image")


def test_a_corrupt_member(tmp_path: Path) -> None:
    content = members(range(12), cycle(12))
    content[16] = (content[16][0], content[16][1][:60])
    file = write_tar(tmp_path / "train-0.tar", content)
    assert_stops(split(tmp_path, "train"), f"{file}, member k0008.png: an image cannot be decoded")


@pytest.mark.parametrize("layout", ["parquet", "tar"])
def test_a_shard_that_breaks_after_the_start(layout: str, tmp_path: Path) -> None:
    write_set(tmp_path, layout)
    images = split(tmp_path, "train")
    file = images.spans[-1].file
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 + 100])
    assert_stops(images, f"{file}", "cannot be read")
    file.unlink()
    assert_stops(images, f"{file}", "cannot be read")
