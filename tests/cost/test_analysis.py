"""`count`: totals against torch's own counter, the paper's network, and a model that must stay as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import epitorch
from epitorch.cost import Cost, count
from epitorch.errors import InputError
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan
from epitorch.nn import EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLinear
from epitorch.plans import LayerPlan, Plan


def torch_madds(model: nn.Module, *arguments: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(*arguments)
    return counter.get_total_flops() // 2


# ---- dense models ----


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_dense_counts_equal_torchs_counter(name: str) -> None:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    example = torch.zeros(1, 3, 64, 64)
    cost = count(model, example)
    assert cost.madds == cost.madds_dense == cost.madds_paper == torch_madds(model, example)
    assert cost.params == sum(p.numel() for p in model.parameters())
    assert cost.uncounted == ()
    wider = torch.zeros(1, 3, 64, 96)  # negative control
    assert cost.madds != torch_madds(model, wider)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Conv1d(6, 9, 3, stride=2, padding=1, groups=3), (6, 11)),
        (nn.Conv2d(4, 6, (3, 2), dilation=2, padding=2, padding_mode="reflect"), (4, 7, 8)),
        (nn.Conv3d(2, 3, 3, padding="same"), (2, 4, 5, 4)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2, output_padding=1), (4, 5)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 5, 3)),
        (nn.ConvTranspose3d(2, 3, 2, stride=2), (2, 3, 3, 2)),
        (nn.Linear(5, 7), (4, 5)),
        (nn.Linear(5, 7), (5,)),
    ],
)
def test_every_kind_of_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    example = torch.zeros(3, *shape)
    cost = count(layer, example)
    assert 3 * cost.madds == torch_madds(layer, example)
    assert cost.params == sum(p.numel() for p in layer.parameters())


def test_unbatched_input_is_one_sample() -> None:
    layer = nn.Conv2d(3, 8, 3, padding=1)
    assert count(layer, torch.zeros(3, 6, 6)).madds == count(layer, torch.zeros(2, 3, 6, 6)).madds


class Windows(nn.Linear):
    """A linear layer with an attribute of convolutions."""

    kernel_size = (1, 1)


class Loop(nn.Module):
    """Gives its convolution one sample at a time, with a channel axis that the batch has not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.second(self.first(image.unsqueeze(0))) for image in x])


class Either(nn.Module):
    """Takes an image or a batch of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x if x.dim() == 4 else x[None])


@pytest.mark.parametrize(
    ("model", "example", "madds"),
    [
        (Windows(16, 32), torch.zeros(4, 7, 16), 7 * 16 * 32),
        (Loop(), torch.zeros(4, 6, 6), 36 * 9 * (4 + 4 * 8)),
        (Loop(), torch.zeros(2, 6, 6), 36 * 9 * (4 + 4 * 8)),
        (Either(), torch.zeros(4, 3, 6, 6), 36 * 9 * 3 * 8),
        (Either(), torch.zeros(3, 6, 6), 36 * 9 * 3 * 8),
    ],
)
def test_what_a_sample_is(model: nn.Module, example: Tensor, madds: int) -> None:
    assert count(model, example).madds == madds


class Twice(nn.Module):
    """Uses one layer twice and keeps it under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.alias = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.alias(x))


def test_a_module_used_twice_has_its_parameters_once() -> None:
    cost = count(Twice(), torch.zeros(2, 6))
    assert (cost.madds, cost.params) == (2 * 36, 36 + 6)
    assert [(layer.name, layer.calls) for layer in cost.layers] == [("first", 2)]


def test_shared_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    cost = count(model, torch.zeros(1, 6))
    assert (cost.madds, cost.params) == (72, 36)
    assert [layer.params for layer in cost.layers] == [36, 0]


class Functional(nn.Module):
    """Multiplies matrices outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.free = nn.Parameter(torch.zeros(4, 5))
        self.vector = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return (self.layer(x) @ self.free) @ self.vector * scale


def test_multiply_adds_that_no_layer_owns_are_counted_by_operator() -> None:
    cost = count(Functional(), (torch.zeros(3, 4), 2.0))
    assert cost.madds == cost.madds_dense == cost.madds_paper == 16 + 20 + 5
    assert {(entry.operator, entry.madds) for entry in cost.operators} == {("mm", 20), ("mv", 5)}
    assert cost.by_kind == {"linear": 16, "matrix product": 25}
    assert "outside of layers: 20 MAdds of mm in (model)" in str(cost)
    assert "MAdds by kind: linear 16, matrix product 25" in str(cost)
    assert cost.uncounted == ()
    assert cost.params == 16 + 4 + 20 + 5


class Adapted(nn.Linear):
    """A subclass that does more than its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_surplus_of_a_subclass_is_counted_apart() -> None:
    cost = count(nn.Sequential(Adapted(4, 4)), torch.zeros(2, 4))
    assert (cost.madds, cost.layers[0].madds) == (32, 16)
    assert [(entry.where, entry.kind, entry.madds) for entry in cost.operators] == [("0", "linear", 16)]


