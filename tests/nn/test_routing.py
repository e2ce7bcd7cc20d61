"""The routing map: the moving average by hand, when it is taken, freezing and snapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import reference
from epitorch.errors import EpitorchError, StartsError
from epitorch.nn import EpitomeConv2d, learner_starts

Starts = dict[str, Tensor]


def layer_with_a_lively_learner(index: str = "learner", **options: Any) -> EpitomeConv2d:
    """6 -> 6 channels, float64; the learner's output depends on its input from the beginning."""
    arguments: dict[str, Any] = {
        "epitome_shape": (4, 3, 4, 3),
        "padding": 1,
        "dtype": torch.float64,
        **options,
    }
    layer = EpitomeConv2d(6, 6, 3, index=index, **arguments)
    if layer.learner is not None:
        with torch.no_grad():
            layer.learner.head.weight.normal_(std=3)
    return layer


def batches(count: int) -> list[Tensor]:
    return [(1 + n) * torch.randn(2, 6, 5, 5, dtype=torch.float64) for n in range(count)]


def snapshot(starts: Any) -> Starts:
    return {axis: value.detach().clone() for axis, value in starts.items()}


def mean(outputs: list[Starts]) -> Starts:
    return {axis: torch.stack([output[axis] for output in outputs]).mean(0) for axis in outputs[0]}


def by_hand(start: Starts, outputs: list[Starts], momentum: float) -> Starts:
    return {
        axis: torch.from_numpy(
            reference.moving_average(value.numpy(), [output[axis].numpy() for output in outputs], momentum)
        )
        for axis, value in start.items()
    }


def assert_starts(got: Any, expected: Starts) -> None:
    for axis, value in expected.items():
        torch.testing.assert_close(got[axis].detach(), value, rtol=1e-12, atol=1e-12)


def apart(a: Any, b: Starts) -> bool:
    return all((a[axis] - b[axis]).abs().max() > 1e-6 for axis in b)


def run_steps(
    layer: EpitomeConv2d, groups: list[list[Tensor]], forward: Callable[[list[Tensor]], Tensor] | None = None
) -> list[Starts]:
    """One optimiser step per group; returns what the learner said in each step, averaged over the group."""
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.3)
    layer.train()
    said = []
    for group in groups:
        said.append(mean([snapshot(layer.learner(x)) for x in group]))
        optimiser.zero_grad()
        for part in [group] if forward else [[x] for x in group]:
            (forward or (lambda xs: layer(xs[0])))(part).square().mean().backward()
        optimiser.step()
    return said


# ---- the average ----


@pytest.mark.parametrize("momentum", [0.97, 0.5, 0.0])
def test_three_steps_by_hand(momentum: float) -> None:
    layer = layer_with_a_lively_learner(momentum=momentum)
    start = snapshot(layer.starts())
    said = run_steps(layer, [[x] for x in batches(3)])
    assert apart(said[0], said[1])
    assert apart(said[1], said[2])
    assert_starts(layer.eval().starts(), by_hand(start, said, momentum))
    assert apart(layer.starts(), by_hand(start, said[:2], momentum))
    assert apart(layer.starts(), by_hand(start, [*said, said[-1]], momentum)) == (momentum > 0)
    printed = {axis: value + 0.97 * sum(output[axis] for output in said) for axis, value in start.items()}
    assert apart(layer.starts(), printed)  # the formula as the paper prints it grows without bound


def test_accumulated_step_counts_once() -> None:
    layer = layer_with_a_lively_learner()
    start, (a, b, c, d) = snapshot(layer.starts()), batches(4)
    each = [snapshot(layer.learner(x)) for x in (a, b)]
    said = run_steps(layer, [[a, b], [c, d]])
    assert_starts(layer.eval().starts(), by_hand(start, said, 0.97))
    assert apart(layer.starts(), by_hand(start, [*each, *said[1:]], 0.97))


def test_module_used_twice_counts_once() -> None:
    layer = layer_with_a_lively_learner()
    start, (a, b, c, d) = snapshot(layer.starts()), batches(4)
    said = run_steps(layer, [[a, b], [c, d]], lambda xs: layer(xs[0]) + layer(xs[1]))
    assert_starts(layer.eval().starts(), by_hand(start, said, 0.97))
    assert apart(layer.starts(), by_hand(start, [said[0], said[0], said[1], said[1]], 0.97))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_does_not_count_again(reentrant: bool) -> None:
    """One use is checkpointed and runs again in backward, the other is not: both weigh the same."""
    layer = layer_with_a_lively_learner()
    start, groups = snapshot(layer.starts()), [[x.requires_grad_() for x in batches(2)] for _ in range(2)]

    def forward(xs: list[Tensor]) -> Tensor:
        return checkpoint(layer, xs[0], use_reentrant=reentrant) + layer(xs[1])

    with torch.no_grad():
        uneven = mean([snapshot(layer.learner(x)) for x in (groups[0][0], groups[0][0], groups[0][1])])
    said = run_steps(layer, groups, forward)
    assert_starts(layer.eval().starts(), by_hand(start, said, 0.97))
    assert apart(layer.starts(), by_hand(start, [uneven, *said[1:]], 0.97))


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
def test_every_optimiser_step_counts(optimiser: Any) -> None:
    layer = layer_with_a_lively_learner()
    start, said, steps = snapshot(layer.starts()), [], optimiser(layer.parameters(), lr=1e-4)
    for x in batches(1) * 5:
        said.append(snapshot(layer.learner(x)))
        steps.zero_grad()
        layer(x).square().mean().backward()
        steps.step()
    assert_starts(layer.starts(), by_hand(start, said, 0.97))
    assert apart(layer.starts(), by_hand(start, said[:4], 0.97))


