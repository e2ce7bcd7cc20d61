"""Optimisers and schedules by name, the groups they work on, mixing, accumulation and compilation."""

from __future__ import annotations

from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import quiet, rank_free_recipe, tiny_recipe
from torch import nn

from epitorch.errors import InputError, RecipeError
from epitorch.nn import EpitomeConv2d
from epitorch.training.measuring import Tally
from epitorch.training.mixing import make_mix
from epitorch.training.optimisers import make_groups, make_optimizer, make_scheduler
from epitorch.training.recipe import TrainingSection
from epitorch.training.run import train


def section(**options: Any) -> TrainingSection:
    return TrainingSection(**{"epochs": 10, "peak_lr": 0.1, **options})


def model() -> nn.Sequential:
    return nn.Sequential(EpitomeConv2d(3, 8, 3, epitome_shape=(4, 3, 3, 3), index="direct"), nn.BatchNorm2d(8))


def rates(steps: int, epochs: int, **options: Any) -> dict[str, list[float]]:
    """The learning rate of every group at every step."""
    chosen = section(epochs=epochs, start_lr=0.01, **options)
    optimizer = make_optimizer(make_groups(model(), chosen), chosen)
    scheduler = make_scheduler(optimizer, chosen, steps, epochs)
    found: dict[str, list[float]] = {group["name"]: [] for group in optimizer.param_groups}
    for step in range(steps):
        for group in optimizer.param_groups:
            found[group["name"]].append(group["lr"])
        optimizer.step()
        scheduler.step_update(step + 1) if hasattr(scheduler, "step_update") else scheduler.step()
    return found


def test_step_schedule_by_hand() -> None:
    """Warm-up over 2 epochs, then 0.9 every 2.5 epochs: the schedule of the released ImageNet training."""
    found = rates(40, 10, schedule="step", warmup_epochs=2, warmup_lr=1e-3, decay_epochs=2.5, decay_rate=0.9)
    for name, peak in (("weights", 0.1), ("starts", 0.01)):
        for step, rate in enumerate(found[name]):
            warm = 1e-3 + (peak - 1e-3) * step / 8
            expected = warm if step < 8 else peak * 0.9 ** (step // 10)
            assert rate == pytest.approx(expected), (name, step)


def test_cosine_schedule_by_hand() -> None:
    found = rates(40, 10, schedule="cosine", warmup_epochs=1, warmup_lr=0.0, min_lr=1e-4)
    for step, rate in enumerate(found["weights"]):
        expected = 0.1 * step / 4 if step < 4 else 1e-4 + (0.1 - 1e-4) * (1 + cos(pi * step / 40)) / 2
        assert rate == pytest.approx(expected), step


@pytest.mark.parametrize("name", ["rmsproptf", "adamw", "lamb", "momentum"])
def test_optimisers_of_timm_get_groups_and_arguments(name: str) -> None:
    chosen = section(optimizer=name, weight_decay=1e-5, start_lr=0.02)
    optimizer = make_optimizer(make_groups(model(), chosen), chosen)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert (groups["weights"]["lr"], groups["weights"]["weight_decay"]) == (0.1, 1e-5)
    assert (groups["starts"]["lr"], groups["starts"]["weight_decay"]) == (0.02, 0.0)


def test_rmsprop_as_in_tensorflow_by_hand() -> None:
    """One step: the mean square begins at one, epsilon stands under the root."""
    chosen = section(optimizer="rmsproptf", weight_decay=0.0, optimizer_arguments={"eps": 0.001, "alpha": 0.9})
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = make_optimizer(make_groups(layer, chosen), chosen)
    layer.weight.grad = torch.tensor([[1.0, -2.0]])
    optimizer.step()
    square = 1 + 0.1 * (layer.weight.grad.square() - 1)
    torch.testing.assert_close(layer.weight.detach(), before - 0.1 * layer.weight.grad / (square + 0.001).sqrt())


def test_norms_and_biases_without_decay() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(3, 4))
    groups = {group["name"]: group for group in make_groups(net, section(norm_decay=False, weight_decay=0.5))}
    assert [value.ndim for value in groups["weights"]["params"]] == [4, 2]
    assert groups["weights"]["weight_decay"] == 0.5
    assert [value.ndim for value in groups["norms and biases"]["params"]] == [1, 1, 1, 1]
    assert groups["norms and biases"]["weight_decay"] == 0.0
    (whole,) = make_groups(net, section(weight_decay=0.5))
    assert len(whole["params"]) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "rmsprobtf"}, "did you mean 'rmsproptf'"),
        ({"optimizer": "adamw", "optimizer_arguments": {"nonsense": 1}}, "optimizer_arguments"),
    ],
)
def test_unknown_optimisers_and_arguments(options: dict[str, Any], words: str) -> None:
    chosen = section(**options)
    with pytest.raises(RecipeError, match=words):
        make_optimizer(make_groups(model(), chosen), chosen)


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_epochs": 1},
        {"decay_rate": 0.5},
        {"schedule": "cosine", "warmup": 0.1},
        {"schedule": "step", "min_lr": 0.1},
        {"schedule": "cosine", "decay_epochs": 3},
        {"optimizer_arguments": {"eps": 1e-3}},
        {"optimizer": "adamw", "nesterov": True},
        {"mix_mode": "elem"},
    ],
    ids=str,
)
def test_keys_without_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"'training.\w+' has no effect here"):
        tiny_recipe(epochs=5, **options)


