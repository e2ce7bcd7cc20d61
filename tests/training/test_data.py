"""The image set itself, its split and statistics, the digits, and torchvision's on-disk format."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.datasets import CIFAR10

from epitorch.errors import DataError
from epitorch.training.data import (
    CIFAR10_CLASSES,
    ImageArrays,
    channel_stats,
    load_digits_arrays,
    load_images,
    split_holdout,
)


def arrays(labels: list[int], classes: int | None = None, channels: int = 3) -> ImageArrays:
    """A set in which every image says its own index in its first pixels."""
    n = len(labels)
    images = torch.randint(0, 256, (n, channels, 4, 4), dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(n) % 256
    images[:, 0, 0, 1] = torch.arange(n) // 256
    names = tuple(map(str, range(max(labels) + 1 if classes is None else classes)))
    return ImageArrays(images, torch.tensor(labels), names, "made up")


def identities(part: ImageArrays) -> list[int]:
    pixels = part.images[:, 0, 0].long()
    return (pixels[:, 0] + 256 * pixels[:, 1]).tolist()


class TestImageArrays:
    def test_reports_itself(self) -> None:
        made = arrays([0, 2, 1])
        assert (len(made), made.num_classes, made.image_shape) == (3, 3, (3, 4, 4))
        assert "tensor" not in repr(made)
        assert made.to("cpu") is made

    @pytest.mark.parametrize(
        "images, labels, expected",
        [
            (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), "uint8"),
            (torch.zeros(2, 3, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), "N, C, H, W"),
            (torch.zeros(0, 3, 4, 4, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), "N >= 1"),
            (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), r"\(2,\)"),
            (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2), "int64"),
            (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), "out of range"),
            (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, -1]), "out of range"),
        ],
    )
    def test_refuses_what_does_not_fit(self, images: torch.Tensor, labels: torch.Tensor, expected: str) -> None:
        with pytest.raises(DataError, match=expected):
            ImageArrays(images, labels, ("only",), "here")


class TestSplitHoldout:
    @given(
        counts=st.lists(st.integers(2, 40), min_size=1, max_size=6),
        share=st.floats(0.05, 0.5),
        seed=st.integers(0, 100),
    )
    def test_is_stratified_disjoint_and_complete(self, counts: list[int], share: float, seed: int) -> None:
        labels = [label for label, count in enumerate(counts) for _ in range(count)]
        n = max(1, int(share * len(labels)))
        train, held = split_holdout(arrays(labels), n, seed)
        assert len(held) == n
        assert sorted(identities(train) + identities(held)) == list(range(len(labels)))
        for label, count in enumerate(counts):
            assert abs(int((held.labels == label).sum()) - n * count / len(labels)) < 1

    def test_images_keep_their_labels_and_order(self) -> None:
        made = arrays([0, 1, 2] * 20)
        for part in split_holdout(made, 12, 3):
            kept = identities(part)
            assert kept == sorted(kept)
            torch.testing.assert_close(part.labels, made.labels[kept], rtol=0, atol=0)
            torch.testing.assert_close(part.images, made.images[kept], rtol=0, atol=0)

    def test_depends_on_the_seed_only(self) -> None:
        made = arrays([0, 1] * 50)
        first = identities(split_holdout(made, 20, 1)[1])
        torch.rand(3)
        assert identities(split_holdout(made, 20, 1)[1]) == first
        assert identities(split_holdout(made, 20, 2)[1]) != first

    def test_leaves_the_default_generator_alone(self) -> None:
        made, state = arrays([0, 1] * 5), torch.get_rng_state()
        split_holdout(made, 2, 0)
        assert torch.equal(torch.get_rng_state(), state)

    def test_a_class_without_images_is_no_obstacle(self) -> None:
        train, held = split_holdout(arrays([0, 0, 2, 2], classes=4), 2, 0)
        assert train.labels.tolist() == held.labels.tolist() == [0, 2]

    @pytest.mark.parametrize("n", [0, -1, 4, 5, 2.0, True])
    def test_refuses_a_number_out_of_range(self, n: int) -> None:
        with pytest.raises(DataError, match=r"from 1 to 3"):
            split_holdout(arrays([0, 1, 0, 1]), n, 0)

    def test_refuses_to_empty_a_class(self) -> None:
        with pytest.raises(DataError, match=r"class '1' \(1 images\)"):
            split_holdout(arrays([0, 0, 0, 1]), 3, 0)


class TestChannelStats:
    def test_equals_the_plain_formula(self) -> None:
        made = arrays([0] * 4100)  # more than one chunk
        scaled = made.images.double() / 255
        mean, std = channel_stats(made)
        expected = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3), correction=0)
        torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), expected[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.tensor(std, dtype=torch.float64), expected[1], rtol=1e-12, atol=0)
        assert channel_stats(split_holdout(made, 10, 0)[0]) != (mean, std)

    def test_refuses_a_constant_channel(self) -> None:
        made = arrays([0, 0])
        made.images[:, 1] = 7
        with pytest.raises(DataError, match="channel 1 holds one value"):
            channel_stats(made)


class TestDigits:
    def test_every_digit_is_in_exactly_one_split(self) -> None:
        from sklearn.datasets import load_digits

        whole = load_digits()
        train, test = load_digits_arrays(), load_images("digits", "test")
        assert (len(train), len(test)) == (1437, 360)
        assert train.image_shape == (1, 8, 8)
        assert train.classes == tuple("0123456789")
        both = torch.cat((train.images, test.images)).flatten(1).double() * 16 / 255
        ours = np.column_stack((both.round().numpy(), torch.cat((train.labels, test.labels)).numpy()))
        theirs = np.column_stack((whole.data, whole.target))
        assert sorted(map(tuple, ours)) == sorted(map(tuple, theirs))
        assert int(train.images.max()) == 255
        assert np.bincount(test.labels).max() - np.bincount(test.labels).min() <= 2

    def test_knows_two_splits(self) -> None:
        with pytest.raises(DataError, match=r"no split 'tets'; did you mean 'test'\?"):
            load_images("digits", "tets")


class Batches:
    """Writes tiny batches under CIFAR-10's names, and their checksums in place of the published ones."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        self.folder = root / "cifar-10-batches-py"
        self.folder.mkdir(parents=True)
        generator = np.random.default_rng(0)
        names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
        self.pixels = {name: generator.integers(0, 256, (10, 3072), np.uint8) for name in names}
        for name, pixels in self.pixels.items():
            self.write(name, {"data": pixels, "labels": list(range(10)), "filenames": [b"x.png"] * 10})
        self.write("batches.meta", {"label_names": list(CIFAR10_CLASSES), "num_vis": 3072})

    def write(self, name: str, value: dict[str, object], flags: bytes = b"K\x00K\x01") -> None:
        raw = pickle.dumps(value, protocol=2)
        # as the published files have it: NumPy's old module name, and 0, 1 where new ones write False, True
        raw = raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        raw = raw.replace(b"\x89\x88\x87", flags + b"\x87")
        (self.folder / name).write_bytes(raw)
        self.accept(name)

    def accept(self, name: str) -> None:
        """Take the file's present checksum for the right one."""
        md5 = hashlib.md5((self.folder / name).read_bytes()).hexdigest()
        for attribute in ("train_list", "test_list"):
            entries = [[n, md5 if n == name else old] for n, old in getattr(CIFAR10, attribute)]
            self.monkeypatch.setattr(CIFAR10, attribute, entries)
        if name == CIFAR10.meta["filename"]:
            self.monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5})


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batches:
    return Batches(tmp_path / "data", monkeypatch)


