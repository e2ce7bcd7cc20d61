"""The Triton kernel in Triton's interpreter, on the CPU: against literal loops and torch's operators.

The interpreter is chosen when Triton is imported, so the cases run in a process of their own: this file again.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_cases import Axis, Case, cases
from hypothesis import given, settings
from torch import Tensor, nn

from epitorch.deploy import _fused_op, _fused_triton, fused
from epitorch.deploy._fused_block import ACTIVATIONS, Settings, Stage, Taps
from epitorch.deploy._fused_reference import run_reference
from epitorch.deploy._fused_triton import (
    TILES,
    Tile,
    block_size,
    kernel_arguments,
    pack_triton,
    run_triton,
    usable_triton,
    why_not_triton,
)
from epitorch.deploy.fused import FusedChain, FusedConv, FusedInvertedResidual
from epitorch.errors import ShapeError

EXAMPLES = int(os.environ.get("EPITORCH_EXAMPLES", "60")) // 5
SMALL = Tile(2, 3)
missing = importlib.util.find_spec("triton") is None
interpreted = os.environ.get("TRITON_INTERPRET") == "1" and not missing
inside = pytest.mark.skipif(not interpreted, reason="runs in the process that test_in_the_interpreter starts")
outside = pytest.mark.skipif(interpreted, reason="the other half of this file")
CASE = Case(
    (8, 48, 8),
    Axis((0.3, 5.5, 11.25, 2.0), 12, 12, 1),
    Axis((4.75, 0.5, 8.0, 10.5), 12, 12, 1),
    3,
    1,
    1,
    ("relu6", "relu6", "identity"),
    (2, 3, 5),
    0,
)
WHOLE = Axis((3.0, 5.0, 8.0, 1.0), 12, 12, 1)
GROUPS = Axis((3.0, 9.5, 8.0, 1.0), 12, 12, 4)
ONE = Axis((0.5, 0.25), 1, 1, 1)
SHORT = Axis((0.5, 1.25, 2.0, 6.5, 3.75, 0.0, 5.5), 11, 7, 1)  # blocks of 7 on a circle of 11, the last one cut
VARIANTS = {
    "fractional": CASE,
    "batch 1": replace(CASE, shape=(1, 3, 5)),
    "batch 3": replace(CASE, shape=(3, 7, 5)),
    "whole starts": replace(CASE, filters=WHOLE, inputs=WHOLE),
    "whole filters": replace(CASE, filters=WHOLE),
    "whole inputs": replace(CASE, inputs=WHOLE),
    "groups": replace(CASE, filters=GROUPS, inputs=GROUPS),
    "short blocks": replace(CASE, filters=SHORT, inputs=SHORT),
    "one channel": replace(CASE, filters=ONE, inputs=ONE, channels=(8, 2, 8)),
    "no first 1x1": replace(CASE, channels=(48, 48, 8), filters=None),
    "plain last 1x1": replace(CASE, inputs=Axis(None, 48, 1, 1)),
    "stride 2": replace(CASE, stride=2),
    "5x5": replace(CASE, kernel=5, padding=2, stride=2),
    "7x7": replace(CASE, kernel=7, padding=3),
    "no padding": replace(CASE, padding=0),
    "one pixel": replace(CASE, shape=(2, 1, 1)),
    "activation at the end": replace(CASE, activations=("silu", "hardswish", "relu")),
    "many lanes": replace(
        CASE,
        channels=(8, 300, 8),
        filters=Axis((10.5, 99.25), 150, 150, 1),
        inputs=Axis((0.25, 77.0), 150, 150, 1),
        shape=(1, 3, 3),
    ),
}  # fmt: skip


def relative(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max().clamp_min(1e-3)) if expected.numel() else 0.0


def run(stage: Stage, x: Tensor, tile: Tile | None = SMALL, dtype: torch.dtype = torch.float32) -> Tensor:
    stage, x = stage.map(lambda value: value.to(dtype)), x.to(dtype)
    got = run_triton(stage, pack_triton(stage), x, tile)
    assert got.dtype == dtype
    return got.double()


@outside
@pytest.mark.skipif(missing, reason="Triton is not installed")
def test_in_the_interpreter() -> None:
    options = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    environment, root = os.environ | {"TRITON_INTERPRET": "1"}, Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > len(VARIANTS)


@inside
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_the_loops(name: str) -> None:
    case = VARIANTS[name]
    stage, x = case.stage(), case.input()
    expected = case.expected(stage)
    got = run(stage, x)
    assert got.shape == expected.shape
    assert relative(expected, got) < 1e-5


@inside
@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases(squeezed=False))  # which the kernel leaves to torch
def test_random_stages_equal_the_loops(case: Case) -> None:
    stage, x = case.stage(), case.input()
    got = run(stage, x)
    expected = case.expected(stage)
    assert got.shape == expected.shape
    assert relative(expected, got) < 1e-4


@inside
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", ["fractional", "whole starts", "stride 2"])
def test_tiles_do_not_change_the_result(name: str, tile: Tile) -> None:
    stage, x = VARIANTS[name].stage(), VARIANTS[name].input()
    assert relative(run_reference(stage, x), run(stage, x, tile)) < 1e-5


@inside
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", ["fractional", "groups", "stride 2", "no first 1x1"])
def test_half_precision_is_as_near_as_torchs(name: str, dtype: torch.dtype, tolerance: float) -> None:
    stage, x = VARIANTS[name].stage(), VARIANTS[name].input()
    expected = run_reference(stage, x)
    got = relative(expected, run(stage, x, dtype=dtype))
    plain = relative(expected, run_reference(stage.map(lambda v: v.to(dtype)), x.to(dtype)).double())
    assert got < tolerance
    assert got < 1.5 * plain  # sums in float32 lose less than torch's operators one by one


@inside
def test_a_perturbed_tensor_changes_the_output() -> None:
    stage, x = CASE.stage(), CASE.input()
    expected = run(stage, x)
    for number in range(len(stage.tensors())):
        tensors = [value.clone() for value in stage.tensors()]
        whole = not tensors[number].is_floating_point()
        tensors[number] = (tensors[number] + 1) % 12 if whole else tensors[number] * 0.9 + 0.01
        changed = Stage.of(tensors, stage.settings.encode())
        assert relative(expected, run(changed, x)) > 1e-3, number


@inside
def test_not_a_number_stays_in_its_image() -> None:
    stage, x = CASE.stage(), CASE.input()
    clean, broken = run(stage, x), x.clone()
    broken[0, 3, 1, 1] = float("nan")
    got = run(stage, broken)
    assert torch.equal(got[0].isnan().any(0), run_reference(stage, broken)[0].isnan().any(0))
    assert got[0].isnan().any(0).sum() == 9
    assert torch.equal(got[1], clean[1])


@inside
def test_memory_layouts_do_not_change_the_result() -> None:
    stage, x = CASE.stage(), CASE.input()
    got = run(stage, x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(run(stage, x), got)
    assert torch.equal(run(stage, x.transpose(2, 3).contiguous().transpose(2, 3)), got)
    like = stage.map(lambda value: value.float())
    y = run_triton(like, pack_triton(like), x.float(), SMALL)
    assert y.is_contiguous(memory_format=torch.channels_last)


@inside
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: Any) -> None:
    case = replace(CASE, activations=(name, name, name))
    stage, x = case.stage(), case.input()
    assert relative(run_reference(stage, x), run(stage, x)) < 1e-5


def as_on_a_gpu(patch: pytest.MonkeyPatch, net: nn.Module) -> None:
    """Let modules on the CPU take the way of those on a GPU."""
    for place in (fused, _fused_op):
        patch.setattr(place, "usable", lambda _: False)
        patch.setattr(place, "usable_triton", lambda _: True)
        patch.setattr(place, "packed_for", lambda _, packed: bool(packed))
    for module in net.modules():
        if isinstance(module, FusedInvertedResidual):
            module._packed = pack_triton(module.stage)
        elif isinstance(module, FusedConv):
            module._packed = []


@inside
def test_the_module_and_the_operator_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = CASE.stage().map(lambda value: value.float())
    last = Stage(Settings("pointwise"), torch.randn(5, 8), torch.randn(5))
    chain, x = FusedChain(FusedInvertedResidual(stage), FusedConv(last)).eval(), CASE.input().float()
    expected = run_reference(last, run_reference(stage, x))
    calls: list[Any] = []
    as_on_a_gpu(monkeypatch, chain)
    for place in (fused, _fused_op):
        monkeypatch.setattr(place, "run_triton", lambda *a: calls.append(a) or run_triton(*a))
    with torch.no_grad():
        assert relative(expected, chain(x)) < 1e-5
        assert len(calls) == 1
        compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
        assert relative(expected, compiled(x)) < 1e-5
    assert len(calls) == 2


@inside
@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (2, 16, 3, 5), (8, 3, 5)])
def test_an_input_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    stage = CASE.stage().map(lambda value: value.float())
    packed = pack_triton(stage)
    with pytest.raises(ShapeError, match="expected: 8 channels"):
        run_triton(stage, packed, torch.randn(shape), SMALL)
    assert run_triton(stage, packed, torch.randn(2, 8, 3, 5), SMALL).shape == (2, 8, 3, 5)


@inside
def test_settings_of_torch_change_nothing() -> None:
    stage, x = CASE.stage().map(lambda value: value.float()), CASE.input().float()
    expected = run_triton(stage, pack_triton(stage), x, SMALL)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            packed = pack_triton(stage)
        got = run_triton(stage, packed, x, SMALL)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    assert relative(expected, run_triton(stage, packed, x + 0.1, SMALL)) > 1e-3


# ---- without the interpreter ----


@outside
def test_packing_refuses_taps_off_the_circle() -> None:
    stage = CASE.stage().map(lambda value: value.float())
    taps = stage.taps_out
    assert taps is not None
    pack_triton(stage)
    with pytest.raises(ShapeError, match="taps_out are not on their circle"):
        pack_triton(replace(stage, taps_out=replace(taps, lower=taps.lower + 12)))


@outside
def test_packing_sorts_channels_into_layers() -> None:
    case = VARIANTS["short blocks"]
    stage = case.stage()
    expand, project, indices, constants = pack_triton(stage.map(lambda value: value.float()))
    assert stage.taps_in is not None
    assert stage.taps_out is not None
    assert stage.scale is not None
    assert expand.shape == (16, 8)
    assert project.shape == (8, 16)
    assert torch.equal(project[:, 11], stage.bias.float())
    assert not project[:, 12:].any()
    there = indices[:, 0] >= 0
    assert int(there.sum()) == 48
    counts = torch.bincount(stage.taps_out.lower, minlength=11)
    assert torch.equal(there.sum(0), counts)
    assert len(indices) == int(counts.max())
    whole = (constants[:, 0] + constants[:, 1])[there]  # both taps' shares of the batch-norm scale
    torch.testing.assert_close(whole.sort().values, stage.scale.float().sort().values)


@outside
def test_whole_starts_leave_the_upper_taps_out() -> None:
    packed = pack_triton(VARIANTS["whole starts"].stage())
    assert packed[2].shape[1] == 1
    assert packed[3].shape[1] == 5 + 9
    packed = pack_triton(CASE.stage())
    assert packed[2].shape[1] == 2
    assert packed[3].shape[1] == 6 + 9


@outside
def test_blocks_hold_whole_tiles() -> None:
    assert [block_size(size, True) for size in (17, 25, 34, 69, 129, 513)] == [128, 128, 256, 256, 512, 1024]
    assert block_size(5000, False) == 128


@outside
def test_what_the_kernel_cannot_do_is_said() -> None:
    stage = CASE.stage()
    assert why_not_triton(stage.map(lambda value: value.half())) == ""
    assert why_not_triton(stage) == "dtype torch.float64"
    assert why_not_triton(Stage(Settings("pointwise"), torch.randn(2, 2), torch.randn(2))) == "a plain convolution"
    wide = replace(stage, taps_out=Taps(torch.arange(48), torch.full((48,), 0.5), 1025)).map(lambda v: v.float())
    assert why_not_triton(wide).startswith("1025 wrapped channels")


@outside
def test_the_processor_never_runs_it() -> None:
    assert not usable_triton(torch.randn(1, 2, 3, 3))
    assert _fused_triton.triton_available() == (torch.version.cuda is not None and not missing)
    code = "import sys, epitorch, epitorch.deploy.fused; print(any('triton_kernel' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def compiled(stage: Stage, tile: Tile) -> Any:
    """The kernel for an H100; that needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from epitorch.deploy._fused_triton_kernel import middle

    _, _, *packed = pack_triton(stage)
    product_map, sums = stage.project.new_empty(2, 14, 14, 16), stage.project.new_empty(2, 14, 14, 16)
    given = kernel_arguments(stage, product_map, sums, (packed[0], packed[1]))
    given |= {"TILE_Y": tile.rows, "TILE_X": tile.columns}
    names = list(middle.arg_names)
    element = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}[stage.project.dtype]
    pointers = {"product_map": element, "sums": element, "indices": "*i32", "constants": "*fp32"}
    signature = {n: pointers.get(n, "constexpr" if n.isupper() else "i32") for n in names}
    constants = {(names.index(n),): v for n, v in given.items() if n.isupper()}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in pointers}
    source = ASTSource(middle, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": given["BLOCK"] // 32})


@outside
@pytest.mark.skipif(missing, reason="Triton is not installed")
@pytest.mark.parametrize("name, dtype", [("groups", torch.float16), ("whole starts", torch.float32)])
def test_it_compiles_for_a_gpu(name: str, dtype: torch.dtype) -> None:
    made = compiled(VARIANTS[name].stage().map(lambda value: value.to(dtype)), SMALL)
    assert ".target sm_90" in made.asm["ptx"]
    assert "st.local" not in made.asm["ptx"]
    assert len(made.asm["cubin"]) > 1000


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@outside
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float16, 4e-3)])
@pytest.mark.parametrize("name", ["fractional", "whole starts", "groups", "stride 2", "no first 1x1", "many lanes"])
def test_on_a_gpu(name: str, dtype: torch.dtype, tolerance: float) -> None:
    stage, x = VARIANTS[name].stage(), VARIANTS[name].input()
    placed = stage.map(lambda value: value.to("cuda", dtype))
    got = run_triton(placed, pack_triton(placed), x.to("cuda", dtype), SMALL).double().cpu()
    assert relative(run_reference(stage, x), got) < tolerance


@needs_gpu
@outside
def test_the_module_on_a_gpu() -> None:
    stage, x = CASE.stage(), CASE.input()
    module = FusedInvertedResidual(stage.map(lambda value: value.float())).cuda().half()
    assert module._packed
    with torch.no_grad():
        images = x.to("cuda", torch.float16)
        assert usable_triton(images)
        got, other = module(images).double().cpu(), module(images.flip(3)).double().cpu()
    expected = run_reference(stage, x)
    assert relative(expected, got) < 4e-3
    assert relative(expected, other) > 1e-2
