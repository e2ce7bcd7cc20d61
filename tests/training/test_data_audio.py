from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from epitorch.errors import DataError, MissingExtraError
from epitorch.training import data_audio_files
from epitorch.training.data_audio import SoundArrays, load_sound_training, load_sounds, sound_stats
from epitorch.training.recipe_sound import SoundSection
from sound_files import ESC10, Row, clip_rows, tone, write_sounds, write_table

TINY = SoundSection(sample_rate=8000, clip_seconds=0.5, crop_seconds=0.25)
TWO = {0: "dog", 10: "rain"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sounds(tmp_path, classes=TWO)
    return tmp_path


def test_folds_are_the_sides_and_classes_are_numbered_in_ascending_order(tmp_path: Path) -> None:
    rows = write_sounds(tmp_path, folds=3, clips=2)
    test, train = load_sounds(tmp_path, "test", replace(TINY, fold=2)), load_sounds(tmp_path, "train", TINY)
    assert test.classes == tuple(ESC10[target] for target in sorted(ESC10))
    assert test.image_shape == (1, 4000)
    assert (len(test), len(train)) == (20, 40)
    order = sorted(ESC10)
    wanted = [order.index(int(str(row["target"]))) for row in rows if row["fold"] == 2]
    assert test.labels.tolist() == wanted


def test_a_wav_of_the_right_rate_is_read_sample_for_sample(folder: Path) -> None:
    test = load_sounds(folder, "test", TINY)
    first = soundfile.read(folder / "audio" / "1-1000-A-0.wav", dtype="int16")[0]
    torch.testing.assert_close(test.images[0, 0], torch.from_numpy(first))
    assert not torch.equal(test.images[1, 0], test.images[0, 0])


@pytest.mark.parametrize("suffix, tolerance", [("ogg", 0.1), ("flac", 1e-3), ("wav", 1e-3)])
def test_resampling_keeps_the_tone_and_formats_agree(tmp_path: Path, suffix: str, tolerance: float) -> None:
    """Against the tone computed at the lower rate: nothing of the resampler is used."""
    write_sounds(tmp_path, classes=TWO, rate=16_000, suffix=suffix)
    loud = 0.4 * np.sin(2 * np.pi * 150 * np.arange(8000) / 16_000)
    soundfile.write(tmp_path / "audio" / f"1-1000-A-0.{suffix}", np.stack([loud, loud], 1), 16_000)  # stereo
    got = load_sounds(tmp_path, "test", TINY).images[0, 0].double() / 32768
    want = torch.from_numpy(0.4 * np.sin(2 * np.pi * 150 * np.arange(4000) / 8000))
    middle = slice(400, 3600)  # a filter needs both sides
    assert (got[middle] - want[middle]).abs().max() < tolerance
    wrong = torch.from_numpy(0.4 * np.sin(2 * np.pi * 160 * np.arange(4000) / 8000))
    assert (got[middle] - wrong[middle]).abs().max() > 0.2


def test_what_resampling_cannot_keep_is_filtered_out(tmp_path: Path) -> None:
    write_sounds(tmp_path, classes=TWO, rate=16_000)
    high = 0.4 * np.sin(2 * np.pi * 6000 * np.arange(8000) / 16_000)  # above half of 8000
    soundfile.write(tmp_path / "audio" / "1-1000-A-0.wav", high, 16_000)
    test = load_sounds(tmp_path, "test", TINY)
    assert test.images[0, 0, 400:3600].abs().max() < 20
    assert test.images[1].abs().max() > 10_000


def test_short_clips_are_filled_with_zeros_and_long_ones_cut(folder: Path) -> None:
    soundfile.write(folder / "audio" / "1-1000-A-0.wav", tone(0, 0.25, 8000, 0), 8000)
    soundfile.write(folder / "audio" / "1-1000-B-0.wav", tone(0, 0.75, 8000, 0), 8000)
    test = load_sounds(folder, "test", TINY)
    assert test.images[0, 0, :2000].abs().max() > 10_000
    assert test.images[0, 0, 2000:].abs().max() == 0
    assert test.images[1, 0, -100:].abs().max() > 10_000


def test_samples_beyond_full_scale_are_clipped(folder: Path) -> None:
    file = folder / "audio" / "1-1000-A-0.wav"
    soundfile.write(file, np.tile(np.array([1.5, -1.5], np.float32), 2000), 8000, subtype="FLOAT")
    images = load_sounds(folder, "test", TINY).images[0]
    assert (int(images.max()), int(images.min())) == (32767, -32768)


# ---- cache ----


def test_decoded_clips_come_from_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_sounds(folder, "test", TINY)

    def fail(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(data_audio_files, "_decode", fail)
    torch.testing.assert_close(load_sounds(folder, "test", TINY).images, first.images)
    assert len(load_sounds(folder, "test", replace(TINY, fold=2))) == len(first)
    with pytest.raises(AssertionError, match="decoded again"):
        load_sounds(folder, "test", replace(TINY, sample_rate=4000))


def test_a_changed_sound_is_decoded_anew(folder: Path) -> None:
    before = load_sounds(folder, "test", TINY)
    soundfile.write(folder / "audio" / "1-1000-A-0.wav", tone(7, 0.5, 8000, 99), 8000)
    assert not torch.equal(load_sounds(folder, "test", TINY).images[0], before.images[0])


# ---- what is held out ----


def test_held_out_clips_are_training_clips_and_share_no_recording(tmp_path: Path) -> None:
    rows = write_sounds(tmp_path, folds=3, clips=3)
    section = replace(TINY, fold=3)
    whole = load_sounds(tmp_path, "train", section)
    train, held = load_sound_training(tmp_path, section, 20)
    assert isinstance(train, SoundArrays)
    assert len(train) + len(held) == len(whole) == 60
    assert torch.bincount(held.labels, minlength=10).tolist() == [2] * 10
    sources = [f"{row['target']}/{row['src_file']}" for row in rows if row["fold"] != 3]
    by_bytes = {wave.numpy().tobytes(): name for wave, name in zip(whole.images, sources, strict=True)}
    sides = [{by_bytes[wave.numpy().tobytes()] for wave in part.images} for part in (train, held)]
    assert sides[0] | sides[1] == set(sources)
    assert not sides[0] & sides[1]
    again = load_sound_training(tmp_path, section, 20)[1]
    torch.testing.assert_close(again.images, held.images)


def test_a_number_too_small_for_any_recording_is_refused(tmp_path: Path) -> None:
    write_sounds(tmp_path, clips=2, classes=TWO)  # in each fold and class one recording, with two takes
    with pytest.raises(DataError, match=r"(?s)cannot hold out 2 clips.*no recording fits"):
        load_sound_training(tmp_path, TINY, 2)


def test_each_class_must_keep_a_clip_to_train_on(folder: Path) -> None:
    train, held = load_sound_training(folder, TINY, 4)
    assert set(train.labels.tolist()) == set(held.labels.tolist()) == {0, 1}
    with pytest.raises(DataError, match="class 'dog' keeps none of its 3 clips"):
        load_sound_training(folder, TINY, 6)


def test_statistics_are_those_of_numpy(folder: Path) -> None:
    arrays = load_sounds(folder, "train", TINY)
    (mean,), (std,) = sound_stats(arrays)
    samples = arrays.images.numpy().astype(np.float64) / 32768
    assert mean == pytest.approx(samples.mean(), rel=1e-9)
    assert std == pytest.approx(samples.std(), rel=1e-9)
    silent = SoundArrays(torch.zeros_like(arrays.images), arrays.labels, arrays.classes, "silence")
    with pytest.raises(DataError, match="cannot be normalised"):
        sound_stats(silent)


# ---- what is wrong is said with the file's name ----


def _no_table(folder: Path) -> None:
    shutil.rmtree(folder / "meta")


def _missing_file(folder: Path) -> None:
    (folder / "audio" / "2-2101-A-10.wav").unlink()


def _noise_for_a_file(folder: Path) -> None:
    (folder / "audio" / "2-2101-A-10.wav").write_bytes(b"no sound" * 100)


def _empty_file(folder: Path) -> None:
    (folder / "audio" / "2-2101-A-10.wav").write_bytes(b"")


def _cut_wav(folder: Path) -> None:
    file = folder / "audio" / "2-2101-A-10.wav"
    file.write_bytes(file.read_bytes()[:4000])


def _without_samples(folder: Path) -> None:
    soundfile.write(folder / "audio" / "2-2101-A-10.wav", np.zeros(0), 8000)


def _not_a_number(folder: Path) -> None:
    soundfile.write(folder / "audio" / "2-2101-A-10.wav", np.full(4000, np.nan), 8000, subtype="FLOAT")


@pytest.mark.parametrize(
    "damage, said",
    [
        (_no_table, "no table of the clips.*esc50.csv"),
        (_missing_file, "1 of 12 clips are missing.*2-2101-A-10.wav"),
        (_noise_for_a_file, "2-2101-A-10.wav: a sound is damaged"),
        (_empty_file, "2-2101-A-10.wav: a sound is damaged"),
        (_cut_wav, "2-2101-A-10.wav: a sound is damaged.*cut short"),
        (_without_samples, "2-2101-A-10.wav: a sound is damaged.*0 of 0"),
        (_not_a_number, "2-2101-A-10.wav: a sound is damaged.*not numbers"),
    ],
)
def test_damage_is_reported_with_the_file(folder: Path, damage: Callable[[Path], None], said: str) -> None:
    load_sounds(folder, "test", TINY)  # whole before
    damage(folder)
    with pytest.raises(DataError, match=f"(?s){said}"):
        load_sounds(folder, "test", TINY)


@pytest.mark.parametrize("part", [0.5, 0.97])
def test_an_ogg_file_that_was_cut_is_refused_though_it_decodes(tmp_path: Path, part: float) -> None:
    write_sounds(tmp_path, classes=TWO, suffix="ogg", seconds=2.0)
    section = replace(TINY, clip_seconds=2.0)
    load_sounds(tmp_path, "test", section)
    file = tmp_path / "audio" / "2-2101-A-10.ogg"
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(DataError, match=r"2-2101-A-10.ogg: a sound is damaged"):
        load_sounds(tmp_path, "test", section)


def _change(rows: list[Row], at: int, **values: object) -> list[Row]:
    return [{**row, **values} if i == at else row for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    "values, said",
    [
        ({"fold": "two"}, r"(?s)line 5: a line of the table cannot be read.*fold='two'"),
        ({"target": "-1"}, r"line 5: a line of the table cannot be read"),
        ({"target": ""}, r"line 5: a line of the table cannot be read"),
        ({"esc10": "perhaps"}, r"line 5: a line of the table cannot be read"),
        ({"filename": "../1-1000-A-0.wav"}, r"line 5: a line of the table cannot be read"),
        ({"filename": "1-1000-A-0.wav"}, r"line 5: a clip is listed twice"),
        ({"category": "cat"}, r"(?s)line 6: class 10 has two names.*cat.*rain"),
    ],
)
def test_a_wrong_line_of_the_table_is_named(folder: Path, values: Row, said: str) -> None:
    rows = clip_rows(2, 3, TWO, "wav")
    write_table(folder, _change(rows, 3, **values))
    with pytest.raises(DataError, match=said):
        load_sounds(folder, "test", TINY)


def test_a_missing_column_is_named(folder: Path) -> None:
    write_table(folder, clip_rows(2, 3, TWO, "wav"), ["filename", "fold", "target", "category"])
    with pytest.raises(DataError, match=r"(?s)lacks a column.*src_file"):
        load_sounds(folder, "test", TINY)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_without_clips_on_a_side_is_named(folder: Path, split: str) -> None:
    fold = 2 if split == "train" else 1
    write_table(folder, [r for r in clip_rows(2, 3, TWO, "wav") if (r["fold"], r["target"]) != (fold, 10)])
    with pytest.raises(DataError, match=rf"class 'rain' has no clip in the {split} folds"):
        load_sounds(folder, split, TINY)
    with pytest.raises(DataError, match=r"class 'rain'"):
        load_sound_training(folder, TINY, 4)


@pytest.mark.parametrize("fold", [3, 99])
def test_a_fold_that_is_not_there_is_refused(folder: Path, fold: int) -> None:
    with pytest.raises(DataError, match=rf"(?s)cannot test on fold {fold}.*1, 2"):
        load_sounds(folder, "test", replace(TINY, fold=fold))


def test_esc10_is_picked_out_of_a_larger_set(tmp_path: Path) -> None:
    write_sounds(tmp_path, classes={**TWO, 2: "pig"})
    small = load_sounds(tmp_path, "test", replace(TINY, subset="esc10"))
    assert small.classes == ("dog", "rain")
    assert load_sounds(tmp_path, "test", TINY).classes == ("dog", "pig", "rain")
    for file in (tmp_path / "audio").glob("*-2.wav"):
        file.unlink()
    torch.testing.assert_close(load_sounds(tmp_path, "test", replace(TINY, subset="esc10")).images, small.images)
    with pytest.raises(DataError, match=r"(?s)6 of 18 clips are missing.*subset: esc10"):
        load_sounds(tmp_path, "test", TINY)


def test_an_unknown_split_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="no split 'valid'"):
        load_sounds(folder, "valid", TINY)


def test_the_real_esc10(esc10_dir: Path) -> None:
    section = SoundSection(fold=5, sample_rate=4000)
    train, held = load_sound_training(esc10_dir, section, 40)
    test = load_sounds(esc10_dir, "test", section)
    assert (len(train) + len(held), len(test)) == (320, 80)
    assert test.classes == tuple(ESC10[target] for target in sorted(ESC10))
    assert torch.bincount(test.labels).tolist() == [8] * 10
    assert 30 <= len(held) <= 40


@pytest.mark.parametrize("module", ["soundfile", "soxr"])
def test_a_missing_library_says_which_extra(folder: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"epitorch\[audio\]"):
        load_sounds(folder, "test", TINY)