def test_resumed_training_goes_on_with_the_average() -> None:
    whole = layer_with_a_lively_learner()
    first = layer_with_a_lively_learner()
    first.load_state_dict(whole.state_dict())
    groups = [[x] for x in batches(4)]
    run_steps(whole, groups)
    run_steps(first, groups[:2])
    resumed = layer_with_a_lively_learner()
    resumed.load_state_dict(first.state_dict())
    assert apart(resumed.starts(), snapshot(whole.starts()))
    run_steps(resumed, groups[2:])
    assert_starts(resumed.starts(), snapshot(whole.starts()))


@pytest.mark.parametrize("index", ["learner", "direct", "fixed"])
def test_eval_does_not_move_the_map(index: str) -> None:
    layer = layer_with_a_lively_learner(index).eval()
    before, (x,) = snapshot(layer.starts()), batches(1)
    layer(x)
    with learner_starts(layer):
        layer(x)
    assert_starts(layer.starts(), before)
    if index == "learner":
        layer.train()(x)
        assert apart(layer.starts(), before)


def test_direct_starts_move_by_gradient_and_fixed_ones_stay() -> None:
    (x,) = batches(1)
    for index in ("direct", "fixed"):
        layer = layer_with_a_lively_learner(index)
        before, optimiser = snapshot(layer.starts()), torch.optim.SGD(layer.parameters(), lr=0.5)
        layer(x).square().mean().backward()
        if index == "direct":
            gradients = {axis: parameter.grad.clone() for axis, parameter in layer.routing_map.items()}
            expected = {axis: before[axis] - 0.5 * gradient for axis, gradient in gradients.items()}
        optimiser.step()
        assert_starts(layer.starts(), expected if index == "direct" else before)
        assert apart(layer.starts(), before) == (index == "direct")


def test_empty_batch_leaves_the_map_alone() -> None:
    layer = layer_with_a_lively_learner()
    before = snapshot(layer.starts())
    assert layer(torch.zeros(0, 6, 5, 5, dtype=torch.float64)).shape == (0, 6, 5, 5)
    assert_starts(layer.starts(), before)
    assert torch.isfinite(layer.weight).all()


# ---- freezing and snapping ----


def test_frozen_map_is_used_in_training_and_kept() -> None:
    layer = layer_with_a_lively_learner()
    (x,) = batches(1)
    with learner_starts(layer.eval()):
        free = layer(x)
    layer.freeze_routing()
    before = snapshot(layer.starts())
    frozen = layer.train()(x)
    torch.testing.assert_close(frozen, layer.to_dense()(x))
    assert not torch.allclose(frozen, free)
    frozen.sum().backward()
    assert all(parameter.grad is None for parameter in layer.learner.parameters())
    assert layer.epitome.grad.abs().max() > 0
    assert_starts(layer.starts(), before)
    layer.unfreeze_routing()
    said = run_steps(layer, [[x]])
    assert_starts(layer.starts(), by_hand(before, said, 0.97))


def test_frozen_map_ignores_learner_starts() -> None:
    layer = layer_with_a_lively_learner().eval()
    (x,) = batches(1)
    with learner_starts(layer):
        free = layer(x)
        layer.freeze_routing()
        assert not torch.allclose(layer(x), free)
        torch.testing.assert_close(layer(x), layer.to_dense()(x))


def test_frozen_direct_starts_take_no_step() -> None:
    layer = layer_with_a_lively_learner("direct")
    before, (x,) = snapshot(layer.starts()), batches(1)
    layer.freeze_routing()
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(x).square().mean().backward()
    optimiser.step()
    assert_starts(layer.starts(), before)
    layer.unfreeze_routing()
    layer(x).square().mean().backward()
    optimiser.step()
    assert apart(layer.starts(), before)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("index", ["learner", "direct", "fixed"])
def test_frozen_flag_is_part_of_the_state(index: str, frozen: bool) -> None:
    layer = layer_with_a_lively_learner(index)
    if frozen:
        layer.freeze_routing()
    state = nn.Sequential(layer).state_dict()
    assert bool(state["0.routing_map.frozen"]) is frozen
    twin = layer_with_a_lively_learner(index)
    twin.routing_map.freeze(not frozen)
    nn.Sequential(twin).load_state_dict(state)
    (x,) = batches(1)
    before = snapshot(twin.starts())
    y = twin.train()(x)
    torch.testing.assert_close(y, layer.train()(x))
    if index == "learner":
        assert apart(twin.starts(), before) is not frozen
    if index == "direct":
        assert twin.routing_map["out"].requires_grad is not frozen


