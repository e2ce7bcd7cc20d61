"""Autocast, compilation, memory formats, accumulation, checkpointing, the meta device: as torch's layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from epitorch.nn import EpitomeConv1d, EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLinear, learner_starts

INDEXES = ("learner", "direct", "fixed")


def conv(index: str = "learner", **options: Any) -> EpitomeConv2d:
    """6 -> 12 channels, starts on every axis; a learner depends on its input from the beginning."""
    arguments: dict[str, Any] = {"epitome_shape": (5, 3, 4, 3), "padding": 1, **options}
    return lively(EpitomeConv2d(6, 12, 3, index=index, **arguments))


def lively(layer: Any) -> Any:
    if layer.learner is not None:
        with torch.no_grad():
            layer.learner.head.weight.normal_()
    return layer


def pair(index: str) -> tuple[EpitomeConv2d, EpitomeConv2d]:
    layer = conv(index)
    return layer, copy.deepcopy(layer)


def grads(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    assert list(a) == list(b)
    for key in a:
        torch.testing.assert_close(a[key], b[key], msg=lambda text, key=key: f"{key}: {text}", **tolerance)


def train(layer: Any, forward: Any, inputs: list[Tensor]) -> list[float]:
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for x in inputs:
        optimiser.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


# ---- autocast ----


@pytest.mark.parametrize("index", INDEXES)
def test_autocast(index: str) -> None:
    layer, twin = pair(index)
    x = torch.randn(4, 6, 6, 6)
    expected = twin(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert {value.dtype for value in layer.starts().values()} == {torch.float32}
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    assert not torch.equal(y.float(), expected)
    for axis, value in layer.starts().items():
        torch.testing.assert_close(value, twin.starts()[axis], rtol=1e-6, atol=1e-6)
    y.float().square().mean().backward()
    assert all(torch.isfinite(gradient).all() for gradient in grads(layer).values())
    assert layer.epitome.grad.dtype == torch.float32


def test_autocast_keeps_the_learner_in_float32() -> None:
    """Starts near 1500 come out of the learner unrounded."""
    layer = EpitomeLinear(4, 4096, epitome_shape=(2048, 4))
    layer.set_starts({"out": torch.tensor([1501.25, 3.5])})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        said = layer.learner(torch.randn(8, 4).bfloat16())["out"]
    torch.testing.assert_close(said, torch.tensor([1501.25, 3.5]), rtol=1e-5, atol=0.02)
    assert torch.tensor(1501.25).bfloat16().item() != 1501.25


# ---- compilation ----


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("index, backend", [("learner", "aot_eager"), ("direct", "eager"), ("fixed", "eager")])
def test_compiled_training_and_evaluation_without_a_graph_break(index: str, backend: str) -> None:
    layer, twin = pair(index)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    inputs = [(1 + n) * torch.randn(4, 6, 6, 6) for n in range(3)]
    before = {axis: value.detach().clone() for axis, value in layer.starts().items()}
    assert train(layer, compiled, inputs) == pytest.approx(train(twin, twin, inputs), rel=1e-4)
    assert_same(dict(layer.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)
    moved = any(not torch.equal(value, before[axis]) for axis, value in layer.starts().items())
    assert moved == (index != "fixed")
    layer.eval()
    torch.testing.assert_close(compiled(inputs[0]), twin.eval()(inputs[0]), rtol=1e-4, atol=1e-5)
    layer.snap_routing()
    torch.testing.assert_close(compiled(inputs[0]), layer.to_dense()(inputs[0]), rtol=1e-4, atol=1e-5)
    # fixed starts lie on positions already
    assert torch.allclose(compiled(inputs[0]), twin(inputs[0]), rtol=1e-4, atol=1e-5) == (index == "fixed")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "layer, shape",
    [
        (lambda: EpitomeConv1d(6, 8, 3, epitome_shape=(3, 4, 5), spatial_starts="out"), (4, 6, 9)),
        (lambda: EpitomeConvTranspose2d(6, 8, 3, stride=2, epitome_shape=(4, 3, 3, 3)), (4, 6, 4, 4)),
        (lambda: EpitomeConv2d(6, 8, 3, epitome_shape=(3, 4, 3, 3), channel_starts="grid"), (4, 6, 5, 5)),
        (lambda: EpitomeConv2d(6, 8, 3, epitome_shape=(3, 20), flatten_kernel=True), (4, 6, 5, 5)),
        (lambda: EpitomeLinear(6, 8, epitome_shape=(3, 4)), (4, 6)),
    ],
    ids=["conv1d", "transposed", "grid", "flat", "linear"],
)
def test_every_kind_compiles(layer: Any, shape: tuple[int, ...]) -> None:
    made = lively(layer())
    twin, x = copy.deepcopy(made), torch.randn(shape)
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    assert train(made, compiled, [x, 2 * x]) == pytest.approx(train(twin, twin, [x, 2 * x]), rel=1e-4)
    assert_same(dict(made.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(compiled(2 * x), compiled(x))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("form", ["separable", "grid"])
def test_compiled_code_reads_the_right_blocks(form: Any) -> None:
    """Machine code, not traced operators: whole-number arithmetic on vectors goes wrong there alone."""
    torch.manual_seed(0)
    shapes = [(64, 17, 33, 9), (32, 32, 17, 9)]  # blocks that do not divide a vector
    layers = nn.ModuleList(
        EpitomeConv2d(i, o, 1, epitome_shape=(e, f, 1, 1), channel_starts=form, index="direct") for o, i, e, f in shapes
    )

    def weights() -> list[Tensor]:
        return [layer.weight * 1 for layer in layers]

    def with_grads(made: list[Tensor]) -> list[Tensor]:
        layers.zero_grad()
        sum((weight * torch.linspace(-1, 2, weight.numel()).view_as(weight)).sum() for weight in made).backward()  # type: ignore[union-attr]
        return [weight.detach() for weight in made] + [
            p.grad.clone() for p in layers.parameters() if p.grad is not None
        ]

    want = with_grads(weights())
    for got, value in zip(with_grads(torch.compile(weights, fullgraph=True)()), want, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(got, value.roll(1, 0), rtol=1e-4, atol=1e-5)


# ---- memory ----


@pytest.mark.parametrize("index", INDEXES)
def test_channels_last(index: str) -> None:
    layer, twin = pair(index)
    x = torch.randn(4, 6, 6, 6)
    expected = twin(x)
    y = layer.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected)
    y.square().mean().backward()
    expected.square().mean().backward()
    assert_same(grads(layer), grads(twin), rtol=1e-4, atol=1e-5)
    assert layer.epitome.grad.abs().max() > 0


@pytest.mark.parametrize("index", ["direct", "fixed"])
def test_accumulated_gradients_are_those_of_the_whole_batch(index: str) -> None:
    layer, twin = pair(index)
    x = torch.randn(6, 6, 5, 5)
    twin(x).square().sum().backward()
    layer(x[:2]).square().sum().backward()
    part = grads(layer)
    layer(x[2:]).square().sum().backward()
    assert_same(grads(layer), grads(twin), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(part["epitome"], layer.epitome.grad)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("index", INDEXES)
def test_checkpointed_training_equals_plain(index: str, reentrant: bool) -> None:
    layer, twin = pair(index)
    inputs = [(1 + n) * torch.randn(2, 6, 5, 5) for n in range(3)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    kept = train(layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant), leaves)
    assert kept == pytest.approx(train(twin, twin, inputs), rel=1e-5)
    assert_same(dict(layer.state_dict()), dict(twin.state_dict()), rtol=1e-5, atol=1e-6)
    assert kept[0] != kept[1]


@pytest.mark.parametrize("index", INDEXES)
def test_no_grad_and_inference_mode(index: str) -> None:
    layer = conv(index).eval()
    x = torch.randn(2, 6, 5, 5)
    expected = layer(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x)
        assert not y.requires_grad
        torch.testing.assert_close(y, expected.detach())
    assert expected.requires_grad


@pytest.mark.parametrize("index", INDEXES)
def test_meta_device(index: str) -> None:
    """Made without memory, given memory, filled from a state: the same layer in both modes."""
    source = conv(index)
    with torch.device("meta"):
        layer = EpitomeConv2d(6, 12, 3, padding=1, epitome_shape=(5, 3, 4, 3), index=index)
    assert all(tensor.is_meta for tensor in [*layer.parameters(), *layer.buffers()])
    assert layer.spec == source.spec
    layer.to_empty(device="cpu").load_state_dict(source.state_dict())
    x = torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(layer.eval()(x), source.eval()(x))
    with learner_starts(layer), learner_starts(source):
        torch.testing.assert_close(layer(x), source(x))
    assert train(layer, layer.train(), [x, 2 * x]) == pytest.approx(train(source, source.train(), [x, 2 * x]))
    assert_same(dict(layer.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("index", INDEXES)
def test_meta_device_with_assigned_state(index: str) -> None:
    source, x = conv(index), torch.randn(2, 6, 5, 5)
    layer = EpitomeConv2d(6, 12, 3, padding=1, epitome_shape=(5, 3, 4, 3), index=index, device="meta")
    layer.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    torch.testing.assert_close(layer.eval()(x), source.eval()(x))
    assert not any(tensor.is_meta for tensor in layer.parameters())


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_device_arguments(index: str, dtype: torch.dtype) -> None:
    layer = conv(index, dtype=dtype, device="cpu")
    assert layer.epitome.dtype == layer.bias.dtype == dtype
    assert layer.epitome.device == torch.device("cpu")
    assert layer(torch.randn(2, 6, 5, 5, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_uneven_same_padding_in_every_mode(mode: str) -> None:
    """An even kernel needs one more on one side; torch puts it at the end."""
    options = {"padding": "same", "padding_mode": mode, "bias": False}
    layer = EpitomeConv2d(4, 4, (4, 2), epitome_shape=(3, 4, 4, 2), index="fixed", **options)
    dense = nn.Conv2d(4, 4, (4, 2), **options)
    x = torch.randn(1, 4, 6, 7)
    with torch.no_grad():
        dense.weight.copy_(layer.weight)
    torch.testing.assert_close(layer(x), dense(x))
    assert not torch.allclose(layer(x), dense(x.flip(-1)).flip(-1))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_uneven_same_padding_with_zeros() -> None:
    layer = EpitomeConv2d(4, 4, (4, 2), padding="same", epitome_shape=(3, 4, 4, 2), index="fixed")
    x = torch.randn(1, 4, 6, 7)
    assert layer(x).shape == (1, 4, 6, 7)
    torch.testing.assert_close(layer(x), layer.to_dense()(x))
    assert not torch.allclose(layer(x), layer.to_dense()(x.flip(-1)).flip(-1))


@pytest.mark.parametrize("size", [(7, 9), (8, 10), (2, 12, 8, 9)])
def test_output_size_of_a_transposed_convolution(size: tuple[int, ...]) -> None:
    layer = EpitomeConvTranspose2d(6, 12, 3, stride=2, padding=1, epitome_shape=(3, 5, 3, 3), index="fixed")
    x = torch.randn(2, 6, 4, 5)
    expected = layer.to_dense()(x, output_size=size)
    torch.testing.assert_close(layer(x, output_size=size), expected)
    assert expected.shape[-2:] == size[-2:]


@pytest.mark.parametrize("index", INDEXES)
def test_moving_between_modes_inside_a_model(index: str) -> None:
    """A frozen trunk with a trained head: requires_grad_(False) on a layer leaves its output usable."""
    model = nn.Sequential(conv(index).requires_grad_(False), nn.ReLU(), nn.Conv2d(12, 2, 1))
    model(torch.randn(2, 6, 5, 5)).sum().backward()
    assert model[0].epitome.grad is None
    assert model[2].weight.grad.abs().max() > 0


@pytest.mark.parametrize("index", INDEXES)
def test_export_of_an_evaluated_layer(index: str) -> None:
    layer, x = conv(index).eval(), torch.randn(2, 6, 5, 5)
    wanted = layer(x).detach()
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), wanted)
    with torch.no_grad():
        layer.epitome.add_(1.0)  # shared with the exported program
    assert not torch.allclose(exported(x), wanted)


def test_a_layer_made_on_the_meta_device_takes_a_state_by_assignment_and_trains() -> None:
    source = EpitomeLinear(8, 16, epitome_shape=(4, 4))
    with torch.device("meta"):
        layer = EpitomeLinear(8, 16, epitome_shape=(4, 4))
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, 8)
    torch.testing.assert_close(layer.train()(x), source.train()(x))
    torch.testing.assert_close(layer.starts(), source.starts())
    layer(x).sum().backward()
    assert not any(buffer.is_meta for buffer in layer.buffers())


def test_ensembles_by_vmap_and_fake_tensors() -> None:
    layers = [EpitomeLinear(8, 16, epitome_shape=(4, 8), index="fixed").eval() for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(3, 8)

    def run(parameters: Any, buffers: Any) -> Any:
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))

    torch.testing.assert_close(torch.vmap(run)(parameters, buffers), torch.stack([layer(x) for layer in layers]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layers[0](torch.zeros(5, 8)).shape == (5, 16)
