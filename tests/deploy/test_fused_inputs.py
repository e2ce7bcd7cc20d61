"""What a fused stage refuses, and settings, modes and transforms of torch that must not change its result."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from fused_cases import Axis, Case
from torch import Tensor

from epitorch.deploy import _fused_native
from epitorch.deploy._fused_block import Settings, Stage, Taps
from epitorch.deploy._fused_native import NativeChain, native_available, native_problem, pack_native, runs_here
from epitorch.deploy._fused_op import fused_stage
from epitorch.deploy.fused import FusedChain, FusedConv, FusedInvertedResidual
from epitorch.errors import ShapeError

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


def relative(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max())


def float_module() -> FusedInvertedResidual:
    return FusedInvertedResidual(CASE.stage().map(lambda value: value.float())).eval()


# ---- what does not fit ----


def chain_of_two() -> FusedChain:
    stem = Stage(Settings("stem", 2, 1), torch.randn(8, 3, 3, 3), torch.randn(8))
    return FusedChain(FusedConv(stem), float_module()).eval()


@pytest.mark.parametrize("shape", [(2, 4, 9, 11), (2, 80, 9, 11), (2, 1, 9, 11), (8, 9, 11), (8, 9), (1, 2, 8, 9, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_input_of_another_shape_is_refused(shape: tuple[int, ...], dtype: torch.dtype, compiled: bool) -> None:
    x = torch.randn(shape, dtype=dtype)
    stage = CASE.stage().map(lambda value: value.to(dtype))
    if compiled:
        with pytest.raises(ShapeError, match="expected: 8 channels") as caught:
            fused_stage(x, stage.tensors(), [], stage.settings.encode())
        assert str(tuple(shape)) in str(caught.value)
        return
    for module in (float_module().to(dtype), FusedChain(float_module()).eval().to(dtype)):
        with pytest.raises(ShapeError, match="expected: 8 channels"):
            module(x)
        assert module(torch.randn(2, 8, 9, 11, dtype=dtype)).shape == (2, 8, 9, 11)


def test_a_chain_looks_at_its_first_stage() -> None:
    chain = chain_of_two()
    assert chain(torch.randn(1, 3, 9, 9)).shape == (1, 8, 5, 5)
    with pytest.raises(ShapeError, match="expected: 3 channels"):
        chain(torch.randn(1, 8, 9, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_image_smaller_than_the_window_is_refused(dtype: torch.dtype) -> None:
    case = replace(CASE, padding=0, stride=2)
    module = FusedInvertedResidual(case.stage().map(lambda value: value.to(dtype)))
    for net in (module, FusedChain(module)):
        assert net(torch.randn(1, 8, 3, 3, dtype=dtype)).shape == (1, 8, 1, 1)
        with pytest.raises(ShapeError, match="at least 3 x 3"):
            net(torch.randn(1, 8, 2, 2, dtype=dtype))


@native
@pytest.mark.parametrize("number", range(7))
def test_a_packing_of_another_stage_is_refused(number: int) -> None:
    stage = CASE.stage().map(lambda value: value.float())
    packed = pack_native(stage)
    NativeChain([stage], [packed])
    packed[number] = packed[number].flatten()[:-1] if number != 1 else packed[1] // 2
    with pytest.raises(ShapeError, match="packed"):
        NativeChain([stage], [packed])


@native
def test_stages_that_do_not_follow_each_other_are_refused() -> None:
    stages = [Stage(Settings("pointwise"), torch.randn(20, n), torch.randn(20)) for n in (20, 7)]
    packed = [pack_native(stage) for stage in stages]
    with pytest.raises(ShapeError, match="from stage to stage"):
        NativeChain(stages, packed)
    assert NativeChain(stages[:1], packed[:1])(torch.randn(1, 20, 2, 2)).shape == (1, 20, 2, 2)


def test_a_state_with_taps_off_the_circle_is_refused() -> None:
    module = float_module()
    state = module.state_dict()
    state["tensor_3"] = state["tensor_3"] + 12
    with pytest.raises(ShapeError, match="taps_in are not on their circle"):
        module.load_state_dict(state)


@native
def test_a_packing_from_a_wider_processor_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = float_module(), CASE.input().float()
    lanes, expected, stored = int(module._packed[1]), module(x), pickle.dumps(module)
    if lanes == 4:
        pytest.skip("this processor has the narrowest vectors")
    assert int(pickle.loads(stored)._packed[1]) == lanes
    monkeypatch.setattr(_fused_native, "instruction_set", lambda: "portable")
    narrow = pickle.loads(stored)
    assert int(narrow._packed[1]) == 4
    assert relative(expected, narrow(x)) < 1e-5
    assert not runs_here(module._packed)
    operated = fused_stage(x, module.stage.tensors(), module._packed, module.settings.encode())
    assert relative(expected, operated) < 1e-5


# ---- settings and modes of torch ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    stage, x = CASE.stage().map(lambda value: value.float()), CASE.input().float()
    expected = FusedChain(FusedInvertedResidual(stage))(x)
    try:
        torch.set_default_dtype(dtype)
        for net in (FusedInvertedResidual(stage), FusedChain(FusedInvertedResidual(stage))):
            got = net(x)
            assert got.dtype == torch.float32
            assert torch.equal(got, expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert relative(expected, FusedInvertedResidual(stage)(x + 0.1)) > 1e-3


def test_the_default_device_changes_nothing() -> None:
    stage, x = CASE.stage().map(lambda value: value.float()), CASE.input().float()
    expected = FusedChain(FusedInvertedResidual(stage))(x)
    with torch.device("meta"):
        got = FusedChain(FusedInvertedResidual(stage))(x)
        identity = Taps.identity(3).lower
    assert got.device.type == identity.device.type == "cpu"
    assert torch.equal(got, expected)


def test_on_the_meta_device_there_are_only_shapes() -> None:
    module = float_module().to("meta")
    assert module(torch.empty(2, 8, 9, 11, device="meta")).shape == (2, 8, 9, 11)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_computes_the_same() -> None:
    chain, x = FusedChain(float_module(), float_module()).eval(), CASE.input().float()
    with torch.no_grad():
        traced = torch.jit.trace(chain, (torch.zeros_like(x),))
        assert relative(chain(x), traced(x)) < 1e-5
        assert relative(chain(x), traced(x + 0.1)) > 1e-3


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_transforms_go_through_torch() -> None:
    chain, x = FusedChain(float_module(), float_module()).eval(), CASE.input().float()
    with torch.no_grad():
        expected = chain(x)
        mapped = torch.func.vmap(lambda one: chain(one[None])[0])(x)
        assert relative(expected, mapped) < 1e-5
        tangent = torch.randn_like(x)
        value, got = torch.func.jvp(chain, (x,), (tangent,))
        assert relative(expected, value) < 1e-5
    exact = FusedChain(*(FusedInvertedResidual(CASE.stage()) for _ in range(2)))
    _, slope = torch.func.jvp(exact, (CASE.input(),), (tangent.double(),))
    assert relative(slope, got.double()) < 1e-3
    functional = torch.func.functional_call(chain, dict(chain.state_dict()), (x,))
    assert relative(expected, functional) < 1e-5


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_forward_mode_gradients() -> None:
    forward_ad = torch.autograd.forward_ad
    chain, x = FusedChain(float_module()).eval(), CASE.input().float()
    with torch.no_grad(), forward_ad.dual_level():
        assert forward_ad.unpack_dual(chain(forward_ad.make_dual(x, torch.ones_like(x)))).tangent is not None


def test_counters_see_torchs_operators() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    chain, x = FusedChain(float_module()).eval(), CASE.input().float()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        chain(x)
    assert counter.get_total_flops() > 0


def test_tensors_whose_memory_holds_something_else() -> None:
    chain, x = FusedChain(float_module()).eval(), CASE.input().float()
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    with torch.no_grad():
        assert relative(chain(-x), chain(negative)) < 1e-5
        assert relative(chain(torch.zeros_like(x)), chain(torch._efficientzerotensor(x.shape))) < 1e-5
