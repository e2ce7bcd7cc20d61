"""Whole runs on large images in every layout: trained, measured, exported, interrupted, by two processes, damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from image_files import LAYOUTS, colour, cycle, image_recipe, members, write_set, write_tar
from image_processes import Images
from parquet_files import encode
from run_helpers import KillAt, Killed, quiet
from safetensors.torch import load_file

from epitorch import cli
from epitorch.checkpoint import load_checkpoint
from epitorch.commands import images_to_check
from epitorch.errors import DataError, InputError, RecipeError
from epitorch.results import RunResult, load_results, results_table
from epitorch.training.evaluation import EvaluationReport, evaluate_checkpoint
from epitorch.training.folds import cross_validation
from epitorch.training.run import train

STATE = "lightning/last.ckpt"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {layout: write_set(tmp_path_factory.mktemp(layout), layout) for layout in LAYOUTS}


def run(data: Path, out: Path, *, recipe: Any = None, **options: Any) -> RunResult:
    recipe = image_recipe() if recipe is None else recipe
    return train(recipe, data, out, **{"console": quiet(), "accelerator": "cpu", "workers": 0, **options})


def measured(run_folder: Path, data: Path, **options: Any) -> EvaluationReport:
    return evaluate_checkpoint(run_folder, data, accelerator="cpu", allow_factory=True, **options)


def weights(out: Path) -> dict[str, bytes]:
    tensors = load_file(out / "checkpoint" / "model.safetensors")
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def log(out: Path) -> str:
    return (out / "train.log").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_measured_on_the_validation_split(layout: str, sets: dict[str, Path], tmp_path: Path) -> None:
    result = run(sets[layout], tmp_path)
    accuracy = result.accuracy
    assert (accuracy.test_images, accuracy.heldout_images, accuracy.classes) == (12, 6, 3)
    assert (result.data["train_images"], result.environment["workers"]) == (54, 0)
    assert "test" not in result.data
    assert len(accuracy.heldout) == 2
    known = load_checkpoint(tmp_path, allow_factory=True).config.input
    assert known is not None
    assert (known.shape, known.mean, known.std) == ((3, 16, 16), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for workers in (0, 2):
        report = measured(tmp_path, sets[layout], workers=workers)
        assert (report.accuracy, report.images) == (accuracy.test, 12)
        assert [report.loss] == pytest.approx(result.loss["test"], rel=1e-6)
    held = measured(tmp_path, sets[layout], split="heldout", workers=0)
    assert (held.accuracy, held.images) == (accuracy.heldout[-1], 6)
    assert measured(tmp_path, sets[layout], split="train", workers=0).images == 60


def test_without_a_split_to_test_on_there_is_no_test_number(tmp_path: Path) -> None:
    data = write_set(tmp_path / "data", "tar", val=0)
    result = run(data, tmp_path / "run")
    accuracy = result.accuracy
    assert (accuracy.test, accuracy.test_learner, accuracy.gap, accuracy.test_images) == (None, None, None, 0)
    assert result.loss["test"] == []
    assert result.data["test"] == "no split to test on: the held-out images stand in"
    assert "no split to test on" in log(tmp_path / "run")
    (again,) = load_results(tmp_path / "run" / "results.json")
    assert again == result
    assert " - |" in results_table([result])
    report = measured(tmp_path / "run", data, workers=0)
    assert report.accuracy == accuracy.heldout[-1]
    assert "standing in for a test split that is not there" in str(report)
    with pytest.raises(InputError, match="no fold"):
        cross_validation([result])


def test_layouts_that_do_not_name_their_classes_fit(sets: dict[str, Path], tmp_path: Path) -> None:
    run(sets["folder"], tmp_path, max_steps=1)
    for layout in ("parquet", "tar"):
        assert measured(tmp_path, sets[layout], workers=0).images == 12
    other = write_set(tmp_path / "four", "folder", classes=4)
    with pytest.raises(DataError, match="other classes"):
        measured(tmp_path, other, workers=0)
    three = tmp_path / "three"
    for name in ("x", "y", "z"):
        (three / "val" / name).mkdir(parents=True)
        (three / "val" / name / "1.png").write_bytes(encode(colour(1)))
    with pytest.raises(DataError, match="other classes"):
        measured(tmp_path, three, workers=0)


def test_exported_files_are_compared_on_images_of_the_set(sets: dict[str, Path], tmp_path: Path) -> None:
    run(sets["tar"], tmp_path / "run", max_steps=1)
    config = load_checkpoint(tmp_path / "run", allow_factory=True).config
    images = images_to_check(str(sets["tar"]), config, "run", 3)
    assert images.shape == (3, 3, 16, 16)
    mean = torch.tensor([0.485, 0.456, 0.406])
    expected = (torch.from_numpy(colour(1000)[0, 0].copy()) / 255 - mean) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(images[0, :, 0, 0], expected)
    out = tmp_path / "net.pt2"
    arguments = ["export", str(tmp_path / "run"), "--to", "pt2", "--out", str(out), "--data", str(sets["tar"])]
    assert cli.main([*arguments, "--allow-factory"]) == 0
    assert out.is_file()


# ---- going on ----


@pytest.fixture(scope="module")
def whole(sets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, dict[str, bytes]]:
    out = tmp_path_factory.mktemp("whole")
    return run(sets["folder"], out), weights(out)


@pytest.mark.parametrize(
    ("kill", "workers"), [({"step": 3}, 0), ({"step": 6}, 2), ({"heldout": 1}, 0), ({"step": 10}, 2)]
)
def test_a_folder_s_run_goes_on_bit_by_bit(
    kill: dict[str, int], workers: int, whole: Any, sets: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        run(sets["folder"], tmp_path, callbacks=[KillAt(**kill)], checkpoint_steps=1, workers=workers)
    result = run(sets["folder"], tmp_path)
    assert "goes on with the unfinished run" in log(tmp_path)
    assert "boundary of a shard" not in log(tmp_path)
    assert weights(tmp_path) == whole[1]
    assert (result.loss, result.accuracy) == (whole[0].loss, whole[0].accuracy)


def test_another_augmentation_would_show(whole: Any, sets: dict[str, Path], tmp_path: Path) -> None:
    """The negative control."""
    run(sets["folder"], tmp_path, recipe=image_recipe(images={"hflip": 0.4}), seed=1)
    assert weights(tmp_path) != whole[1]


@pytest.mark.parametrize("layout", ["parquet", "tar"])
def test_a_streamed_run_goes_on_at_a_boundary_and_says_so(layout: str, sets: dict[str, Path], tmp_path: Path) -> None:
    run(sets[layout], tmp_path / "whole")
    for name, step in (("a", 3), ("b", 3), ("epoch", 6)):
        out = tmp_path / name
        with pytest.raises(Killed):
            run(sets[layout], out, callbacks=[KillAt(step + 1)], checkpoint_steps=step)
        result = run(sets[layout], out)
        assert "boundary of a shard" in log(out)
        assert result.data["steps_run"] == 12
    assert weights(tmp_path / "a") == weights(tmp_path / "b")  # what it goes on with is decided
    assert weights(tmp_path / "epoch") == weights(tmp_path / "whole")  # between epochs nothing is read twice


# ---- two processes ----


def two(out: Path, data: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    kept = ("PATH", "HOME", "PYTHONPATH", "EPITORCH_CACHE", "TMPDIR", "LANG")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    script = str(Path(__file__).parent / "image_processes.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launcher, script, str(out), str(data), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )


def of_rank(out: Path, rank: int) -> dict[str, Any]:
    return torch.load(out.with_suffix(f".rank{rank}.pt"), weights_only=True)


@pytest.mark.parametrize("layout", ["folder", "tar"])
def test_two_processes_see_each_image_once_an_epoch(layout: str, sets: dict[str, Path], tmp_path: Path) -> None:
    done = two(tmp_path / "two", sets[layout], holdout=12)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (of_rank(tmp_path / "two", rank) for rank in (0, 1))
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)
    for epoch in range(2):
        parts = [set(kept["epochs"][epoch]) for kept in (first, second)]
        assert [len(kept["epochs"][epoch]) for kept in (first, second)] == [24, 24]
        assert not parts[0] & parts[1]
        assert len(parts[0] | parts[1]) == 48
    assert first["epochs"][0] != first["epochs"][1]
    (result,) = load_results(tmp_path / "two" / "results.json")
    assert (result.accuracy.test_images, result.environment["processes"]) == (12, 2)


def test_two_processes_give_one_process_s_result_on_a_folder(sets: dict[str, Path], tmp_path: Path) -> None:
    images = {"hflip": 0.5, "color_jitter": 0.3}
    options: Any = {"holdout": 12, "images": images, "epochs": 1, "model": {"rate": 0.0}}
    done = two(tmp_path / "two", sets["folder"], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    run(sets["folder"], tmp_path / "one", recipe=image_recipe(**options), callbacks=[Images(tmp_path / "one")])
    joined, alone = of_rank(tmp_path / "two", 0)["state"], of_rank(tmp_path / "one", 0)["state"]
    # float32; one process sums a batch of 8 images, two sum 4 each and add
    torch.testing.assert_close(joined, alone, rtol=1e-5, atol=1e-6)
    run(
        sets["folder"],
        tmp_path / "half",
        recipe=image_recipe(**{**options, "batch_size": 4}),
        callbacks=[Images(tmp_path / "half")],
    )
    half = of_rank(tmp_path / "half", 0)["state"]
    assert not torch.allclose(half["conv1.weight"], alone["conv1.weight"], rtol=1e-3, atol=1e-4)


# ---- what goes wrong ----


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_ends_the_run_and_the_state_is_kept(workers: int, tmp_path: Path) -> None:
    data = write_set(tmp_path / "data", "folder")
    out = tmp_path / "run"
    good = {file: file.read_bytes() for file in sorted((data / "train").rglob("*.png"))[::5]}
    with pytest.raises(Killed):
        run(data, out, callbacks=[KillAt(2)], checkpoint_steps=1)
    for file, content in good.items():
        file.write_bytes(content[:50])
    with pytest.raises(DataError, match=r"\.png: an image cannot be decoded") as caught:
        run(data, out, workers=workers)
    assert "Traceback" not in str(caught.value)
    assert (out / STATE).is_file()
    assert not (out / "results.json").exists()
    assert "an image cannot be decoded" in log(out)
    for file, content in good.items():
        file.write_bytes(content)
    assert run(data, out).accuracy.test_images == 12


def test_wrong_data_leave_no_folder(sets: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_tar(data / "train-0.tar", members(range(12), [*cycle(11), 7]))
    with pytest.raises(DataError, match=r"train-0.tar, member k0011.cls"):
        run(data, tmp_path / "run")
    with pytest.raises(RecipeError, match="timm does not know"):
        run(sets["tar"], tmp_path / "run", recipe=image_recipe(images={"auto_augment": "nonsense"}))
    with pytest.raises(InputError, match="workers is not valid"):
        run(sets["tar"], tmp_path / "run", workers=-1)
    assert not (tmp_path / "run").exists()


def test_workers_without_large_images_are_refused(tmp_path: Path) -> None:
    from run_helpers import tiny_recipe

    with pytest.raises(InputError, match="nothing for workers to do"):
        train(tiny_recipe(), "digits", tmp_path / "run", accelerator="cpu", console=quiet(), workers=2)
    assert not (tmp_path / "run").exists()


# ---- from the shell, on ImageNet's own images ----

MOBILENET = """
model: {name: "timm:mobilenetv2_050", arguments: {num_classes: 1000}}
data: {holdout: 8}
images: {size: 96, auto_augment: rand-m9-mstd0.5-inc1, random_erasing: 0.2, shuffle_buffer: 50}
training: {epochs: 1, peak_lr: 0.01, batch_size: 4, label_smoothing: 0.1, ema_decay: 0.9}
"""


def test_mobilenet_on_the_sample_of_imagenet(imagenet_sample_dir: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mobilenet.yaml"
    recipe.write_text(MOBILENET)
    options = ["--max-steps", "2", "--workers", "1", "--accelerator", "cpu", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "epitorch", "train", str(recipe), "--data", str(imagenet_sample_dir), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no split to test on: the held-out images stand in" in done.stdout
    (result,) = load_results(tmp_path / "run" / "results.json")
    assert (result.accuracy.test, result.accuracy.heldout_images, result.accuracy.classes) == (None, 8, 1000)
    assert result.data["steps_run"] == 2