@pytest.mark.parametrize("index", ["learner", "direct", "fixed"])
def test_snapping_goes_to_the_nearest_whole_position(index: str) -> None:
    layer = layer_with_a_lively_learner(index)
    layer.set_starts(
        {
            "out": torch.tensor([0.4, 3.6], dtype=torch.float64),  # 3.6 is nearer to 4, which is 0 on the circle
            "in": torch.tensor([1.6, 2.2], dtype=torch.float64),
            "spatial": torch.tensor([[0.7], [3.1]], dtype=torch.float64),
        }
    )
    before = layer.weight.detach().clone()
    layer.snap_routing()
    assert layer.starts()["out"].tolist() == [0.0, 0.0]
    assert layer.starts()["in"].tolist() == [2.0, 2.0]
    assert layer.starts()["spatial"].tolist() == [[1.0], [3.0]]
    assert bool(layer.state_dict()["routing_map.frozen"])
    assert not torch.allclose(layer.weight, before)
    (x,) = batches(1)
    torch.testing.assert_close(layer.train()(x), layer.to_dense()(x))
    assert layer.starts()["in"].tolist() == [2.0, 2.0]


def test_snapping_with_a_group_length_goes_to_multiples() -> None:
    layer = layer_with_a_lively_learner("direct", epitome_shape=(4, 4, 4, 3), group_length=2)
    layer.set_starts(
        {
            "out": torch.tensor([0.9, 1.2], dtype=torch.float64),
            "in": torch.tensor([2.9, 3.2], dtype=torch.float64),
            "spatial": torch.tensor([[0.9], [2.7]], dtype=torch.float64),
        }
    )
    layer.snap_routing()
    assert layer.starts()["out"].tolist() == [0.0, 2.0]
    assert layer.starts()["in"].tolist() == [2.0, 0.0]
    assert layer.starts()["spatial"].tolist() == [[1.0], [3.0]]


# ---- NaN ----


@pytest.mark.parametrize("index", ["learner", "direct", "fixed"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_starts_that_are_not_finite_name_the_layer(index: str, bad: float) -> None:
    layer = layer_with_a_lively_learner(index).eval()
    layer.qualified_name = "features.3.conv"
    (x,) = batches(1)
    layer(x)
    with torch.no_grad():
        layer.starts()["in"][1] = bad
    for use in (lambda: layer(x), lambda: layer.weight, layer.to_dense):
        with pytest.raises(EpitorchError, match=r"features\.3\.conv(?s:.*)'in'"):
            use()


def test_set_starts_refuses_nan_and_keeps_the_old_ones() -> None:
    layer = layer_with_a_lively_learner("fixed")
    layer.qualified_name = "stem"
    before = snapshot(layer.starts())
    with pytest.raises(EpitorchError, match="stem"):
        layer.set_starts({**before, "spatial": torch.full((2, 1), float("nan"))})
    assert_starts(layer.starts(), before)


def test_loading_nan_names_the_layer() -> None:
    model = nn.Sequential(layer_with_a_lively_learner("fixed"))
    state = dict(model.state_dict())
    state["0.routing_map.out_starts"] = torch.full((2,), float("nan"))
    before = snapshot(model[0].starts())
    with pytest.raises((EpitorchError, RuntimeError), match=r"0\.routing_map"):
        model.load_state_dict(state)
    assert_starts(model[0].starts(), before)


def test_a_diverged_step_does_not_spoil_the_map() -> None:
    layer = layer_with_a_lively_learner()
    before, (x,) = snapshot(layer.starts()), batches(1)
    with pytest.raises(StartsError, match="not a finite number"):
        layer.train()(x * float("nan"))
    assert_starts(layer.starts(), before)
    assert_starts(layer.starts(), by_hand(before, [], 0.97))
    said = [*run_steps(layer, [[x]]), *run_steps(layer, [[x]])]
    assert_starts(layer.starts(), by_hand(before, said, 0.97))
    nothing = {axis: torch.full_like(value, float("nan")) for axis, value in before.items()}
    kept = snapshot(layer.starts())
    layer.routing_map.update(nothing, torch.full_like(layer.routing_map._seen, 7.0))  # as where nothing is checked
    assert_starts(layer.starts(), kept)


@pytest.mark.parametrize("index", ["learner", "direct"])
def test_an_averaged_model_follows_the_flag(index: str) -> None:
    """AveragedModel copies buffers, not attributes: the copy must know that it is frozen, and that it is no more."""
    model = nn.Sequential(EpitomeConv2d(3, 8, 3, epitome_shape=(4, 3, 3, 3), index=index))
    averaged = AveragedModel(model)
    layer, copy = model[0], averaged.module[0]
    assert not copy.routing_map.is_frozen
    layer.freeze_routing()
    assert not copy.routing_map.is_frozen  # not yet
    averaged.update_parameters(model)
    assert copy.routing_map.is_frozen
    if index == "direct":
        assert not copy.routing_map["out"].requires_grad
    layer.unfreeze_routing()
    averaged.update_parameters(model)
    assert not copy.routing_map.is_frozen
