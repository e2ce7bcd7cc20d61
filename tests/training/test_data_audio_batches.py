from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epitorch.checkpoint import ModelInput
from epitorch.errors import InputError
from epitorch.training.data_audio_batches import NormalizeSound, SoundAugment, crop_sounds, sounding_part
from epitorch.training.data_batches import Normalize
from epitorch.training.data_kinds import normalization


def literal_crop(wave: list[int], first: int, length: int) -> list[int]:
    return [wave[i] if 0 <= i < len(wave) else 0 for i in range(first, first + length)]


def waves(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int16)[:, None]


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=8), st.integers(-12, 12), st.integers(1, 10))
def test_crops_are_windows_with_zeros_outside(wave: list[int], first: int, length: int) -> None:
    other = wave[::-1]
    got = crop_sounds(waves(wave, other), torch.tensor([first, 0]), length)
    assert got[:, 0].tolist() == [literal_crop(wave, first, length), literal_crop(other, 0, length)]
    assert got.dtype == torch.int16


def test_the_sounding_part_lies_between_the_first_and_last_loud_sample() -> None:
    batch = waves(
        [0, 32, 33, 0, -33, 7, 0],
        [-32768, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 900],
        [1, -32, 32, 0, 0, 0, 0],  # all quiet: the whole clip
    )
    begin, end = sounding_part(batch)
    assert list(zip(begin.tolist(), end.tolist(), strict=True)) == [(2, 5), (0, 1), (6, 7), (0, 7)]


@given(st.integers(0, 90), st.integers(1, 100), st.integers(1, 100), st.integers(0, 2**20))
def test_crops_meet_the_sound(begin: int, length: int, crop: int, seed: int) -> None:
    end = min(begin + length, 100)
    wave = torch.zeros(1, 1, 100, dtype=torch.int16)
    wave[..., begin:end] = 1000
    augment = SoundAugment(crop, gain_db=0)
    got = augment(wave, torch.Generator().manual_seed(seed))
    assert got.shape == (1, 1, crop)
    heard = round(float(got.sum()) * 32768 / 1000)
    assert heard >= min(end - begin, crop - crop // 2 - 1)


def test_every_allowed_place_is_drawn() -> None:
    wave = torch.zeros(1, 1, 20, dtype=torch.int16)
    wave[..., 10] = 1000
    augment, generator = SoundAugment(4, gain_db=0), torch.Generator().manual_seed(0)
    crops = [augment(wave, generator) for _ in range(200)]
    heard = {int(crop.argmax()) for crop in crops if crop.max() > 0}
    assert heard == {1, 2}
    assert all(crop.max() > 0 for crop in crops)


def test_gains_fill_the_range_in_decibels() -> None:
    batch = torch.full((500, 1, 64), 8192, dtype=torch.int16)
    got = SoundAugment(8, gain_db=6.0)(batch, torch.Generator().manual_seed(0)).amax((1, 2))
    decibels = 20 * torch.log10(got / 0.25)
    assert decibels.abs().max() <= 6.0001
    assert decibels.min() < -5.5
    assert decibels.max() > 5.5
    assert abs(float(decibels.mean())) < 0.5


def test_evaluation_and_equal_generators() -> None:
    batch = torch.randint(-9000, 9000, (4, 1, 300)).to(torch.int16)
    augment = SoundAugment(100)
    one, same, other = (augment(batch, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    assert not torch.equal(one, other)
    assert augment.eval()(batch) is batch


@pytest.mark.parametrize("length, gain", [(0, 1.0), (2.5, 1.0), (10, -1.0), (10, float("nan"))])
def test_wrong_arguments_are_refused(length: object, gain: float) -> None:
    with pytest.raises(InputError, match="wrong crop or gain"):
        SoundAugment(length, gain)  # type: ignore[arg-type]


def test_whole_clips_and_crops_are_normalised_alike() -> None:
    batch = torch.randint(-32768, 32767, (3, 1, 50)).to(torch.int16)
    normalize = NormalizeSound((0.1,), (0.5,))
    want = (batch.double() / 32768 - 0.1) / 0.5
    torch.testing.assert_close(normalize(batch).double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(normalize(batch.float() / 32768).double(), want, rtol=1e-5, atol=1e-6)
    for wrong in (torch.zeros(2, 2, 9), torch.zeros(2, 9)):
        with pytest.raises(InputError, match="waveforms"):
            normalize(wrong)
    with pytest.raises(InputError, match="one mean"):
        NormalizeSound((0.0,), (0.0,))


def test_the_kind_follows_the_shape() -> None:
    sound = normalization(ModelInput((1, 4000), (0.0,), (0.5,), ("a", "b")))
    image = normalization(ModelInput((3, 8, 8), (0.0,) * 3, (0.5,) * 3, ("a", "b")))
    assert (type(sound), type(image)) == (NormalizeSound, Normalize)
