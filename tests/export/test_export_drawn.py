"""Layers drawn at random: every file computes what the trained layer computes, and stays small.

In a usual run a few examples; `EPITORCH_EXPORT_EXAMPLES=500` for many.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import epitorch
from epitorch.errors import ExportError, InputError
from epitorch.export._onnx import run_onnx
from epitorch.export._openvino import run_openvino
from reuse_cases import KINDS, Case, cases

EXAMPLES = int(os.environ.get("EPITORCH_EXPORT_EXAMPLES", "6"))
RUN = {"onnx": run_onnx, "openvino": run_openvino}
KIB = 1024

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def relative(expected: Tensor, got: Tensor) -> float:
    return float((expected - got.double()).abs().max() / expected.abs().max().clamp_min(1e-6))


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Case, str, Any]:
    """One layer of any kind, a target and a strategy."""
    case = draw(cases(draw(st.sampled_from(KINDS))))
    sample = (max(1, case.shape[0]), *case.shape[1:])
    target = draw(st.sampled_from(sorted(RUN)))
    return replace(case, shape=sample), target, draw(st.sampled_from(["dense", "reuse", "size", "size"]))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(one=drawn())
def test_a_drawn_layer_in_its_runtime(tmp_path: Path, one: tuple[Case, str, Any]) -> None:
    case, target, strategy = one
    layer, x = case.layer(torch.float32), case.input(torch.float32)
    with torch.no_grad():
        try:
            expected = copy.deepcopy(layer).double()(x.double())
        except RuntimeError:  # torch has no such padding for such an input
            assume(False)
    assume(bool(expected.numel() and expected.abs().max() > 1e-3))
    path = tmp_path / ("layer.onnx" if target == "onnx" else "layer.xml")
    for old in tmp_path.iterdir():
        old.unlink()
    report, refusal = exported(layer, x, target, path, strategy)
    if report is None:  # refused, never wrong, and nothing is left behind
        assert not any(tmp_path.iterdir())
        assert not runs_everywhere(case), refusal
        return
    ((got,),) = RUN[target](path, [(x,)])
    assert got.shape == expected.shape
    assert relative(expected, got) < 1e-4
    assert relative(expected, got * 1.001 + 1e-3 * expected.abs().max()) > 1e-4  # the comparison can fail
    if strategy == "size":
        stored = 4 * epitorch.count(nn.Sequential(layer), x).params
        size = report.bytes if target == "onnx" else path.with_suffix(".bin").stat().st_size
        room = 68 * KIB if target == "onnx" else 4 * KIB  # of .xml there is no claim
        assert size <= 1.03 * stored + room, (size, stored)


def exported(layer: nn.Module, x: Tensor, target: Any, path: Path, strategy: Any) -> tuple[Any, str]:
    """The report, or None and what the refusal says."""
    try:
        return epitorch.export(nn.Sequential(layer), x, target, path, strategy=strategy), ""
    except (ExportError, InputError) as error:
        return None, str(error)


def runs_everywhere(case: Case) -> bool:
    """What both runtimes take, whatever the epitome is."""
    return case.kind in ("Linear", "Conv1d", "Conv2d") and case.options.get("padding_mode", "zeros") == "zeros"
