"""The fused stage against literal loops, natively and by torch's operators; the operator; the chain."""

from __future__ import annotations

import copy
import io
import os
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_cases import Axis, Case, cases
from hypothesis import given, settings
from torch import Tensor, nn

from epitorch.deploy import _fused_native
from epitorch.deploy._fused_block import ACTIVATIONS, Settings, Stage, Taps
from epitorch.deploy._fused_native import LANES, NativeChain, pack_native, usable, why_not_native
from epitorch.deploy._fused_op import packed_for
from epitorch.deploy._fused_reference import run_reference
from epitorch.deploy.fused import (
    FusedChain,
    FusedConv,
    FusedInvertedResidual,
    instruction_set,
    native_available,
    native_problem,
)

EXAMPLES = int(os.environ.get("EPITORCH_EXAMPLES", "60"))
native = pytest.mark.skipif(not native_available(), reason=native_problem() or "there")
CASE = Case(
    (8, 48, 8),
    Axis((0.3, 5.5, 11.25, 2.0), 12, 12, 1),
    Axis((4.75, 0.5, 8.0, 10.5), 12, 12, 1),
    3,
    1,
    1,
    ("relu6", "relu6", "identity"),
    (2, 9, 11),
    0,
)
SQUEEZED = replace(CASE, activations=("silu", "silu", "identity"), squeeze=(5, "relu", "sigmoid"))


def runnable() -> list[Any]:
    """Instruction sets that this processor has."""
    widest = LANES[instruction_set() or "portable"]
    return [name for name, lanes in LANES.items() if lanes <= widest]


def relative(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max().clamp_min(1e-3)) if expected.numel() else 0.0


def run_native(stage: Stage, x: Tensor, name: Any) -> Tensor:
    stage = stage.map(lambda value: value.float())
    return NativeChain([stage], [pack_native(stage, name)])(x.float())


@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases())
def test_every_way_equals_the_loops(case: Case) -> None:
    stage, x = case.stage(), case.input()
    expected = case.expected(stage)
    assert run_reference(stage, x).shape == expected.shape
    torch.testing.assert_close(run_reference(stage, x), expected)
    module = FusedInvertedResidual(stage.map(lambda value: value.float()))
    with torch.no_grad():
        assert relative(expected, module(x.float())) < 1e-4
    for name in runnable() if native_available() else []:
        got = run_native(stage, x, name)
        assert got.shape == expected.shape
        assert relative(expected, got) < 1e-4, name


@pytest.mark.parametrize("case", [CASE, SQUEEZED], ids=["plain", "squeezed"])
@pytest.mark.parametrize("name", [*LANES, "torch"])
def test_a_perturbed_tensor_changes_the_output(name: Any, case: Case) -> None:
    if name != "torch" and (not native_available() or name not in runnable()):
        pytest.skip("no kernel for it here")
    stage, x = case.stage(), case.input()

    def run(stage: Stage) -> Tensor:
        return run_reference(stage, x) if name == "torch" else run_native(stage, x, name).double()

    expected = run(stage)
    assert relative(case.expected(stage), expected) < 1e-4
    for number in range(len(stage.tensors())):
        tensors = [value.clone() for value in stage.tensors()]
        if tensors[number].is_floating_point():
            tensors[number] = tensors[number] * 0.9 + 0.01
        else:
            tensors[number] = (tensors[number] + 1) % 12
        changed = Stage.of(tensors, stage.settings.encode())
        assert relative(expected, run(changed)) > 1e-3, number


@native
@pytest.mark.parametrize("case", [CASE, SQUEEZED], ids=["plain", "squeezed"])
def test_not_a_number_comes_through_and_stays_in_its_image(case: Case) -> None:
    stage = case.stage().map(lambda value: value.float())
    x = case.input().float()
    broken = x.clone()
    broken[0, 3, 4, 5] = float("nan")
    for name in runnable():
        clean, got = run_native(stage, x, name), run_native(stage, broken, name)
        assert torch.equal(got[0].isnan().any(0), run_reference(stage, broken)[0].isnan().any(0))
        assert torch.equal(got[1], clean[1])
        assert torch.equal(run_native(stage, x, name), clean)  # nothing of it is left in the kernel's memory


