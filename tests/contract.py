"""What every epitome layer promises. A layer supplies its constructor arguments and inherits the checks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import epitorch.nn as epi
import reference
from epitorch.functional import sample_weight

CLOSE: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}
INDEXES = ("learner", "direct", "fixed")


@dataclass(frozen=True)
class LayerCase:
    """Constructor arguments of one layer, and the shape of an input."""

    name: str
    kind: str  # torch's class name, for example "Conv2d"
    args: tuple[Any, ...]
    input_shape: tuple[int, ...]
    epitome: dict[str, Any]  # the keyword-only arguments that torch's layer does not have
    options: dict[str, Any] = field(default_factory=dict)  # torch's keyword arguments

    @property
    def transposed(self) -> bool:
        return "Transpose" in self.kind

    @property
    def flat(self) -> bool:
        return bool(self.epitome.get("flatten_kernel"))

    def dense(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Torch's own layer with the same arguments."""
        return getattr(nn, self.kind)(*self.args, **self.options, dtype=dtype)

    def build(self, index: str = "direct", dtype: torch.dtype = torch.float64, *, spread: bool = True) -> Any:
        """The epitome layer in eval mode, with random starts away from the kinks unless `spread` is False."""
        kind = getattr(epi, f"Epitome{self.kind}")
        layer = kind(*self.args, **self.options, **self.epitome, index=index, dtype=dtype).eval()
        if spread:
            layer.set_starts(self.random_starts(dtype))
        return layer

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(self.input_shape, dtype=dtype)

    # ---- shapes, worked out from the arguments and not from the layer ----

    def _semantic(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[1], shape[0], *shape[2:]) if self.transposed else shape

    def weight_shape(self) -> tuple[int, ...]:
        """Semantic shape of torch's weight."""
        return self._semantic(tuple(self.dense().weight.shape))

    def layout(self) -> reference.Layout:
        weight, epitome = self.weight_shape(), self._semantic(tuple(self.epitome["epitome_shape"]))
        if self.flat:
            weight = (weight[0], prod(weight[1:]))
        apart = {"epitome_shape", "flatten_kernel"}
        named = {key: value for key, value in self.epitome.items() if key not in apart}
        blocks = {"block_out": epitome[0], "block_in": epitome[1]}
        return reference.Layout(weight, epitome, **blocks | named)

    def start_sizes(self) -> dict[str, Tensor]:
        """Length of the epitome axis behind each start, shaped to broadcast over the starts."""
        layout = self.layout()
        sizes = {"out": [layout.epitome_shape[0]], "in": [layout.epitome_shape[1]]}
        sizes["spatial"] = [layout.epitome_shape[2 + axis] for axis in layout.spatial_axes]
        return {axis: torch.tensor(sizes[axis]) for axis in reference.start_shapes(layout)}

    def random_starts(self, dtype: torch.dtype = torch.float64, *, whole: bool = False) -> dict[str, Tensor]:
        """Starts at least a fifth away from the kinks of the interpolation, or right on them."""
        layout, sizes, starts = self.layout(), self.start_sizes(), {}
        for axis, shape in reference.start_shapes(layout).items():
            g = 1 if axis == "spatial" else layout.group_length
            position = torch.floor(torch.rand(shape, dtype=dtype) * (sizes[axis] // g))
            starts[axis] = g * (position if whole else position + 0.2 + 0.6 * torch.rand(shape, dtype=dtype))
        return starts

    # ---- the slow truth ----

    def to_storage(self, weight: np.ndarray) -> Tensor:
        """A semantic weight in torch's order and shape."""
        stored = torch.from_numpy(weight).reshape(self.weight_shape())
        return stored.transpose(0, 1) if self.transposed else stored

    def slow_weight(self, epitome: Tensor, starts: Mapping[str, Tensor]) -> Tensor:
        return self.to_storage(reference.sample_weight(*self._arrays(epitome, starts), self.layout()))

    def gathered_weight(self, epitome: Tensor, starts: Mapping[str, Tensor]) -> Tensor:
        return self.to_storage(reference.gather_weight(*self._arrays(epitome, starts), self.layout()))

    def semantic_epitome(self, epitome: Tensor) -> Tensor:
        return epitome.detach().transpose(0, 1) if self.transposed else epitome.detach()

    def _arrays(self, epitome: Tensor, starts: Mapping[str, Tensor]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        arrays = {axis: start.detach().numpy() for axis, start in starts.items()}
        return self.semantic_epitome(epitome).numpy(), arrays

    def dense_with(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """Torch's own layer carrying the given weight and bias."""
        dense = self.dense(weight.dtype)
        with torch.no_grad():
            dense.weight.copy_(weight)
            if bias is not None:
                dense.bias.copy_(bias)
        return dense


def differs(a: Tensor, b: Tensor) -> bool:
    """Far beyond rounding: what a negative control asks."""
    return bool((a - b).abs().max() > 1e-3)


def perturb_(layer: Any) -> None:
    with torch.no_grad():
        layer.epitome.add_(torch.randn_like(layer.epitome))


def shifted(starts: Mapping[str, Tensor], axis: str, by: float) -> dict[str, Tensor]:
    """A copy of the starts with one axis moved."""
    return {key: start.detach() + (by if key == axis else 0) for key, start in starts.items()}


def state_of(layer: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in layer.state_dict().items()}


def train_once(layer: Any, x: Tensor) -> None:
    """One optimiser step on a smooth loss."""
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.05)
    layer.train()
    layer(x).square().mean().backward()
    optimiser.step()


def pickled(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


class LayerContract:
    """Inherit and set `cases`. Checks with an `index` run the first case with all, the others with one in turn."""

    cases: tuple[LayerCase, ...] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "index" in metafunc.fixturenames:
            first, *rest = self.cases
            pairs = [(first, index) for index in INDEXES]
            pairs += [(case, INDEXES[n % 3]) for n, case in enumerate(rest)]
            metafunc.parametrize("case, index", pairs, ids=[f"{case.name}-{index}" for case, index in pairs])
        elif "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=[case.name for case in self.cases])

    # ---- values ----

    def test_starts_exist_where_the_method_says(self, case: LayerCase) -> None:
        layer = case.build()
        expected = reference.start_shapes(case.layout())
        assert {axis: tuple(start.shape) for axis, start in layer.starts().items()} == expected
        assert layer.spec.num_starts == sum(prod(shape) for shape in expected.values())
        assert tuple(layer.epitome.shape) == tuple(case.epitome["epitome_shape"])
        assert (layer.block_out, layer.block_in) == (case.layout().block_out, case.layout().block_in)

    def test_weight_equals_reference(self, case: LayerCase) -> None:
        layer, starts = case.build(), case.random_starts()
        layer.set_starts(starts)
        expected = case.slow_weight(layer.epitome, starts)
        torch.testing.assert_close(layer.weight.detach(), expected, **CLOSE)
        for axis in starts:
            layer.set_starts(shifted(starts, axis, 0.25))
            moved = case.slow_weight(layer.epitome, shifted(starts, axis, 0.25))
            torch.testing.assert_close(layer.weight.detach(), moved, **CLOSE)
            assert differs(moved, expected), axis
        layer.set_starts(starts)
        perturb_(layer)
        assert differs(layer.weight.detach(), expected)

    def test_forward_equals_torch_with_the_reference_weight(self, case: LayerCase) -> None:
        layer, x = case.build(), case.input()
        dense = case.dense_with(case.slow_weight(layer.epitome, layer.starts()), layer.bias)
        expected = dense(x)
        torch.testing.assert_close(layer(x), expected, **CLOSE)
        torch.testing.assert_close(layer.train()(x), expected, **CLOSE)
        perturb_(layer)
        assert differs(layer(x), expected)

    def test_starts_on_the_grid_gather(self, case: LayerCase) -> None:
        layer, whole = case.build(), case.random_starts(whole=True)
        layer.set_starts(whole)
        expected = case.gathered_weight(layer.epitome, whole)
        torch.testing.assert_close(layer.weight.detach(), expected, rtol=0, atol=0)
        for axis in whole:
            layer.set_starts(shifted(whole, axis, 0.5))
            assert differs(layer.weight.detach(), expected), axis

    def test_circular_shift_with_matching_starts(self, case: LayerCase) -> None:
        layer = case.build()
        expected, starts = layer.weight.detach().clone(), shifted(layer.starts(), "no axis", 0)
        for axis in starts:
            dims = self._epitome_dims(case, axis)
            by = 1 if axis == "spatial" else case.layout().group_length
            twin = copy.deepcopy(layer)
            with torch.no_grad():
                twin.epitome.copy_(torch.roll(layer.epitome, [by] * len(dims), dims))
            rolled = twin.weight.detach().clone()
            twin.set_starts(shifted(starts, axis, by))
            torch.testing.assert_close(twin.weight.detach(), expected, **CLOSE)
            assert differs(rolled, expected), axis

    @staticmethod
    def _epitome_dims(case: LayerCase, axis: str) -> list[int]:
        if axis == "spatial":
            return [2 + k for k in case.layout().spatial_axes]
        return [int((axis == "in") != case.transposed)]

    # ---- gradients ----

    def test_gradcheck_of_the_generated_weight(self, case: LayerCase) -> None:
        layer = case.build()
        epitome = case.semantic_epitome(layer.epitome).clone().requires_grad_()
        axes = list(layer.starts())
        starts = [layer.starts()[axis].detach().clone().requires_grad_() for axis in axes]

        def weight(epitome: Tensor, *starts: Tensor) -> Tensor:
            return sample_weight(epitome, dict(zip(axes, starts, strict=True)), layer.spec)

        assert torch.autograd.gradcheck(weight, (epitome, *starts), fast_mode=True)

    def test_gradcheck_of_the_layer(self, case: LayerCase) -> None:
        layer = case.build("direct")
        names, values = zip(*layer.named_parameters(), strict=True)
        assert {f"routing_map.{axis}_starts" for axis in layer.starts()} | {"epitome"} <= set(names)

        def output(x: Tensor, *values: Tensor) -> Tensor:
            return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

        inputs = [value.detach().clone().requires_grad_() for value in (case.input(), *values)]
        assert torch.autograd.gradcheck(output, inputs, fast_mode=True)

    def test_every_parameter_learns(self, case: LayerCase, index: str) -> None:
        layer = case.build(index, spread=False).train()
        layer(case.input()).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
        assert layer.epitome.grad.abs().max() > 0
        learned = [p for n, p in layer.named_parameters() if n.startswith(("routing_map", "learner"))]
        assert bool(learned) == (index != "fixed" and bool(layer.starts()))
        assert not learned or any(parameter.grad.abs().max() > 0 for parameter in learned)

    # ---- state ----

    def test_train_eval_train_keeps_values(self, case: LayerCase, index: str) -> None:
        layer, x = case.build(index), case.input()
        state, expected = state_of(layer), layer(x)
        layer.train().eval()
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        assert_same_state(layer.state_dict(), state)
        train_once(layer, x)
        assert differs_somewhere(layer.eval().state_dict(), state)

    def test_state_dict_round_trip(self, case: LayerCase, index: str) -> None:
        layer, x = case.build(index), case.input()
        train_once(layer, x)
        twin = case.build(index, spread=False)
        assert differs(twin(x), layer.eval()(x))
        twin.load_state_dict(saved(layer.state_dict()), strict=True)
        torch.testing.assert_close(twin(x), layer(x), rtol=0, atol=0)
        assert_same_state(twin.state_dict(), layer.state_dict())

    def test_deployed_state_loads_into_a_layer_with_a_learner(self, case: LayerCase) -> None:
        layer, x = case.build("learner"), case.input()
        layer.drop_learner()
        assert layer.learner is None
        state = saved(layer.state_dict())
        assert not [key for key in state if key.startswith("learner")]
        twin = case.build("learner", spread=False)
        assert (twin.learner is not None) == bool(layer.starts())
        twin.load_state_dict(state, strict=True)
        assert twin.learner is None
        torch.testing.assert_close(twin(x), layer(x), rtol=0, atol=0)
        torch.testing.assert_close(twin.train()(x), layer(x), rtol=0, atol=0)

    @pytest.mark.parametrize("make", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
    def test_copies(self, case: LayerCase, index: str, make: Any) -> None:
        layer, x = case.build(index), case.input()
        train_once(layer, x)
        expected = layer.eval()(x)
        twin = make(layer)
        torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
        assert_same_state(twin.state_dict(), layer.state_dict())
        perturb_(twin)
        twin.set_starts({axis: start.detach() + 0.25 for axis, start in twin.starts().items()})
        assert differs(twin(x), expected)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)

    def test_to_dense_equals_eval(self, case: LayerCase, index: str) -> None:
        layer, x = case.build(index), case.input()
        dense = layer.to_dense()
        assert type(dense) is getattr(nn, case.kind)
        assert repr(dense) == repr(case.dense())
        torch.testing.assert_close(dense(x), layer(x), **CLOSE)
        perturb_(layer)
        assert differs(dense(x), layer(x))


def saved(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Through a file and back, weights only."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same_state(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert list(a) == list(b)
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")


def differs_somewhere(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return any(not torch.equal(a[key], b[key]) for key in a)