class AdaptedEpitome(EpitomeLinear):
    """An epitome layer that does more than deployment would keep."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_surplus_of_an_epitome_layer_cannot_be_counted_and_is_listed() -> None:
    cost = count(nn.Sequential(AdaptedEpitome(4, 4, epitome_shape=(2, 4))), torch.zeros(2, 4))
    assert [(entry.where, entry.madds) for entry in cost.uncounted] == [("0", 16)]
    assert cost.operators == ()


def test_operators_without_formula_are_listed_as_unknown() -> None:
    cost = count(nn.LSTM(4, 4, batch_first=True), torch.zeros(2, 3, 4))
    assert cost.uncounted
    assert all(entry.madds is None for entry in cost.uncounted)
    assert "not counted: an unknown number of MAdds of" in str(cost)


def test_another_librarys_operators_are_listed_as_unknown() -> None:
    import torchvision

    layer = torchvision.ops.DeformConv2d(2, 4, 3)
    cost = count(layer, (torch.zeros(1, 2, 5, 5), torch.zeros(1, 18, 3, 3)))
    assert [(entry.operator, entry.madds) for entry in cost.uncounted] == [("torchvision.deform_conv2d", None)]


def test_attention_is_seen() -> None:
    tokens, width = 5, 8
    attention = nn.TransformerEncoderLayer(width, 2, 16, batch_first=True)
    cost = count(attention, torch.zeros(3, tokens, width))
    projections, products = tokens * width * 4 * width, 2 * tokens * tokens * width
    assert cost.by_kind == {
        "linear": 2 * tokens * width * 16,
        "matrix product": projections,  # its weights are read by functions
        "attention": products,
    }
    assert cost.madds == sum(cost.by_kind.values())


# ---- epitome models ----


def converted(**options: Any) -> nn.Module:
    model = mobilenetv2(10, cifar=True)
    epitorch.convert_(model, mobilenetv2_plan(model, 0.18, last_conv=True, **options))
    return model


CIFAR = torch.zeros(1, 3, 32, 32)


def test_mobilenetv2_on_cifar10() -> None:
    """The method's figures: dense, narrowed and epitome at c = 0.18 with the last convolution compressed."""
    dense = count(mobilenetv2(10, cifar=True), CIFAR)
    assert (dense.params, dense.madds) == (2_236_682, 87_976_448)  # 2.237 M, 88.0 M
    narrow = count(mobilenetv2(10, hidden_width=0.18, last_width=0.18, cifar=True), CIFAR)
    assert (narrow.params, narrow.madds) == (404_672, 17_060_140)  # 0.405 M, 17.1 M
    epitome = count(converted(index="direct"), CIFAR)
    assert epitome.params == 493_312  # 0.493 M
    assert epitome.madds_dense == dense.madds
    assert epitome.madds - epitome.madds_interpolation == 21_667_840
    assert epitome.madds_interpolation <= 2_873_344  # 2.9 M; a little less where an initial start is whole


def test_interpolation_of_mobilenetv2_with_fractional_starts() -> None:
    """The method's 21.2 M and 2.9 M come out if the first block's projection is compressed as well."""
    model = converted(index="fixed")
    first = LayerPlan((16, 5, 1, 1), index="fixed")
    epitorch.convert_(model, Plan({"features.1.conv.1": first}))
    for layer in model.modules():
        if isinstance(layer, epitorch.EpitomeLayer):
            layer.set_starts({axis: torch.floor(starts) + 0.25 for axis, starts in layer.starts().items()})
    cost = count(model, CIFAR)
    assert round((cost.madds - cost.madds_interpolation) / 1e6, 1) == 21.2
    assert round(cost.madds_interpolation / 1e6, 1) == 2.9
    assert round(cost.params / 1e6, 3) == 0.493


def test_totals_are_sums_and_parts() -> None:
    model = converted()
    cost = count(model, CIFAR)
    assert cost.params == cost.params_epitome + cost.params_routing + cost.params_other
    learners = [layer.learner for layer in model.modules() if isinstance(layer, epitorch.EpitomeLayer)]
    learned = sum(p.numel() for learner in learners if learner is not None for p in learner.parameters())
    assert cost.params_learner == learned > 0
    all_parameters = sum(p.numel() for p in model.parameters())
    assert cost.params == all_parameters - learned + cost.params_routing  # the maps are buffers here
    for name in ("madds", "madds_interpolation", "madds_paper", "madds_dense"):
        assert getattr(cost, name) == sum(getattr(layer, name) for layer in cost.layers)
    assert cost.params_epitome == sum(layer.params_epitome for layer in cost.layers)


def test_kinds_of_starts_cost_the_same() -> None:
    costs = [count(converted(index=index), CIFAR) for index in ("learner", "direct", "fixed")]
    assert len({(cost.params, cost.params_routing, cost.params_other) for cost in costs}) == 1
    assert [cost.params_learner > 0 for cost in costs] == [True, False, False]


def test_batch_is_divided_out() -> None:
    model = converted()
    assert count(model, CIFAR).to_dict() == count(model, torch.zeros(3, 3, 32, 32)).to_dict()


