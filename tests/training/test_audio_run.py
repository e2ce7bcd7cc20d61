"""Sounds through the whole flow: recipe, training, checkpoint, evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from run_helpers import quiet

from epitorch.checkpoint import load_checkpoint
from epitorch.cli import main
from epitorch.commands import images_to_check
from epitorch.errors import DataError, InputError, RecipeError
from epitorch.training.data_kinds import kind_in, load_split, normalization
from epitorch.training.evaluation import evaluate_checkpoint
from epitorch.training.folds import cross_validation
from epitorch.training.module import evaluate
from epitorch.training.recipe import Recipe, parse_recipe
from epitorch.training.recipe_sound import SoundSection, with_fold
from epitorch.training.run import train
from sound_files import ESC10, write_sounds

ESC50 = {target: ESC10.get(target, f"class_{target}") for target in range(50)}
LAYERS = {f"conv{i}": {"epitome_shape": shape, "spatial_starts": "out"} for i, shape in ((3, [1, 16, 512]),)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ESC-10 and ESC-50 in small."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("esc10", "esc50")}
    write_sounds(found["esc10"], clips=5)
    write_sounds(found["esc50"], classes=ESC50)
    return found


def tiny_data(**changes: Any) -> dict[str, Any]:
    data = {
        "model": {"name": "epitorch:soundnet8", "arguments": {"num_classes": 10}},
        "data": {"holdout": 10},
        "sound": {"sample_rate": 8000, "clip_seconds": 0.5, "crop_seconds": 0.3},
        "epitome": {"index": "learner", "layers": LAYERS},
        "training": {"epochs": 1, "batch_size": 16, "peak_lr": 0.02},
    }
    return {**data, **changes}


def tiny(**changes: Any) -> Recipe:
    return parse_recipe(tiny_data(**changes), source="tiny", name="tiny/sound")


def test_tones_are_learned_and_the_checkpoint_says_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    training = {"epochs": 12, "batch_size": 20, "peak_lr": 0.02}
    result = train(tiny(training=training), folders["esc10"], tmp_path / "run", console=quiet())
    assert result.accuracy.test > 0.3  # one in ten by chance
    report = evaluate_checkpoint(tmp_path / "run", folders["esc10"])
    assert report.accuracy == result.accuracy.test
    assert report.accuracy_learner == result.accuracy.test_learner
    assert "fold 1, 8000 Hz" in report.data
    assert cross_validation([result]).mean == result.accuracy.test


def test_whole_clips_are_evaluated_and_crops_trained_on(folders: dict[str, Path], tmp_path: Path) -> None:
    train(tiny(), folders["esc10"], tmp_path / "run", max_steps=1, console=quiet())
    checkpoint = load_checkpoint(tmp_path / "run")
    known = checkpoint.config.input
    assert known is not None
    assert known.shape == (1, 4000)
    kind = kind_in(checkpoint.config.recipe)
    assert kind.sound == SoundSection(1, 8000, 0.5, 0.3)
    arrays = load_split(folders["esc10"], "test", kind)
    batches = [(arrays.images, arrays.labels)]
    accuracy = evaluate(checkpoint.model, batches, normalization(known)).accuracy
    assert accuracy == evaluate_checkpoint(tmp_path / "run", folders["esc10"]).accuracy
    images = images_to_check(str(folders["esc10"]), checkpoint.config, "run", 3)
    torch.testing.assert_close(images, normalization(known)(arrays.images[:3]))


def test_the_command_takes_a_fold(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(json.dumps(tiny_data()), encoding="utf-8")  # JSON is YAML
    options = ["--data", str(folders["esc10"]), "--fold", "2", "--max-steps", "1", "--json"]
    assert main(["train", "recipe.yaml", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipe"]["sound"]["fold"] == 2
    assert "all folds but 2" in result["data"]["train"]
    assert list(Path("runs").glob("*/recipe/fold2-seed0/results.json"))


def test_an_unfinished_run_of_another_fold_is_not_gone_on_with(folders: dict[str, Path], tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), folders["esc10"], tmp_path, console=quiet(), callbacks=[Stop()])
    with pytest.raises(InputError, match=r"(?s)earlier run.*recipe, fold, seed, data"):
        train(with_fold(tiny(), 2), folders["esc10"], tmp_path, console=quiet())
    assert train(tiny(), folders["esc10"], tmp_path, console=quiet()).recipe["sound"]["fold"] == 1


def test_one_seed_gives_one_result(folders: dict[str, Path], tmp_path: Path) -> None:
    runs = [
        train(tiny(), folders["esc10"], tmp_path / str(i), seed=s, console=quiet()) for i, s in enumerate((3, 3, 4))
    ]
    assert runs[0].loss == runs[1].loss
    assert runs[0].loss != runs[2].loss


def test_other_sounds_than_trained_on_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    train(tiny(), folders["esc10"], tmp_path / "run", max_steps=1, console=quiet())
    with pytest.raises(DataError, match="other classes"):
        evaluate_checkpoint(tmp_path / "run", folders["esc50"])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"sound": {"clip_seconds": 1, "crop_seconds": 1.5}}, r"(?s)'sound.crop_seconds' is longer.*at most.*1"),
        ({"sound": {"rate": 8000}}, "unknown key 'sound.rate'"),
        ({"sound": {"fold": 0}}, "'sound.fold' has a value that does not fit"),
        ({"sound": {"subset": "esc20"}}, "'sound.subset'"),
        ({"data": {"holdout": 10, "flip": False}}, "'data.flip' has no effect on sounds"),
        ({"data": {"holdout": 10, "crop_padding": 2}}, "'data.crop_padding' has no effect on sounds"),
    ],
)
def test_wrong_sections_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        tiny(**changes)


def test_a_fold_needs_sounds() -> None:
    recipe = tiny()
    assert with_fold(recipe, None) is recipe
    assert with_fold(recipe, 4) == replace(recipe, sound=replace(recipe.sound, fold=4))  # type: ignore[type-var]
    with pytest.raises(RecipeError, match="a fold from 1"):
        with_fold(recipe, 0)
    images = tiny(sound=None)
    assert images.sound is None
    with pytest.raises(RecipeError, match="a recipe with a section 'sound'"):
        with_fold(images, 1)
