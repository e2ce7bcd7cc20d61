from __future__ import annotations

import pytest
import torch
from torch import nn

import epitorch
from epitorch.errors import InputError
from epitorch.nn import EpitomeConv2d, EpitomeLinear


def model() -> nn.Sequential:
    return nn.Sequential(
        EpitomeConv2d(4, 8, 1, epitome_shape=(4, 4, 1, 1)),
        nn.BatchNorm2d(8),
        EpitomeConv2d(8, 8, 1, epitome_shape=(8, 4, 1, 1), index="direct"),
        nn.Flatten(),
        EpitomeLinear(8, 4, epitome_shape=(4, 4), index="fixed"),
    )


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    net = model()
    groups = epitorch.param_groups(net, lr=0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in net.parameters())


def test_starts_and_learners_are_apart_without_decay() -> None:
    net = model()
    groups = {g["name"]: g for g in epitorch.param_groups(net, lr=0.1, weight_decay=5e-4)}
    assert set(groups) == {"weights", "starts", "learners"}
    assert [tuple(p.shape) for p in groups["starts"]["params"]] == [(2,)]
    assert {id(p) for p in groups["learners"]["params"]} == {id(p) for p in net[0].learner.parameters()}
    assert (groups["weights"]["lr"], groups["weights"]["weight_decay"]) == (0.1, 5e-4)
    for name in ("starts", "learners"):
        assert groups[name]["lr"] == pytest.approx(0.02)
        assert groups[name]["weight_decay"] == 0.0


def test_start_lr_is_taken_and_zero_is_a_rate() -> None:
    groups = {g["name"]: g["lr"] for g in epitorch.param_groups(model(), lr=0.1, start_lr=0.0)}
    assert groups == {"weights": 0.1, "starts": 0.0, "learners": 0.0}


def test_dense_model_has_one_group_and_frozen_parameters_none() -> None:
    dense = nn.Linear(3, 3)
    dense.bias.requires_grad_(False)
    (group,) = epitorch.param_groups(dense, lr=1.0)
    assert [id(p) for p in group["params"]] == [id(dense.weight)]


def test_an_optimiser_moves_starts_by_their_own_rate() -> None:
    torch.manual_seed(0)
    layer = EpitomeConv2d(4, 8, 1, epitome_shape=(4, 4, 1, 1), index="direct")
    before = layer.starts()["out"].detach().clone()
    optimizer = torch.optim.SGD(epitorch.param_groups(layer, lr=1.0, start_lr=0.25))
    layer(torch.randn(2, 4, 3, 3)).square().sum().backward()
    grad = layer.starts()["out"].grad.clone()
    optimizer.step()
    torch.testing.assert_close(layer.starts()["out"].detach(), before - 0.25 * grad)
    assert not torch.equal(layer.starts()["out"].detach(), before)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": 0.1, "start_lr": float("nan")}, {"lr": 0.1, "weight_decay": -1e-4}]
)
def test_rates_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="from 0 up"):
        epitorch.param_groups(model(), **wrong)


def test_the_decay_of_the_optimiser_is_that_of_the_weights_and_never_of_the_starts() -> None:
    model = torch.nn.Sequential(EpitomeLinear(8, 32, epitome_shape=(8, 8), index="direct"))
    optimizer = torch.optim.SGD(epitorch.param_groups(model, lr=0.1), lr=0.1, weight_decay=5e-4)
    assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups} == {
        "weights": 5e-4,
        "starts": 0.0,
    }