@native
def test_threads_and_layouts_do_not_change_the_result() -> None:
    stage = CASE.stage().map(lambda value: value.float())
    x = torch.randn(5, 8, 9, 11)
    chain = NativeChain([stage], [pack_native(stage)])
    one = chain(x)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = chain(x.to(memory_format=torch.channels_last))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, three)
    assert one.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(chain(x.expand(5, 8, 9, 11).transpose(2, 3).contiguous().transpose(2, 3)), one)


@pytest.mark.parametrize("end", ACTIVATIONS)
def test_plain_convolutions(end: Any) -> None:
    stem = Stage(Settings("stem", 2, 1, ("identity", "identity", end)), torch.randn(20, 3, 3, 3), torch.randn(20))
    last = Stage(Settings("pointwise", 1, 0, ("identity", "identity", end)), torch.randn(37, 20), torch.randn(37))
    x = torch.randn(2, 3, 13, 10)
    expected = run_reference(last, run_reference(stem, x))
    chain = FusedChain(FusedConv(stem), FusedConv(last)).eval()
    assert relative(expected, chain(x)) < 1e-5
    assert relative(expected, chain(x.contiguous(memory_format=torch.channels_last))) < 1e-5
    assert relative(expected, chain(x + 0.1)) > 1e-3
    for name in runnable() if native_available() else []:
        got = NativeChain([stem, last], [pack_native(stem, name), pack_native(last, name)])(x)
        assert relative(expected, got) < 1e-5


# ---- the module ----


def float_module() -> FusedInvertedResidual:
    return FusedInvertedResidual(CASE.stage().map(lambda value: value.float())).eval()


def test_gradients_go_through_torch() -> None:
    module, x = float_module(), CASE.input().float().requires_grad_()
    module(x).square().sum().backward()
    assert x.grad is not None
    exact = CASE.input().requires_grad_()
    run_reference(CASE.stage(), exact).square().sum().backward()
    assert exact.grad is not None
    assert relative(exact.grad, x.grad) < 1e-4


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.bfloat16, 0.1)])
def test_other_dtypes_run_by_torch(dtype: torch.dtype, tolerance: float) -> None:
    module, x = float_module(), CASE.input()
    expected = run_reference(CASE.stage(), x)
    module.to(dtype)
    assert not usable(x.to(dtype))
    got = module(x.to(dtype))
    assert got.dtype == dtype
    assert relative(expected, got.double()) < tolerance
    assert relative(expected, module.float()(x.float()).double()) < tolerance


def test_a_state_that_is_loaded_is_used() -> None:
    module, x = float_module(), CASE.input().float()
    chain = FusedChain(module).eval()
    before = chain(x)
    changed = {name: value * 0.9 if value.is_floating_point() else value for name, value in module.state_dict().items()}
    module.load_state_dict(changed)
    assert relative(before, chain(x)) > 1e-3
    assert relative(run_reference(module.stage, x), chain(x)) < 1e-5
    assert torch.equal(chain(x), module(x))


def test_copies_pickles_and_moves() -> None:
    module, x = float_module(), CASE.input().float()
    expected = module(x)
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(FusedChain(module))),
        torch.load(stored, weights_only=False),
    ]
    assert all(torch.equal(other(x), expected) for other in copies)
    module.tensor_0.mul_(2)
    module.refresh()
    assert relative(expected, module(x)) > 1e-3
    assert torch.equal(copies[0](x), expected)
    assert "8, 8, kernel_size=3, stride=1" in repr(module)


