"""Models that read a layer's weight, loop over the batch, or show nothing on their example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch.deploy import ParityError
from epitorch.errors import StartsError
from epitorch.nn import EpitomeConv2d, EpitomeLinear
from epitorch.plans import LayerPlan, Plan


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
def test_a_transformer_layer_runs_deployed_on_its_fast_path() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
    epitorch.convert_(encoder, Plan({"linear1": LayerPlan((16, 16)), "linear2": LayerPlan((16, 16))}))
    x = torch.randn(2, 5, 16)
    net = epitorch.deploy(encoder.eval(), x)
    with torch.no_grad():
        torch.testing.assert_close(net(x), encoder(x), atol=1e-5, rtol=1e-5)
        encoder.linear1.epitome.mul_(1.5)
        assert not torch.allclose(net(x), encoder(x), atol=1e-3)


def test_the_weight_of_a_reuse_layer_is_the_trained_layers() -> None:
    layer = EpitomeConv2d(8, 16, 3, epitome_shape=(5, 3, 3, 3), index="fixed")
    net = epitorch.deploy(layer, torch.randn(1, 8, 5, 5))
    torch.testing.assert_close(net.weight, layer.weight)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.conv(sample) for sample in x])


def test_a_loop_over_the_batch_counts_per_sample() -> None:
    counts = {n: epitorch.count(Loop(), torch.zeros(n, 3, 6, 6)).madds for n in (1, 2, 4)}
    assert counts == dict.fromkeys((1, 2, 4), 4 * 3 * 9 * 16)
    assert epitorch.count(nn.Conv2d(3, 4, 3), torch.zeros(3, 6, 6)).madds == 4 * 3 * 9 * 16  # one sample alone


def test_a_batch_of_indices_counts_per_sample() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    assert epitorch.count(model, torch.zeros(8, dtype=torch.int64)).madds == 12


@pytest.mark.parametrize("example", [torch.zeros(0, 8), torch.full((2, 8), float("nan"))], ids=["empty", "nan"])
def test_an_example_that_shows_nothing_is_refused(example: Tensor) -> None:
    with pytest.raises(ParityError, match="show nothing"):
        epitorch.deploy(EpitomeLinear(8, 16, epitome_shape=(8, 8), bias=False), example)


def test_starts_that_are_not_finite_are_named_by_the_layer_of_the_model() -> None:
    model = nn.Sequential(nn.ReLU(), EpitomeLinear(8, 16, epitome_shape=(8, 8), index="fixed"))
    with torch.no_grad():
        model[1].starts()["out"][0] = float("nan")
    with pytest.raises(StartsError, match=r"^1: "):
        epitorch.deploy(model, torch.randn(2, 8))
