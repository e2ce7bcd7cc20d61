"""Starting from a checkpoint, and learning from a teacher."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import quiet, tiny_recipe
from torch import nn

import epitorch
from epitorch.checkpoint import ModelInput, load_checkpoint
from epitorch.errors import CheckpointError, InputError
from epitorch.nn import EpitomeLayer
from epitorch.results import RunResult
from epitorch.training.distillation import Teacher, distillation_loss, load_teacher
from epitorch.training.recipe import EpitomeSection, Recipe
from epitorch.training.run import train
from epitorch.training.starting import first_model

IMAGE = torch.zeros(1, 1, 8, 8)


def short(recipe: Any, out: Path, **options: Any) -> RunResult:
    return train(recipe, "digits", out, **{"max_steps": 2, "console": quiet(), **options})


def with_model(recipe: Recipe, **model: Any) -> Recipe:
    return replace(recipe, model=replace(recipe.model, **model))


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    short(tiny_recipe(), folder)
    return folder


@pytest.fixture(scope="module")
def epitome_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("epitome")
    short(tiny_recipe("learner"), folder)
    return folder


# ---- starting ----


def test_a_recipe_whose_epitomes_are_the_whole_weights_is_refused() -> None:
    recipe = tiny_recipe()
    dense = first_model(recipe, IMAGE).model
    budget = {"params": epitorch.count(dense, IMAGE).params}
    with pytest.raises(InputError, match=r"converts no layer"):
        first_model(replace(recipe, epitome=EpitomeSection(budget=budget)), IMAGE)


def test_a_recipe_takes_a_plan_from_its_file(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    plan = epitorch.plan(first_model(recipe, IMAGE).model, IMAGE, ratio=2, index="fixed")
    file = plan.save(tmp_path / "plan.yaml")
    built = first_model(replace(recipe, epitome=EpitomeSection(plan=str(file))), IMAGE)
    assert built.plan == plan
    assert {name for name, layer in built.model.named_modules() if isinstance(layer, EpitomeLayer)} == set(plan.layers)
    with pytest.raises(InputError, match="cannot be read"):
        first_model(replace(recipe, epitome=EpitomeSection(plan=str(tmp_path / "other.yaml"))), IMAGE)


def test_a_dense_checkpoint_is_taken_over(dense_run: Path) -> None:
    built = first_model(with_model(tiny_recipe(), checkpoint=str(dense_run)), IMAGE)
    torch.testing.assert_close(built.model.state_dict(), load_checkpoint(dense_run).model.state_dict())
    assert built.fresh == ()
    drawn = first_model(tiny_recipe(), IMAGE).model.state_dict()
    assert not torch.equal(drawn["conv1.weight"], built.model.state_dict()["conv1.weight"])


def test_an_epitome_checkpoint_brings_its_plan_and_takes_a_new_head(epitome_run: Path) -> None:
    recipe = with_model(tiny_recipe(), checkpoint=str(epitome_run), arguments={"widths": [8, 8, 16], "num_classes": 3})
    built = first_model(recipe, IMAGE)
    start = load_checkpoint(epitome_run)
    assert built.plan is not None
    assert start.config.plan is not None
    assert built.plan.layers == start.config.plan.layers
    own, taken = built.model.state_dict(), start.model.state_dict()
    assert {name.split(".")[0] for name in built.fresh} == {"fc"} or all("conv" not in name for name in built.fresh)
    assert built.fresh
    for name, value in own.items():
        assert torch.equal(value, taken[name]) is (name not in built.fresh) or value.numel() == 0


def test_a_converted_head_of_other_size_is_dense_and_fresh(tmp_path: Path) -> None:
    head = [name for name, m in first_model(tiny_recipe(), IMAGE).model.named_modules() if isinstance(m, nn.Linear)][-1]
    layers = {head: {"epitome_shape": [5, 16]}, "conv3": {"epitome_shape": [8, 4, 3, 3]}}
    short(tiny_recipe("fixed", epitome={"layers": layers}), tmp_path)
    recipe = with_model(tiny_recipe(), checkpoint=str(tmp_path), arguments={"widths": [8, 8, 16], "num_classes": 3})
    built = first_model(recipe, IMAGE)
    assert built.plan is not None
    assert list(built.plan.layers) == ["conv3"]
    assert set(built.fresh) == {f"{head}.weight", f"{head}.bias"}


def test_epitomes_begin_near_the_dense_checkpoint(dense_run: Path) -> None:
    dense = load_checkpoint(dense_run).model.get_parameter("conv3.weight")

    def error(**epitome: Any) -> float:
        recipe = with_model(tiny_recipe("fixed", epitome=epitome), checkpoint=str(dense_run))
        layer: Any = first_model(recipe, IMAGE).model.get_submodule("conv3")
        return float((layer.weight - dense).detach().norm() / dense.detach().norm())

    assert error(init="least_squares") < 0.9 < error()


def test_training_goes_on_from_a_checkpoint_and_says_so(epitome_run: Path, tmp_path: Path) -> None:
    result = short(with_model(tiny_recipe(), checkpoint=str(epitome_run)), tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert f"starts from {epitome_run}; drawn: nothing" in log
    assert result.parameters.epitome > 0
    assert load_checkpoint(tmp_path).config.plan is not None


def test_what_does_not_go_together_is_refused(epitome_run: Path, dense_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an epitome network already"):
        first_model(with_model(tiny_recipe("fixed"), checkpoint=str(epitome_run)), IMAGE)
    with pytest.raises(InputError, match="another architecture") as caught:
        first_model(with_model(tiny_recipe(), checkpoint=str(dense_run), arguments={"widths": [4, 4, 4]}), IMAGE)
    assert str(dense_run) in str(caught.value)
    with pytest.raises(CheckpointError):
        first_model(with_model(tiny_recipe(), checkpoint=str(tmp_path / "none")), IMAGE)


# ---- a teacher ----


def test_distillation_loss_by_hand() -> None:
    student, teacher = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    p = [1 / (1 + math.exp(1)), math.exp(1) / (1 + math.exp(1))]  # softmax of (0, 2) / 2
    q = [math.exp(0.5) / (1 + math.exp(0.5)), 1 / (1 + math.exp(0.5))]
    wanted = 4 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert float(distillation_loss(student, teacher, 2.0)) == pytest.approx(wanted)
    assert float(distillation_loss(teacher, teacher, 2.0)) == pytest.approx(0, abs=1e-6)


def test_the_teacher_sees_images_in_its_own_normalisation() -> None:
    own = ModelInput((1, 2, 2), (0.5,), (0.2,), ("a", "b"))
    student = ModelInput((1, 2, 2), (0.1,), (0.4,), ("a", "b"))
    image = torch.rand(3, 1, 2, 2)
    teacher = Teacher(nn.Sequential(nn.Flatten(), nn.Dropout(0.9)), own, student).train()
    torch.testing.assert_close(teacher((image - 0.1) / 0.4), ((image - 0.5) / 0.2).flatten(1))


def test_a_teacher_changes_what_is_learned_and_is_not_saved(dense_run: Path, tmp_path: Path) -> None:
    alone = short(tiny_recipe("fixed"), tmp_path / "alone")
    half = short(tiny_recipe("fixed", teacher=str(dense_run)), tmp_path / "half")
    none = short(tiny_recipe("fixed", teacher=str(dense_run), teacher_weight=0), tmp_path / "none")
    assert alone.loss["train"] == none.loss["train"]
    assert alone.loss["train"] != half.loss["train"]
    assert alone.parameters == half.parameters
    states = [load_checkpoint(tmp_path / name).model.state_dict() for name in ("alone", "half")]
    assert list(states[0]) == list(states[1])
    lightning = torch.load(tmp_path / "half" / "lightning" / "last.ckpt", weights_only=False)["state_dict"]
    assert not any("teacher" in name for name in lightning)


def test_a_teacher_of_other_classes_is_refused_before_anything_is_written(dense_run: Path, tmp_path: Path) -> None:
    own = load_checkpoint(dense_run).config.input
    with pytest.raises(InputError, match="another classes") as caught:
        load_teacher(dense_run, ModelInput(own.shape, own.mean, own.std, ("a", "b")))
    assert str(dense_run) in str(caught.value)
    with pytest.raises(CheckpointError):
        short(tiny_recipe(teacher=str(tmp_path / "none")), tmp_path / "out")
    assert not (tmp_path / "out").exists()