def test_export_keeps_it_as_one_operator() -> None:
    chain, x = FusedChain(float_module(), float_module()).eval(), CASE.input().float()
    with torch.no_grad():
        expected = chain(x)
        batch = torch.export.Dim("batch", min=1, max=8)
        program = torch.export.export(chain, (x,), dynamic_shapes=({0: batch},))
        called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert called == ["epitorch.fused_stage.default"] * 2
        assert torch.equal(program.module()(x), expected)
        assert torch.equal(program.module()(x[:1]), expected[:1])


def test_compile_takes_it_whole() -> None:
    chain, x = FusedChain(float_module(), float_module()).eval(), CASE.input().float()
    with torch.no_grad():
        compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), chain(x))
        assert relative(chain(x), compiled(x + 0.1)) > 1e-3


@pytest.mark.parametrize("case", [CASE, SQUEEZED], ids=["plain", "squeezed"])
def test_symbolic_trace_keeps_it_as_one_operator(case: Case) -> None:
    module = FusedInvertedResidual(case.stage().map(lambda value: value.float())).eval()
    chain, x = FusedChain(module, nn.ReLU(), module).eval(), case.input().float()
    traced = torch.fx.symbolic_trace(chain)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert called == ["epitorch.fused_stage.default"] * 2
    with torch.no_grad():
        expected = chain(x)
        assert relative(expected, traced(x)) < 1e-6
        assert relative(expected, traced.double()(x.double())) < 1e-4
        assert relative(expected, traced(x.double() + 0.1)) > 1e-3
        assert traced.to("meta")(x.to("meta")).shape == expected.shape


def test_a_packing_for_another_kernel_is_not_used() -> None:
    module, x = float_module(), CASE.input().float()
    assert packed_for(x, module._packed) == native_available()
    assert not packed_for(x, [value.to("meta") for value in module._packed])
    assert not packed_for(x, [torch.zeros(1)])


@pytest.mark.filterwarnings("ignore")
def test_onnx_gets_plain_operators(tmp_path: Any) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    chain, x = FusedChain(float_module()).eval(), CASE.input().float()
    path = str(tmp_path / "chain.onnx")
    torch.onnx.export(chain, (x,), path, dynamo=True, verbose=False)
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert relative(chain(x), torch.from_numpy(got)) < 1e-5


def test_the_operator_follows_torchs_rules() -> None:
    stage = CASE.stage().map(lambda value: value.float())
    arguments = (CASE.input().float(), stage.tensors(), [], stage.settings.encode())
    checks = ("test_schema", "test_faketensor")
    done = torch.library.opcheck(torch.ops.epitorch.fused_stage.default, arguments, test_utils=checks)
    assert set(done.values()) == {"SUCCESS"}


# ---- without the kernel ----


def test_without_the_library_torch_does_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    expected = float_module()(CASE.input().float())
    monkeypatch.setattr(_fused_native, "LIBRARY", tmp_path / "_fused.so")
    _fused_native._library.cache_clear()
    try:
        assert not native_available()
        assert "_fused.so is missing" in native_problem()
        assert instruction_set() is None
        module = float_module()
        assert module._packed == []
        assert relative(expected, module(CASE.input().float())) < 1e-5
        (tmp_path / "_fused.so").write_text("no library")
        _fused_native._library.cache_clear()
        assert "does not load" in native_problem()
    finally:
        monkeypatch.undo()
        _fused_native._library.cache_clear()


def test_what_the_kernel_cannot_do_is_said() -> None:
    kept = CASE.stage()
    assert why_not_native(kept) == ""
    weight = torch.randn(48, 1, 9, 9)
    odd = Stage(kept.settings, kept.project, kept.bias, *[getattr(kept, n) for n in ("expand", "taps_in", "scale")])
    odd = Stage(**(odd.__dict__ | {"depthwise": weight}))
    assert "depthwise kernel 9" in why_not_native(odd)


def test_taps_wrap_around_the_circle() -> None:
    taps = Taps(torch.tensor([0, 4, 3]), torch.tensor([0.5, 0.5, 0.0]), 6, 2)
    assert taps.upper.tolist() == [2, 0, 5]