def test_a_warm_up_as_long_as_the_training_is_refused() -> None:
    with pytest.raises(RecipeError, match="leaves no time to train"):
        tiny_recipe(epochs=2, schedule="cosine", warmup_epochs=2)


# ---- mixing ----


def test_mixed_labels_are_those_of_the_mixed_images() -> None:
    """Every image is filled with its class: the mixed image is the mean of its mixed label."""
    mix = make_mix(section(mixup=1.0, cutmix=1.0), 4, 8)
    assert mix is not None
    for _ in range(5):
        labels = torch.arange(8) % 4
        images = labels.float().view(-1, 1, 1, 1).expand(8, 1, 8, 8).clone()
        mixed, soft = mix(images, labels)
        torch.testing.assert_close(soft.sum(1), torch.ones(8))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), soft @ torch.arange(4.0), rtol=1e-4, atol=1e-4)


def test_mixing_needs_pairs_and_is_off_by_default() -> None:
    assert make_mix(section(), 4, 7) is None
    with pytest.raises(InputError, match="an even number"):
        make_mix(section(mixup=0.2), 4, 7)


def test_accuracy_on_mixed_labels_counts_the_heavier() -> None:
    tally = Tally.empty("cpu")
    tally.add(torch.eye(3), torch.tensor([[0.7, 0.3, 0.0], [0.6, 0.4, 0.0], [0.0, 0.1, 0.9]]))
    assert (int(tally.correct), tally.count) == (2, 3)


# ---- whole runs ----


def run(out: Path, **options: Any) -> Any:
    return train(rank_free_recipe(epochs=1, **options), "digits", out, console=quiet(), accelerator="cpu")


def test_accumulated_batches_give_the_result_of_large_ones(tmp_path: Path) -> None:
    """Without a learner, whose starts are those of a batch, and without augmentation's other draws."""
    from dataclasses import replace

    from safetensors.torch import load_file

    weights = []
    for name, options in (
        ("a", {"batch_size": 120}),
        ("b", {"batch_size": 60, "accumulate": 2}),
        ("c", {"batch_size": 60}),
    ):
        recipe = rank_free_recipe("direct", epochs=1, peak_lr=0.03, **options)
        recipe = replace(recipe, data=replace(recipe.data, crop_padding=0, flip=False))
        train(recipe, "digits", tmp_path / name, console=quiet(), accelerator="cpu")
        weights.append(load_file(tmp_path / name / "checkpoint" / "model.safetensors"))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(weights[0]["conv2.epitome"], weights[2]["conv2.epitome"], rtol=1e-2, atol=1e-3)


def test_accumulation_longer_than_an_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"training.accumulate is too large"):
        run(tmp_path / "out", accumulate=50)
    assert not (tmp_path / "out").exists()


def test_gradients_are_clipped(tmp_path: Path) -> None:
    free, clipped = run(tmp_path / "a"), run(tmp_path / "b", clip_norm=1e-6)
    assert free.loss["heldout"] != clipped.loss["heldout"]
    assert clipped.loss["train"][0] == pytest.approx(2.33, abs=0.1)  # it has hardly moved


@pytest.mark.slow
def test_compiled_training_gives_the_same_numbers(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    eager = run(tmp_path / "eager")
    counters.clear()
    compiled = run(tmp_path / "compiled", compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    assert compiled.loss["train"] == pytest.approx(eager.loss["train"], rel=1e-4)
    assert compiled.loss["heldout"] == pytest.approx(eager.loss["heldout"], rel=1e-3)


def test_sync_batchnorm_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sync_batchnorm needs CUDA"):
        run(tmp_path / "out", sync_batchnorm=True)
