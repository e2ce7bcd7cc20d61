"""Crop and flip against a slow reference, normalisation, and the loader alone and under Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from epitorch.errors import DataError, InputError
from epitorch.training.data import ArrayLoader, BatchAugment, ImageArrays, Normalize, channel_stats, crop_flip

DTYPES = [torch.uint8, torch.float32, torch.bfloat16]


def slow_crop_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, padding: int, mode: str) -> Tensor:
    """One image at a time, one slice each, in double precision."""
    done = []
    for image, t, x, mirrored in zip(images, top.tolist(), left.tolist(), flip.tolist(), strict=True):
        height, width = image.shape[1:]
        wide = F.pad(image[None].double(), (padding,) * 4, mode={"zeros": "constant"}.get(mode, mode))[0]
        window = wide[:, t : t + height, x : x + width]
        done.append(window.flip(2) if mirrored else window)
    return torch.stack(done).to(images.dtype)


def random_images(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8).to(dtype)


class TestCropFlip:
    @given(
        shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(4, 9), st.integers(4, 9)),
        padding=st.integers(0, 3),
        mode=st.sampled_from(["zeros", "reflect"]),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 1000),
    )
    def test_equals_the_slow_reference(
        self, shape: tuple[int, ...], padding: int, mode: Any, dtype: torch.dtype, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(1, 256, shape, generator=generator).to(dtype)
        offsets = BatchAugment(padding, mode=mode).draw(shape[0], images.device, generator)
        cut = crop_flip(images, *offsets, padding, mode)
        torch.testing.assert_close(
            cut, slow_crop_flip(images, *offsets, padding, mode), rtol=0, atol=0, check_stride=False
        )

    @pytest.mark.parametrize("wrong", ["top", "left", "flip", "mode"])
    def test_every_argument_counts(self, wrong: str) -> None:
        """Negative control: the reference with one argument changed differs."""
        images = random_images(3, 2, 6, 7)
        right = {
            "top": torch.tensor([0, 2, 4]),
            "left": torch.tensor([1, 0, 3]),
            "flip": torch.arange(3) == 1,
        }
        changed: dict[str, Any] = {**right, "mode": "zeros"}
        changed[wrong] = {
            "top": 4 - right["top"],
            "left": right["left"] + 1,
            "flip": ~right["flip"],
        }.get(wrong, "reflect")
        cut = crop_flip(images, **right, padding=2)
        assert torch.equal(cut, slow_crop_flip(images, **right, padding=2, mode="zeros"))
        assert not torch.equal(cut, slow_crop_flip(images, padding=2, **changed))

    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    def test_keeps_the_memory_format(self, channels: int, layout: torch.memory_format) -> None:
        images = random_images(4, channels, 8, 8).contiguous(memory_format=layout)
        offsets = BatchAugment().draw(4, images.device)
        cut = crop_flip(images, *offsets, 4)
        assert cut.is_contiguous(memory_format=layout)
        assert torch.equal(cut, slow_crop_flip(images, *offsets, 4, "zeros"))


class TestBatchAugment:
    def test_the_generator_decides(self) -> None:
        augment, images = BatchAugment(), random_images(8, 3, 8, 8)
        first = augment(images, torch.Generator().manual_seed(1))
        torch.rand(5)
        assert torch.equal(augment(images, torch.Generator().manual_seed(1)), first)
        assert not torch.equal(augment(images, torch.Generator().manual_seed(2)), first)

    def test_a_generator_leaves_the_default_one_alone(self) -> None:
        images, state = random_images(8, 3, 8, 8), torch.get_rng_state()
        BatchAugment()(images, torch.Generator().manual_seed(1))
        assert torch.equal(torch.get_rng_state(), state)

    def test_draws_every_offset_about_equally_often(self) -> None:
        n = 9000
        top, left, flip = BatchAugment(4).draw(n, torch.device("cpu"), torch.Generator().manual_seed(0))
        for offsets in (top, left):
            counts = torch.bincount(offsets, minlength=9)
            assert counts.shape == (9,)
            assert (counts - n / 9).abs().max() < 5 * (n / 9) ** 0.5
        assert abs(int(flip.sum()) - n / 2) < 5 * (n / 4) ** 0.5
        joint = torch.bincount(top * 18 + left * 2 + flip.long(), minlength=162)
        assert (joint - n / 162).abs().max() < 6 * (n / 162) ** 0.5

    def test_eval_mode_is_the_identity(self) -> None:
        images = random_images(4, 3, 8, 8)
        assert BatchAugment().eval()(images) is images

    def test_nothing_to_do_changes_nothing(self) -> None:
        images = random_images(4, 3, 8, 8)
        assert torch.equal(BatchAugment(0, flip=False)(images), images)
        assert not torch.equal(BatchAugment(1, flip=False)(images), images)

    @pytest.mark.parametrize(
        "arguments, expected",
        [
            ({"padding": -1}, "from 0"),
            ({"padding": 1.5}, "from 0"),
            ({"mode": "reflekt"}, r"did you mean 'reflect'\?"),
        ],
    )
    def test_refuses_wrong_arguments(self, arguments: dict[str, Any], expected: str) -> None:
        with pytest.raises(InputError, match=expected):
            BatchAugment(**arguments)

    @pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 4, 8), (2, 3, 8, 4)])
    def test_refuses_wrong_shapes(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InputError, match="cannot crop"):
            BatchAugment(4, mode="reflect")(random_images(*shape))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_cuda_equals_cpu(self) -> None:
        augment, images = BatchAugment(), random_images(8, 3, 8, 8)
        on_cpu = augment(images, torch.Generator().manual_seed(1))
        on_cuda = augment(images.cuda(), torch.Generator().manual_seed(1))
        assert on_cuda.is_cuda
        assert torch.equal(on_cuda.cpu(), on_cpu)


class TestNormalize:
    def test_training_images_get_mean_0_and_deviation_1(self) -> None:
        images = random_images(50, 3, 6, 6) // torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None]
        made = ImageArrays(images, torch.zeros(50, dtype=torch.int64), ("x",), "made up")
        done = Normalize(*channel_stats(made))(images)
        assert done.dtype == torch.float32
        torch.testing.assert_close(done.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
        torch.testing.assert_close(done.std((0, 2, 3), correction=0), torch.ones(3), rtol=1e-5, atol=0)

    def test_uint8_equals_scaled_floats(self) -> None:
        images, normalize = random_images(4, 2, 5, 5), Normalize([0.5, 0.2], [0.3, 0.1])
        torch.testing.assert_close(normalize(images), normalize(images.float() / 255))
        by_hand = (images[1, 1, 2, 3].item() / 255 - 0.2) / 0.1
        assert normalize(images)[1, 1, 2, 3].item() == pytest.approx(by_hand, rel=1e-5)

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    def test_keeps_the_memory_format(self, layout: torch.memory_format) -> None:
        images = random_images(4, 2, 5, 6).contiguous(memory_format=layout)
        assert Normalize([0.5, 0.2], [0.3, 0.1])(images).is_contiguous(memory_format=layout)

    def test_is_part_of_the_state(self) -> None:
        other = Normalize([0.0, 0.0], [1.0, 1.0])
        other.load_state_dict(Normalize([0.5, 0.2], [0.3, 0.1]).state_dict())
        images = random_images(4, 2, 5, 5)
        assert torch.equal(other(images), Normalize([0.5, 0.2], [0.3, 0.1])(images))

    @pytest.mark.parametrize(
        "mean, std",
        [([0.5], [0.0]), ([0.5], [-1.0]), ([0.5], [0.1, 0.2]), ([float("nan")], [1.0]), ([], [])],
    )
    def test_refuses_unusable_numbers(self, mean: list[float], std: list[float]) -> None:
        with pytest.raises(InputError, match="wrong mean or std"):
            Normalize(mean, std)

    def test_refuses_another_number_of_channels(self) -> None:
        with pytest.raises(InputError, match="cannot normalise"):
            Normalize([0.5, 0.5], [1.0, 1.0])(random_images(2, 3, 4, 4))


def numbered(n: int) -> ImageArrays:
    """Image `i` is filled with `i`, its label is `i`."""
    images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 4, 4).contiguous()
    return ImageArrays(images, torch.arange(n), tuple(map(str, range(n))), "made up")


def seen(loader: ArrayLoader) -> list[int]:
    return [label for _, labels in loader for label in labels.tolist()]


class TestArrayLoader:
    @pytest.mark.parametrize("drop_last, sizes", [(False, [4, 4, 2]), (True, [4, 4])])
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_sizes_and_length(self, shuffle: bool, drop_last: bool, sizes: list[int]) -> None:
        loader = ArrayLoader(numbered(10), 4, shuffle=shuffle, drop_last=drop_last)
        assert [len(labels) for _, labels in loader] == sizes
        assert len(loader) == len(sizes)
        assert len(ArrayLoader(numbered(8), 4, drop_last=drop_last)) == 2

    def test_images_keep_their_labels(self) -> None:
        for images, labels in ArrayLoader(numbered(50), 7, shuffle=True):
            assert images.dtype == torch.uint8
            assert torch.equal(images[:, 0, 0, 0].long(), labels)

    def test_unshuffled_is_the_order_of_the_set(self) -> None:
        assert seen(ArrayLoader(numbered(30), 7)) == list(range(30))

    def test_shuffled_sees_each_image_once_in_an_order_of_its_own(self) -> None:
        loader = ArrayLoader(numbered(100), 7, shuffle=True, seed=5)
        orders = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            orders.append(seen(loader))
        assert all(sorted(order) == list(range(100)) for order in orders)
        assert list(range(100)) not in orders
        assert len({tuple(order) for order in orders}) == 3

    def test_order_depends_on_seed_and_epoch_only(self) -> None:
        def order(seed: int, epoch: int) -> list[int]:
            loader = ArrayLoader(numbered(100), 9, shuffle=True, seed=seed)
            loader.set_epoch(epoch)
            return seen(loader)

        state = torch.get_rng_state()
        first = order(1, 4)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        assert order(1, 4) == first
        assert len({tuple(order(seed, epoch)) for seed in (0, 1, 2) for epoch in (0, 1, 2)}) == 9

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_batches_are_copies(self, shuffle: bool) -> None:
        made = numbered(10)
        for images, labels in ArrayLoader(made, 4, shuffle=shuffle):
            images.zero_()
            labels.zero_()
        assert torch.equal(made.images, numbered(10).images)
        assert made.labels.tolist() == list(range(10))

    @pytest.mark.parametrize("channels_last", [False, True])
    def test_memory_format(self, channels_last: bool) -> None:
        images, _ = next(iter(ArrayLoader(numbered(10), 4, channels_last=channels_last)))
        assert images.is_contiguous(memory_format=torch.channels_last) is channels_last
        assert images.is_contiguous() is not channels_last

    @pytest.mark.parametrize("batch_size, drop_last", [(0, False), (-1, False), (2.0, False), (11, True)])
    def test_refuses_wrong_batch_sizes(self, batch_size: int, drop_last: bool) -> None:
        with pytest.raises(DataError, match="wrong batch_size"):
            ArrayLoader(numbered(10), batch_size, drop_last=drop_last)
        assert len(ArrayLoader(numbered(10), 11)) == 1


class Recorder(pl.LightningModule):
    """Notes the labels of every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        self.seen.setdefault(self.current_epoch, []).extend(labels.tolist())
        return self.layer(images.float().mean((2, 3))).mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        assert len(batch[1]) <= 4

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(epochs: int) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own
def test_lightning_sets_the_epoch(tmp_path: Any) -> None:
    """Fresh order in each epoch, and the same orders after resuming as without the stop."""
    loader, held = ArrayLoader(numbered(20), 4, shuffle=True), ArrayLoader(numbered(6), 4)
    whole, part, rest = Recorder(), Recorder(), Recorder()
    trainer(3).fit(whole, loader, held)
    assert sorted(whole.seen) == [0, 1, 2]
    assert all(sorted(order) == list(range(20)) for order in whole.seen.values())
    assert len(set(map(tuple, whole.seen.values()))) == 3
    first = trainer(1)
    first.fit(part, loader, held)
    first.save_checkpoint(tmp_path / "one.ckpt")
    trainer(3).fit(rest, loader, held, ckpt_path=tmp_path / "one.ckpt")
    assert {**part.seen, **rest.seen} == whole.seen
