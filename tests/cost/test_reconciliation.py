"""The reconciliation page: what the script makes, and what the page says of it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("reconcile")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def made(script: Any) -> tuple[str, dict[str, Any]]:
    return script.report()


def test_the_committed_page_and_counts_are_what_the_script_makes(script: Any, made: tuple[str, dict[str, Any]]) -> None:
    page, counts = made
    assert (ROOT / "docs" / "reconciliation.md").read_text(encoding="utf-8") == page
    committed = json.loads((ROOT / "benchmarks" / "results" / "reconcile.json").read_text(encoding="utf-8"))
    assert committed["counts"] == counts
    assert set(committed["environment"]) >= {"torch", "torchvision", "fvcore", "python", "command"}


def test_check_notices_another_page(
    script: Any, made: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "report", lambda: made)
    monkeypatch.setattr(sys, "argv", ["reconcile.py", "--check"])
    assert script.main() == 0
    other = tmp_path / "page.md"
    other.write_text(made[0].replace("300,774,272", "300,774,273"), encoding="utf-8")
    monkeypatch.setattr(script, "PAGE_PATH", other)
    assert script.main() == 1


# ---- counts against ways that share nothing with `count` ----


def flops(model: nn.Module, size: int) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, 3, size, size, device="meta"))
    return counter.get_total_flops() // 2


def test_dense_rows_against_torchs_own_counter(script: Any, made: tuple[str, dict[str, Any]]) -> None:
    counts, networks = made[1], script.ours
    builders = {
        "imagenet dense": (lambda: torchvision.models.mobilenet_v2(weights=None), 224),
        "imagenet narrow 0.35": (lambda: networks.imagenet_narrow(0.35), 224),
        "width multiplier 0.5": (lambda: torchvision.models.mobilenet_v2(weights=None, width_mult=0.5), 224),
        "cifar dense with shortcuts": (script.guesses.WithShortcuts, 32),
        "b1 dense 240": (lambda: torchvision.models.efficientnet_b1(weights=None), 240),
    }
    for name, (build, size) in builders.items():
        with torch.device("meta"):
            model = build()
        assert counts[name]["madds"] == flops(model, size), name
        assert counts[name]["params"] == sum(p.numel() for p in model.parameters()), name


def test_epitome_rows_by_arithmetic(made: tuple[str, dict[str, Any]]) -> None:
    """Half of every expansion and projection, one start for each half of an axis; products halve, lerps come on top."""
    counts = made[1]
    with torch.device("meta"):
        model: Any = torchvision.models.efficientnet_b0(weights=None)
    params, madds, interpolation, side = counts["b0 dense 224"]["params"], counts["b0 dense 224"]["madds"], 0, 112
    blocks = [module for module in model.modules() if type(module).__name__ == "MBConv" and len(module.block) == 4]
    assert len(blocks) == 15
    for block in blocks:
        narrow, wide = block.block[0][0].in_channels, block.block[0][0].out_channels
        out, stride = block.block[3][0].out_channels, block.block[1][0].stride[0]
        params += 4 - wide * (narrow + out) // 2
        madds -= side**2 * wide * narrow // 2
        interpolation += 2 * side**2 * wide
        side //= stride
        madds -= side**2 * wide * out // 2
        interpolation += 2 * side**2 * wide
    assert (counts["b0 epitome 224"]["params"], counts["b0 epitome 224"]["interpolation"]) == (params, interpolation)
    assert counts["b0 epitome 224"]["madds"] == madds + interpolation


def test_cifar_rows_by_a_formula_of_their_own(script: Any, made: tuple[str, dict[str, Any]]) -> None:
    counts, guesses = made[1], script.guesses
    assert guesses.cifar_madds(guesses.OUR_STRIDES, 1.0) == counts["cifar dense"]["madds"] == 87_976_448
    assert guesses.cifar_madds(guesses.OUR_STRIDES, 0.18) == counts["cifar narrow 0.18"]["madds"] == 17_060_140
    assert guesses.cifar_madds((2, *guesses.OUR_STRIDES[1:]), 1.0) != counts["cifar dense"]["madds"]
    assert counts["cifar epitome 0.18"]["params"] == 493_312


# ---- what the text says ----


def test_efficientnet_rows_are_reproduced(script: Any, made: tuple[str, dict[str, Any]]) -> None:
    counts, printed = made[1], script.paper.EFFICIENTNET
    for variant in ("b0", "b1"):
        assert f"{counts[f'{variant} epitome 224']['params'] / 1e6:.2f}" == printed[variant].params
    assert f"{counts['b0 epitome 224']['madds'] / 1e6:.0f}" == printed["b0"].madds
    assert float(f"{counts['b1 epitome 224']['madds'] / 1e6:.1e}") == float(printed["b1"].madds)
    assert counts["b1 epitome 240"]["madds"] > counts["b0 dense 224"]["madds"]


def test_mobilenet_rows_are_not_but_the_cited_ones_are(script: Any, made: tuple[str, dict[str, Any]]) -> None:
    counts, paper = made[1], script.paper
    for width, row in paper.WIDTH_MULTIPLIER.items():
        mine = counts[f"width multiplier {width}"]
        assert (f"{mine['params'] / 1e6:.1f}", f"{mine['madds'] / 1e6:.0f}") == (row.params, row.madds)
    for c in script.WIDTHS:
        assert counts[f"imagenet narrow {c}"]["madds"] / 1e6 - float(paper.IMAGENET_NARROW[c].madds) > 17
        assert counts[f"imagenet epitome {c}"]["params"] / 1e6 - float(paper.IMAGENET_EPITOME[c].params) > 0.1


def test_the_search_for_left_out_layers_finds_what_was_left_out(script: Any) -> None:
    guesses = script.guesses
    parts = {
        c: guesses.by_group(script.ours.counted(lambda c=c: script.ours.imagenet_narrow(c), 64)) for c in (1.0, 0.5)
    }
    kept = tuple(name for name in guesses.GROUPS if name not in ("stem", "last"))
    rows = [(part, sum(part[name][1] for name in kept) / 1e6) for part in parts.values()]
    assert guesses.closest_subset(rows, 1) == guesses.Subset(kept, 0.0)
    assert guesses.closest_subset([(part, printed + 0.3) for part, printed in rows], 1).worst > 0.01


def test_the_search_for_strides_finds_them(script: Any) -> None:
    guesses = script.guesses
    planted = (2, 1, 2, 2, 1, 1, 2, 1)
    dense, narrow = (guesses.cifar_madds(planted, c) / 1e6 for c in (1.0, 0.18))
    assert guesses.closest_strides(dense, narrow)[1:] == (dense, narrow)


def test_claims_follow_from_the_printed_rows(
    script: Any, made: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = made[0]
    for recomputed in ("= +1.47", "225 / 301: -25.2%", "= +3.78", "93.52 / 26.8 = 3.49", "2.2 / 0.39 = 5.64", "-10.3%"):
        assert recomputed in page
    changed = replace(script.paper.LARGER_UPPER_LAYERS, top1="73.20")  # negative control
    monkeypatch.setattr(script.paper, "LARGER_UPPER_LAYERS", changed)
    claims = importlib.import_module("reconcile_claims").imagenet_claims()
    assert "= +1.40" in claims[0][1]
