from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import epitorch
from epitorch.conversion import EPITOME_CLASSES, weight_layers, why_left
from epitorch.errors import ConversionError, InputError
from epitorch.nn import EpitomeConv2d, EpitomeLayer, EpitomeLinear
from epitorch.plans import LayerPlan, Plan, planned_params


class Network(nn.Module):
    """Two names for one convolution, a list, a subclass, a grouped and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False) for _ in range(2)])
        self.again = self.blocks[0]
        self.odd = OddConv(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1)
        self.head = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).relu()
        x = self.up(self.odd(self.again(x)))
        return self.head(x.mean((2, 3)))


class OddConv(nn.Conv2d):
    """A convolution with a behaviour of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


PLAN = Plan(
    {
        "stem": LayerPlan((4, 3, 3, 3)),
        "blocks.0": LayerPlan((8, 2, 3, 3), index="direct"),
        "up": LayerPlan((4, 6, 3, 3), index="fixed"),
        "head": LayerPlan((6, 6)),
    },
    {"blocks.1": "middle"},
)


def test_planned_layers_become_epitome_layers_and_keep_their_arguments() -> None:
    model = Network()
    report = epitorch.convert_(model, PLAN)
    assert isinstance(model.stem, EpitomeConv2d)
    assert isinstance(model.head, EpitomeLinear)
    assert model.again is model.blocks[0]
    assert isinstance(model.again, EpitomeConv2d)
    assert (model.stem.padding_mode, model.up.output_padding, model.blocks[0].groups) == ("circular", (1, 1), 2)
    assert model.blocks[0].bias is None
    assert {layer.name for layer in report.converted} == set(PLAN.layers)
    assert {layer.name: layer.left for layer in report.left} == {"blocks.1": "middle", "odd": "not_in_plan"}
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 12)


def test_report_shows_every_layer_once_with_its_parameters() -> None:
    model = Network()
    weights = {name: layer.weight.numel() for name, layer in model.named_modules() if hasattr(layer, "weight")}
    report = epitorch.convert_(model, PLAN)
    assert {layer.name: layer.params_before for layer in report.layers} == weights
    assert {layer.name for layer in report.layers} == {name for name, _ in weight_layers(model)}
    stem = report.layers[0]
    assert (stem.params_after, stem.note) == (4 * 3 * 9 + 2, "converted")
    table = str(report)
    assert all(name in table for name in weights)
    assert "left: not_in_plan" in table


def test_an_expansion_is_called_one() -> None:
    report = epitorch.convert_(Network(), Plan({"head": LayerPlan((12, 6)), "stem": LayerPlan((8, 3, 7, 7))}))
    notes = {layer.name: layer.note for layer in report.converted}
    assert notes == {"stem": "converted, an expansion", "head": "converted"}


def test_planned_params_is_what_the_converted_model_has() -> None:
    model = Network()
    expected = planned_params(model, PLAN)
    epitorch.convert_(model, PLAN)
    assert epitorch.count(model, torch.zeros(1, 3, 8, 8)).params == expected
    assert expected < sum(p.numel() for p in Network().parameters())


def test_to_dense_goes_back_with_the_generated_weights() -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    before = [type(module) for module in model.modules()]
    epitorch.convert_(model, PLAN)
    wanted = model(x)
    assert epitorch.to_dense_(model) is model
    assert [type(module) for module in model.modules()] == before
    torch.testing.assert_close(model(x), wanted)
    with torch.no_grad():
        model.stem.weight.mul_(1.1)
    assert not torch.allclose(model(x), wanted)


def test_to_dense_of_a_bare_layer_returns_it() -> None:
    layer = EpitomeLinear(8, 8, epitome_shape=(4, 8))
    dense = epitorch.to_dense_(layer)
    assert type(dense) is nn.Linear
    torch.testing.assert_close(dense.weight, layer.weight)


