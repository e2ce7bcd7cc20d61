"""Laying out keeps what shares memory, goes by axes and not by sizes, and gives the network back where it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_layout import EXACT, Residual, assert_same, images, randomised, reused, small
from torch import Tensor, nn

from epitorch.deploy import _layout, lay_out
from epitorch.deploy._layout_graph import affine_of
from epitorch.errors import InputError


class Shared(nn.Module):
    """`way` passes on its input, which is changed in place afterwards and read by a second layer."""

    def __init__(self, way: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.third = nn.Conv2d(3, 8, 1), small(), small(), small()
        self.way, self.change = way, change

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.stem(x))
        changed = self.change(self.way(h))
        return self.second(changed) + self.third(h)


class CalledTwice(nn.Module):
    """One in-place activation: on what nothing else reads, and on what is read later. It starts with either."""

    def __init__(self, later_first: bool) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.third = nn.Conv2d(3, 8, 1), small(), small(), small()
        self.relu, self.later_first = nn.ReLU(inplace=True), later_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.stem(x))
        if self.later_first:
            return self.third(self.relu(self.second(self.relu(h)) + h))
        return self.third(self.relu(self.second(h))) + self.second(self.relu(h)) * h


def plus_one(x: Tensor) -> Tensor:
    x += 1
    return x


def half_changed(x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    first += 1
    return torch.cat([first, second], 1)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "dropout": nn.Dropout(),
    "dropout function": lambda x: nn.functional.dropout(x, training=False),
    "identity": nn.Identity(),
    "contiguous": lambda x: x.contiguous(),
    "view": lambda x: x.view(x.shape),
    "slice": lambda x: x[:, :],
    "dropout of identity": nn.Sequential(nn.Identity(), nn.Dropout()),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "add": plus_one,
    "part": half_changed,
    "method": lambda x: x.relu_(),
    "unknown method": lambda x: x.sigmoid_(),
    "keyword": lambda x: nn.functional.silu(x, inplace=True),
    "position": lambda x: nn.functional.relu(x, True),
    "module": nn.ReLU(inplace=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_place_is_seen_by_all_who_share_the_memory(way: str, change: str) -> None:
    laid_out = assert_same(randomised(Shared(WAYS[way], CHANGES[change]), 4), images())
    assert laid_out.layout.refused is None
    assert len(laid_out.layout.layers) == 3


@pytest.mark.parametrize("later_first", [True, False])
def test_one_activation_in_place_and_out_of_place(later_first: bool) -> None:
    assert assert_same(randomised(CalledTwice(later_first), 4), images()).layout.refused is None


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer = nn.Conv2d(3, 8, 1), small()

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.layer(self.stem(x))


def test_a_model_that_writes_into_its_input() -> None:
    net, x = randomised(WritesIntoItsInput(), 2), images()
    laid_out = lay_out(reused(net), x)
    assert laid_out.layout.refused is None
    torch.testing.assert_close(x, images(), atol=0, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(laid_out(images(1)), net(images(1)), **EXACT)
        laid_out(x)
    torch.testing.assert_close(x, images() + 1, atol=0, rtol=0)  # as the network does


AXES: dict[str, Any] = {"(1, 2)": (1, 2), "(-3, -2)": (-3, -2), "(2, 3)": (2, 3), "(-1, 2)": (-1, 2), "1": 1}


@pytest.mark.parametrize("mean", AXES)
def test_a_mean_is_known_by_its_axes(mean: str) -> None:
    """Eight channels on eight columns: the sizes do not tell which axes are left."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layer = nn.Conv2d(3, 8, 1), small()
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.stem(x)).mean(AXES[mean]))

    assert assert_same(randomised(Mean(), 3), images()).layout.refused is None


def test_a_rewritten_network_that_differs_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    net = randomised(Residual(16, (8, 8), "whole", 1), 1)
    deployed = reused(net)
    monkeypatch.setattr(_layout, "affine_of", lambda norm: tuple(2 * value for value in affine_of(norm)))
    laid_out = lay_out(deployed, images())
    assert laid_out is not deployed
    assert "the rewritten network is not the same: ParityError" in str(laid_out.layout.refused)
    assert laid_out.layout.kept == ("first", "second", "third")
    with torch.no_grad():
        torch.testing.assert_close(laid_out(images()), net(images()), **EXACT)
    monkeypatch.setattr(_layout, "emit_layer", lambda *_: 1 / 0)
    assert "cannot be rewritten: ZeroDivisionError" in str(lay_out(deployed, images()).layout.refused)


@pytest.mark.parametrize(
    ("net", "example", "words"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1)), torch.randn(1, 3, 4, 4), "call net.eval()"),
        (nn.Sequential(nn.Conv2d(3, 4, 1).train()).train(False).append(nn.Dropout()), torch.randn(1, 3, 4, 4), "'1'"),
        (3, torch.randn(1, 3, 4, 4), "this is no model"),
        (nn.Identity().eval(), (1,), "example_input holds no tensor"),
    ],
)
def test_what_cannot_be_laid_out(net: Any, example: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        lay_out(net, example)
