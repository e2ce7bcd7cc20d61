from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epitorch.errors import DataError
from epitorch.nn import EpitomeConv2d
from epitorch.warmstart import activation_moments, reestimate_batch_norm_


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 3, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.up = nn.ConvTranspose2d(6, 4, 2, groups=2)
        self.linear = nn.Linear(4, 3)
        self.again = self.linear
        self.unused = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.drop(self.norm(self.first(x))))
        return self.again(x.movedim(1, -1))


def test_moments_are_the_mean_squares_of_each_input() -> None:
    net = Net().train()
    batches = [torch.randn(3, 4, 5, 5), torch.randn(1, 4, 6, 4)]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    moments = activation_moments(net, [batches[0], (batches[1], "label")])
    values = torch.cat([b.movedim(1, 0).flatten(1) for b in batches], 1).double()  # shape: (C_in, all positions)
    wanted = values.square().mean(1).view(2, 2).mean(0)  # two groups of two
    torch.testing.assert_close(moments["first"], wanted)
    net.eval()
    inside = [net.norm(net.first(b)).movedim(1, 0).flatten(1) for b in batches]
    torch.testing.assert_close(moments["up"], torch.cat(inside, 1).double().square().mean(1), atol=1e-6, rtol=1e-5)
    assert set(moments) == {"first", "up", "linear", "again"}
    torch.testing.assert_close(moments["linear"], moments["again"], rtol=0, atol=0)
    net.train()
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_centred_moments_are_variances() -> None:
    net = Net()
    batches = [torch.randn(3, 4, 5, 5) + 5, torch.randn(2, 4, 5, 5) + 4]
    variances = activation_moments(net, batches, centred=True)
    values = torch.cat(batches).double().view(5, 2, 2, 5, 5).movedim(2, 0).flatten(1)  # groups are samples
    torch.testing.assert_close(variances["first"], values.var(1, correction=0))
    assert (activation_moments(net, batches)["first"] > 10 * variances["first"]).all()


def test_moments_leave_modes_alone_and_call_the_model_as_told() -> None:
    net = Net().train()
    net.drop.eval()
    seen = []

    def forward(model: nn.Module, batch: Any) -> None:
        seen.append([module.training for module in model.modules()])
        model(batch["image"])

    activation_moments(net, [{"image": torch.randn(2, 4, 5, 5)}], forward=forward)
    assert not any(seen[0])
    assert (net.training, net.drop.training, net.norm.training) == (True, False, True)


def test_batch_norm_takes_the_mean_over_batches_and_nothing_else_changes() -> None:
    net = Net()
    net.norm.momentum = 0.3
    layer = EpitomeConv2d(4, 6, 3, epitome_shape=(3, 2, 3, 3))
    net.first = layer
    before = {name: value.clone() for name, value in net.state_dict().items()}
    batches = [torch.randn(8, 4, 6, 6) + i for i in range(3)]
    assert reestimate_batch_norm_(net, batches) is net
    inside = [net.first.eval()(b).movedim(1, 0).flatten(1) for b in batches]
    torch.testing.assert_close(net.norm.running_mean, torch.stack([x.mean(1) for x in inside]).mean(0))
    torch.testing.assert_close(net.norm.running_var, torch.stack([x.var(1) for x in inside]).mean(0))
    changed = {n for n, v in net.state_dict().items() if not torch.equal(v, before[n])}
    assert changed == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert net.norm.momentum == 0.3
    assert all(m.training for m in net.modules() if m is not layer and m not in layer.modules())


def test_batch_norm_statistics_survive_a_failure() -> None:
    net = Net().eval()
    assert net.norm.running_mean is not None
    net.norm.running_mean.fill_(7)
    with pytest.raises(DataError, match="at least one batch"):
        reestimate_batch_norm_(net, [])
    with pytest.raises(RuntimeError):
        reestimate_batch_norm_(net, [torch.randn(2, 4, 5, 5), torch.randn(2, 9, 5, 5)])
    torch.testing.assert_close(net.norm.running_mean, torch.full((6,), 7.0))
    assert not net.norm.training
    assert net.norm.momentum == 0.1
    assert reestimate_batch_norm_(nn.Linear(2, 2), []).training  # nothing to estimate


def test_moments_need_batches() -> None:
    with pytest.raises(DataError, match="activation moments need data"):
        activation_moments(Net(), [])