def test_mode_dtype_gradient_flags_and_hooks_survive() -> None:
    model = Network().double()
    model.stem.eval()
    model.stem.weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    calls: list[str] = []
    handle = model.head.register_forward_hook(lambda *_: calls.append("head"))
    bias = model.stem.bias.detach().clone()
    epitorch.convert_(model, PLAN)
    assert (model.stem.training, model.head.training) == (False, True)
    assert model.stem.epitome.dtype is torch.float64
    assert (model.stem.epitome.requires_grad, model.head.epitome.requires_grad) == (False, True)
    assert (model.stem.bias.requires_grad, model.head.bias.requires_grad) == (True, False)
    torch.testing.assert_close(model.stem.bias.detach(), bias)
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert calls == ["head"]
    handle.remove()
    epitorch.to_dense_(model)
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert calls == ["head"]


def test_the_generated_weight_has_the_scale_of_the_dense_one() -> None:
    conv = nn.Conv2d(64, 256, 1)
    with torch.no_grad():
        conv.weight.mul_(3.0)
    model = nn.Sequential(conv)
    std = float(conv.weight.detach().std())
    epitorch.convert_(model, Plan({"0": LayerPlan((50, 64, 1, 1))}))
    assert float(model[0].weight.detach().std()) == pytest.approx(std, rel=0.05)


def test_every_supported_class_has_an_epitome_class() -> None:
    for dense, epitome in EPITOME_CLASSES.items():
        assert epitome.__name__ == f"Epitome{dense.__name__}"
        assert issubclass(epitome, EpitomeLayer)


