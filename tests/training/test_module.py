"""The module: what it counts, when it freezes, which rates its groups get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from run_helpers import LAYERS, quiet, tiny_recipe
from torch import nn

from epitorch.conversion import convert_
from epitorch.errors import TrainingError
from epitorch.models.small import digits_cnn
from epitorch.nn import EpitomeLayer
from epitorch.plans import LayerPlan, Plan
from epitorch.training.data import BatchAugment, Normalize
from epitorch.training.module import (
    EpitomeModule,
    Evaluator,
    LossWatch,
    Tally,
    evaluate,
    rising_part,
    uses_learner,
)
from epitorch.training.recipe import TrainingSection
from epitorch.training.run import train


def small_model(index: str = "learner") -> nn.Module:
    model = digits_cnn(widths=(8, 8, 16))
    layers = {name: LayerPlan(tuple(v["epitome_shape"]), index=index) for name, v in LAYERS.items()}  # type: ignore[arg-type]
    convert_(model, Plan(layers))
    return model


def module_of(model: nn.Module, *, steps: int = 10, **training: Any) -> EpitomeModule:
    section = TrainingSection(epochs=1, peak_lr=0.1, **training)
    normalize = Normalize([0.5], [0.25])
    return EpitomeModule(model, section, augment=BatchAugment(1), normalize=normalize, steps=steps, epochs=1)


def test_tally_counts_by_hand() -> None:
    tally = Tally.empty("cpu")
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    tally.add(logits, torch.tensor([0, 0, 0]), torch.tensor(1.5))
    tally.add(logits[:1], torch.tensor([0]), torch.tensor(0.5))
    assert tally.accuracy == 3 / 4
    assert tally.mean_loss == (3 * 1.5 + 0.5) / 4


def test_evaluator_uses_map_and_learner_on_the_same_batch() -> None:
    model = small_model().eval()
    layer = next(m for m in model.modules() if isinstance(m, EpitomeLayer))
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    with torch.no_grad():
        same = Evaluator(model, "cpu")
        same.add(images, labels)
        # a learner that no longer agrees with the map
        layer.learner.head.bias.add_(2.0)  # type: ignore[union-attr]
        apart = Evaluator(model, "cpu")
        apart.add(images, labels)
    assert same.with_learner is not None
    assert apart.with_learner is not None
    torch.testing.assert_close(same.with_learner.loss, same.with_map.loss)
    torch.testing.assert_close(apart.with_map.loss, same.with_map.loss)
    assert not torch.isclose(apart.with_learner.loss, apart.with_map.loss)


def test_no_learner_accuracy_without_a_learner_in_use() -> None:
    dense, fixed, learner = digits_cnn(), small_model("fixed"), small_model()
    assert not uses_learner(dense)
    assert not uses_learner(fixed)
    assert uses_learner(learner)
    for layer in learner.modules():
        if isinstance(layer, EpitomeLayer):
            layer.freeze_routing()
    assert not uses_learner(learner)
    assert Evaluator(learner, "cpu").result().accuracy_learner is None


def test_evaluate_leaves_mode_and_map_alone() -> None:
    model = small_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [(torch.randint(256, (16, 1, 8, 8), dtype=torch.uint8), torch.randint(10, (16,)))] * 2
    result = evaluate(model, batches, Normalize([0.5], [0.25]))
    assert result.images == 32
    assert result.accuracy_learner is not None
    assert model.training
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_loss_watch_names_step_and_epoch(bad: float) -> None:
    watch = LossWatch(every=20)
    watch.see(torch.tensor(1.0), 6, 0)
    with pytest.raises(TrainingError, match="step 7 of epoch 1"):
        watch.see(torch.tensor(bad), 7, 1)


def test_loss_watch_between_looks_keeps_the_first_bad_step() -> None:
    watch = LossWatch(every=20)
    # as an accelerator leaves it, which looks at every 20th step only
    watch.first_bad = torch.tensor(3)
    with pytest.raises(TrainingError, match="step 3"):
        watch.see(torch.tensor(1.0), 20, 0)


def test_groups_get_their_own_peaks() -> None:
    module = module_of(small_model("direct"), steps=20, start_lr=0.01, weight_decay=1e-3)
    made: Any = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    assert made["lr_scheduler"]["interval"] == "step"
    rates: dict[str, list[float]] = {group["name"]: [] for group in optimizer.param_groups}
    for _ in range(20):
        for group in optimizer.param_groups:
            rates[group["name"]].append(group["lr"])
            assert group["momentum"] == 0.9
        optimizer.step()
        scheduler.step()
    assert max(rates["weights"]) == pytest.approx(0.1)
    assert max(rates["starts"]) == pytest.approx(0.01)
    assert rates["weights"][-1] < 1e-4


@pytest.mark.parametrize(("warmup", "steps"), [(0.5, 2), (0.1, 10), (1.0, 1), (0.3, 1), (0.0, 5), (1.0, 5)])
def test_every_schedule_can_be_walked(warmup: float, steps: int) -> None:
    module = module_of(digits_cnn(widths=(4, 4)), steps=steps, warmup=warmup)
    made: Any = module.configure_optimizers()
    for _ in range(steps):
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    assert 0 <= rising_part(warmup, steps) <= 1


class Flags(pl.Callback):
    """Writes down at every step which layers are frozen and whether batches are changed."""

    def __init__(self) -> None:
        self.frozen: list[tuple[int, bool]] = []
        self.moved: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        layers = [m for m in pl_module.model.modules() if isinstance(m, EpitomeLayer)]
        states = {layer.routing_map.is_frozen for layer in layers}
        assert len(states) == 1
        self.frozen.append((trainer.current_epoch, states.pop()))
        starts = torch.cat([v.flatten() for layer in layers for v in layer.starts().values()])
        self.moved.append(bool((starts != starts.round()).any()))


@pytest.mark.parametrize("snap", [False, True])
def test_map_is_frozen_for_the_last_epochs(snap: bool, tmp_path: Path) -> None:
    flags = Flags()
    recipe = tiny_recipe("learner", epochs=3, epitome={"freeze_last_epochs": 1, "snap": snap}, batch_size=200)
    result = train(recipe, "digits", tmp_path, callbacks=[flags], console=quiet())
    assert set(flags.frozen) == {(0, False), (1, False), (2, True)}
    before = [moved for moved, (epoch, _) in zip(flags.moved, flags.frozen, strict=True) if epoch == 1]
    assert all(before)
    assert flags.moved[-1] is not snap
    assert result.accuracy.test_learner is None
    assert result.accuracy.heldout_learner is not None
    assert len(result.accuracy.heldout_learner) == 2
    assert len(result.accuracy.heldout) == 3


def test_batches_are_augmented_in_training_only() -> None:
    module = module_of(digits_cnn(widths=(4, 4)))

    class State:
        training = True

    module._trainer = State()  # type: ignore[assignment]
    images = torch.randint(256, (16, 1, 8, 8), dtype=torch.uint8)
    batch = (images, torch.zeros(16, dtype=torch.int64))
    plain = Normalize([0.5], [0.25])(images)
    changed, labels = module.on_after_batch_transfer(batch, 0)
    assert changed.shape == plain.shape
    assert not torch.equal(changed, plain)
    assert labels is batch[1]
    State.training = False
    torch.testing.assert_close(module.on_after_batch_transfer(batch, 0)[0], plain, rtol=0, atol=0)


def test_channels_last_batches_and_model() -> None:
    module = module_of(digits_cnn(channels=3, widths=(4, 4)), channels_last=True)
    assert module.model.conv2.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[operator,union-attr]