class TestTorchvisionFormat:
    @pytest.mark.parametrize("path", ["root", "folder"])
    def test_reads_both_splits(self, batches: Batches, path: str) -> None:
        train = load_images(getattr(batches, path), "train")
        test = load_images(getattr(batches, path), "test", format="torchvision")
        expected = np.concatenate([batches.pixels[f"data_batch_{i}"] for i in range(1, 6)])
        assert np.array_equal(train.images.flatten(1).numpy(), expected)
        assert np.array_equal(test.images.flatten(1).numpy(), batches.pixels["test_batch"])
        assert train.image_shape == (3, 32, 32)
        assert train.labels.tolist() == list(range(10)) * 5
        assert train.classes == CIFAR10_CLASSES

    @pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.4.0", reason="NumPy is silent before 2.4")
    def test_numpys_remark_on_old_pickles_is_kept_from_the_user(
        self, batches: Batches, recwarn: pytest.WarningsRecorder
    ) -> None:
        pixels = batches.pixels["test_batch"]
        value = {"data": pixels, "labels": list(range(10))}
        batches.write("test_batch", value, flags=b"K\x00\x88")  # the form that every 2.4 remarks on
        assert len(load_images(batches.root, "test")) == 10
        assert not recwarn.list
        with pytest.warns(match="align should be passed"):
            CIFAR10(batches.root, train=False, download=False)

    @pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
    def test_names_a_damaged_file(self, batches: Batches, name: str) -> None:
        file = batches.folder / name
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(DataError, match=f"{name}: not CIFAR-10"):
            load_images(batches.root, "train")

    def test_names_a_missing_file(self, batches: Batches) -> None:
        (batches.folder / "data_batch_2").unlink()
        with pytest.raises(DataError, match="data_batch_2: not CIFAR-10"):
            load_images(batches.root, "test")

    def test_a_file_that_only_has_the_right_checksum(self, batches: Batches) -> None:
        batches.write("test_batch", {"nothing": 1})
        with pytest.raises(DataError, match="cifar-10-batches-py: not CIFAR-10"):
            load_images(batches.root, "test")

    def test_unknown_split(self, batches: Batches) -> None:
        with pytest.raises(DataError, match="train or test"):
            load_images(batches.root, "validation")

    def test_two_layouts_in_one_folder_are_not_guessed(self, batches: Batches) -> None:
        (batches.root / "train.parquet").touch()
        with pytest.raises(DataError, match="cannot tell which"):
            load_images(batches.root, "train")
        assert len(load_images(batches.root, "train", format="torchvision")) == 50


class TestLoadImages:
    def test_unknown_format(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"did you mean 'parquet'\?"):
            load_images(tmp_path, "train", format="parqet")  # type: ignore[arg-type]

    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"absent: no data folder"):
            load_images(tmp_path / "absent", "train")

    def test_a_file_in_place_of_a_folder(self, tmp_path: Path) -> None:
        file = tmp_path / "train.parquet"
        file.touch()
        with pytest.raises(DataError, match="give the folder that holds it"):
            load_images(file, "train")

    def test_a_folder_without_data(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(DataError, match=r"(?s)no data set in this folder.*notes\.txt"):
            load_images(tmp_path, "train")