@pytest.mark.parametrize(
    "plan, words",
    [
        (Plan({"stam": LayerPlan((4, 3, 3, 3))}), ["'stam'", "did you mean 'stem'"]),
        (Plan({"blocks": LayerPlan((4, 8, 1, 1))}), ["blocks", "other_kind", "ModuleList", "leave it out"]),
        (Plan({"": LayerPlan((4, 8, 1, 1))}), ["the model itself"]),
        (Plan({"stem": LayerPlan((4, 3, 3))}), ["stem", "4 sizes"]),
        (Plan({"stem": LayerPlan((0, 3, 3, 3))}), ["stem", "above 0"]),
        (Plan({"stem": LayerPlan((4, 3, 3, 3), block_out=5)}), ["stem", "block_out", "from 1 to 4"]),
        (Plan({"stem": LayerPlan((6, 3, 3, 3), group_length=4)}), ["stem", "group_length", "divisor of 6"]),
        (Plan({"again": LayerPlan((4, 4, 3, 3)), "blocks.0": LayerPlan((4, 4, 3, 3))}), ["planned twice"]),
    ],
)
def test_a_wrong_plan_is_refused_by_name_and_changes_nothing(plan: Plan, words: list[str]) -> None:
    model = Network()
    reference = copy.deepcopy(model)
    good_first = Plan({"head": LayerPlan((6, 6)), **plan.layers})
    with pytest.raises(ConversionError) as error:
        epitorch.convert_(model, good_first)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize(
    ("derive", "told"),
    [
        (torch.nn.utils.weight_norm, "weight_norm"),
        (torch.nn.utils.spectral_norm, "spectral_norm"),
        (lambda module: prune.l1_unstructured(module, "weight", 0.5), "pruning"),
        (torch.nn.utils.parametrizations.weight_norm, "WeightNorm"),
        (torch.nn.utils.parametrizations.spectral_norm, "SpectralNorm"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("training", [True, False])
def test_weights_made_from_other_tensors_are_folded(derive: Any, told: str, training: bool) -> None:
    conv: Any = nn.Conv2d(8, 16, 3)
    derive(conv)
    for _ in range(20):  # spectral normalisation estimates its norm over the passes
        conv.train()(torch.zeros(1, 8, 3, 3))
    conv.eval()(torch.zeros(1, 8, 3, 3))
    wanted = float(conv.weight.detach().std())
    calls: list[str] = []
    conv.register_forward_pre_hook(lambda *_: calls.append("kept"))
    model: Any = nn.Sequential(conv).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls.clear()
    report = epitorch.convert_(model, Plan({"0": LayerPlan((16, 8, 3, 3), index="fixed")}))
    assert type(model[0]) is EpitomeConv2d
    assert report.layers[0].folded == (told,)
    assert report.layers[0].note == f"converted, {told} folded"
    assert set(model.state_dict()) >= {"0.epitome", "0.bias"}
    assert not any("orig" in name or "_g" in name for name in model.state_dict())
    torch.testing.assert_close(float(model[0].weight.detach().std()), wanted, rtol=0.25, atol=0)
    torch.testing.assert_close(dict(nn.Sequential(conv).state_dict()), before)  # the old layer was not touched
    model(torch.zeros(1, 8, 3, 3))
    assert calls == ["kept"]


def test_a_pruned_epitome_is_not_made_dense() -> None:
    layer = EpitomeConv2d(8, 16, 3, epitome_shape=(8, 8, 3, 3))
    prune.l1_unstructured(layer, "epitome", 0.5)
    with pytest.raises(ConversionError, match="made from other tensors"):
        epitorch.to_dense_(nn.Sequential(layer))


def test_a_weight_that_two_modules_hold_is_refused_and_one_module_under_two_names_is_not() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    with pytest.raises(ConversionError, match="shared with another module") as error:
        epitorch.convert_(model, Plan({"2": LayerPlan((4, 8))}))
    assert "0, 2" in str(error.value)
    model[2] = model[0]
    assert len(epitorch.convert_(model, Plan({"2": LayerPlan((4, 8))})).converted) == 1


def test_weights_of_other_modules_are_listed() -> None:
    model = nn.ModuleDict(
        {"words": nn.Embedding(5, 4), "attention": nn.MultiheadAttention(4, 2), "norm": nn.LayerNorm(4)}
    )
    report = epitorch.convert_(model, Plan({"attention.out_proj": LayerPlan((2, 4), index="direct")}))
    assert {layer.name: (layer.left, layer.params_after) for layer in report.layers} == {
        "attention.out_proj": (None, 10),
        "words.weight": ("other_kind", 20),
        "attention.in_proj_weight": ("other_kind", 48),
    }


def test_scripted_models_are_refused() -> None:
    with warnings.catch_warnings(action="ignore"):
        model: Any = torch.jit.trace(nn.Sequential(nn.Linear(4, 4)), torch.zeros(1, 4))
    with pytest.raises(ConversionError, match="before it is scripted"):
        epitorch.convert_(model, Plan({"0": LayerPlan((2, 4))}))


def test_quantised_layers_are_left_with_their_reason_and_refused_by_name() -> None:
    with warnings.catch_warnings(action="ignore"):
        layer: Any = torch.ao.nn.quantized.dynamic.Linear(4, 4)
    assert why_left(layer) == "quantized"
    with pytest.raises(ConversionError, match="before it is quantised"):
        epitorch.convert_(nn.Sequential(layer), Plan({"0": LayerPlan((2, 4))}))


def test_full_backward_hooks_go_on() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8))
    calls: list[str] = []
    model[0].register_full_backward_hook(lambda *_: calls.append("back"))
    x = torch.randn(2, 4, requires_grad=True)
    for change in (lambda: epitorch.convert_(model, Plan({"0": LayerPlan((4, 4))})), lambda: epitorch.to_dense_(model)):
        change()
        model(x).sum().backward()
    assert calls == ["back", "back"]


def test_a_model_with_a_lazy_layer_is_converted_or_left_whole() -> None:
    model: Any = nn.Sequential(nn.Conv2d(8, 16, 3), nn.LazyConv2d(4, 1))
    report = epitorch.convert_(model, Plan({"0": LayerPlan((8, 8, 3, 3))}))
    assert isinstance(model[0], EpitomeConv2d)
    assert [layer.left for layer in report.layers] == [None, "lazy"]


def test_a_frozen_layer_stays_frozen_with_all_its_parts() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    epitorch.convert_(model, Plan({"0": LayerPlan((4, 8)), "1": LayerPlan((4, 8), index="direct")}))
    assert [name for name, p in model[0].named_parameters() if p.requires_grad] == ["bias"]
    assert model[1].routing_map["out"].requires_grad


@pytest.mark.parametrize("plan", [{"stem": LayerPlan((4, 3, 3, 3))}, Plan({"stem": (4, 3, 3, 3)}), None])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    with pytest.raises(ConversionError, match="this is not a plan"):
        epitorch.convert_(Network(), plan)


def test_lazy_and_already_converted_layers_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"run the model once first|cannot be converted"):
        epitorch.convert_(nn.Sequential(nn.LazyConv2d(4, 3)), Plan({"0": LayerPlan((2, 3, 3, 3))}))
    model: Any = nn.Sequential(nn.Linear(8, 8))
    plan = Plan({"0": LayerPlan((4, 8))})
    epitorch.convert_(model, plan)
    with pytest.raises(ConversionError, match="EpitomeLinear"):
        epitorch.convert_(model, plan)
    with pytest.raises(ConversionError, match="cannot be converted"):  # a learner is no part of the network
        epitorch.convert_(model, Plan({"0.learner.squeeze": LayerPlan((4, 8))}))
    (layer,) = epitorch.convert_(model, Plan({})).layers
    assert (layer.left, layer.epitome_shape, layer.params_after) == ("already_epitome", (4, 8), 34)