def test_whole_starts_execute_less() -> None:
    layer = EpitomeConv2d(8, 32, 1, epitome_shape=(8, 8, 1, 1), index="fixed")
    layer.set_starts({"out": torch.tensor([0.5, 1.5, 2.5, 3.0])})
    between = count(layer, torch.zeros(1, 8, 5, 5))
    assert between.madds_interpolation == 2 * 24 * 25  # the last block's start is whole
    layer.snap_routing()
    snapped = count(layer, torch.zeros(1, 8, 5, 5))
    assert (snapped.madds_interpolation, snapped.madds) == (0, 8 * 8 * 25)


def test_super_index_counts_multiples_of_the_group_length_as_whole() -> None:
    layer = EpitomeLinear(16, 4, epitome_shape=(4, 8), group_length=4, index="fixed")
    layer.set_starts({"in": torch.tensor([4.0, 2.0])})
    assert count(layer, torch.zeros(1, 16)).madds_interpolation == 8 + 2 * 8


def test_folded_layers_execute_the_dense_count() -> None:
    layer = EpitomeConv2d(8, 16, 3, epitome_shape=(8, 4, 3, 3), channel_starts="grid")
    cost = count(layer, torch.zeros(1, 8, 5, 5))
    assert (cost.layers[0].strategy, cost.madds) == ("folded", cost.madds_dense)


def test_transposed_epitome_layer_with_groups() -> None:
    layer = EpitomeConvTranspose2d(8, 12, 3, stride=2, groups=2, epitome_shape=(8, 2, 3, 3), index="direct")
    layer.set_starts({"out": torch.full((3,), 0.5)})
    cost = count(layer, torch.zeros(2, 8, 4, 4))
    assert cost.layers[0].strategy == "product_map"
    assert cost.madds - cost.madds_interpolation == 2 * 8 * 9 * 16
    assert cost.madds_interpolation == 2 * 12 * 9 * 9


def test_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5))
        example = torch.zeros(2, 3, 6, 6)
    assert count(model, example).madds == 8 * 27 * 16 + 128 * 5


# ---- what must stay as it was ----


class Noisy(nn.Module):
    """Writes into its input, its buffers and the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = EpitomeLinear(6, 12, epitome_shape=(6, 6))
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.norm(self.layer(x.add_(torch.rand(6))))


def test_the_model_and_global_state_stay_as_they_were() -> None:
    model = Noisy().train()
    model.norm.eval()
    calls: list[str] = []
    model.layer.register_forward_hook(lambda *_: calls.append("user"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    random, example = torch.get_rng_state(), torch.ones(4, 6)
    fused = torch.backends.mha.get_fastpath_enabled()
    count(model, example)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert [module.training for module in (model, model.layer, model.norm)] == [True, True, False]
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(example, torch.ones(4, 6))
    assert torch.backends.mha.get_fastpath_enabled() == fused
    assert all(parameter.grad is None for parameter in model.parameters())


def test_state_is_restored_after_a_failure() -> None:
    model = nn.Linear(4, 4).train()
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        count(model, torch.zeros(2, 5))
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()


def test_works_inside_inference_mode() -> None:
    layer = nn.Linear(4, 6)
    with torch.inference_mode():
        assert count(layer, torch.zeros(2, 4)).madds == 24


# ---- output ----


@pytest.fixture
def small() -> Cost:
    model = nn.Sequential(EpitomeConv2d(3, 16, 3, epitome_shape=(4, 3, 3, 3)), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1))
    return count(model, torch.zeros(1, 3, 8, 8))


def test_table_is_aligned_and_ends_in_totals(small: Cost) -> None:
    lines = str(small).splitlines()
    assert len({line.index("product_map") for line in lines if "product_map" in line}) == 1
    total = next(line for line in lines if line.startswith("total"))
    assert f"{small.params:,}" in total
    assert f"{small.madds:,}" in total
    end = lines[0].index("  kind")
    assert all(line[end : end + 2] == "  " for line in lines[: len(small.layers) + 1])
    assert any(line.startswith("params = epitomes 108 + routing maps 4") for line in lines)
    assert "(outside of these layers)" in str(small)
    assert "MAdds are those of one input of 3x8x8" in str(small)


def test_inputs_of_several_arguments_are_told_without_the_batch() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x * scale

    assert count(Two(), (torch.zeros(4, 3, 8, 8), torch.ones(()))).inputs == ((3, 8, 8), ())


def test_plain_data(small: Cost) -> None:
    data = json.loads(json.dumps(small.to_dict()))
    assert data["params"] == small.params
    assert data["madds"] == small.madds
    assert [layer["name"] for layer in data["layers"]] == ["0", "2"]
    assert sum(layer["madds"] for layer in data["layers"]) == data["madds"]
    assert data["uncounted"] == data["operators"] == []
    assert data["by_kind"] == small.by_kind
    assert sum(data["by_kind"].values()) == data["madds"]
    assert set(data["by_kind"]) == {"convolution", "interpolation"}


def test_example_without_a_tensor() -> None:
    with pytest.raises(InputError, match="holds no tensor"):
        count(nn.Linear(2, 2), (1, "two"))