def test_a_forward_replaced_on_the_instance_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8))
    model[0].forward = lambda x: x @ model[0].weight.T * 2
    assert why_left(model[0]) == "patched"
    with pytest.raises(ConversionError, match="patched") as caught:
        epitorch.convert_(model, Plan({"0": LayerPlan((4, 4))}))
    assert "subclass" in str(caught.value)


def test_a_weight_of_zeros_stays_zero() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8))
    nn.init.zeros_(model[0].weight)
    epitorch.convert_(model, Plan({"0": LayerPlan((4, 4))}))
    assert not model[0].weight.any()
    model(torch.randn(2, 4)).sum().backward()
    assert model[0].epitome.grad.any()


@pytest.mark.parametrize(
    "call",
    [
        lambda: epitorch.plan(None, torch.zeros(1), ratio=2),  # type: ignore[arg-type]
        lambda: epitorch.convert_(None, Plan({})),  # type: ignore[arg-type]
        lambda: epitorch.to_dense_("resnet18"),  # type: ignore[arg-type]
        lambda: epitorch.count({"a": 1}, torch.zeros(1)),  # type: ignore[arg-type]
        lambda: epitorch.deploy(None, torch.zeros(1)),  # type: ignore[arg-type]
        lambda: epitorch.sensitivity(None, torch.zeros(1)),  # type: ignore[arg-type]
        lambda: epitorch.param_groups([torch.zeros(1)], lr=0.1),  # type: ignore[arg-type]
        lambda: epitorch.activation_moments(None, []),  # type: ignore[arg-type]
        lambda: epitorch.reestimate_batch_norm_(None, []),  # type: ignore[arg-type]
        lambda: epitorch.mobilenetv2_plan(None, 0.5),  # type: ignore[arg-type]
        lambda: Plan({}).check(None),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_model_is_refused_everywhere(call: Any) -> None:
    with pytest.raises(InputError, match=r"this is no model(.|\n)*a torch.nn.Module"):
        call()


@pytest.mark.parametrize("moments", [[1], {"0": 3}, 3])
def test_what_is_no_moments_is_refused(moments: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    with pytest.raises(ConversionError, match="these are no moments"):
        epitorch.convert_(model, Plan({"0": LayerPlan((4, 4))}), init="least_squares", moments=moments)


def test_a_layer_is_named_once_in_a_message() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    with pytest.raises(ConversionError) as caught:
        epitorch.convert_(model, Plan({"0": LayerPlan((4, 4))}), init="least_squares", moments={"0": torch.ones(3)})
    assert str(caught.value).splitlines()[0] == "0: the moments do not fit the layer"
