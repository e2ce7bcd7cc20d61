"""`export`: files that their runtimes run to the trained model's numbers, that store each epitome once, or no file."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torchvision
from export_nets import NETS, linear, made_in_the_graph, moved
from onnx import numpy_helper
from torch import Tensor, nn

import epitorch
from epitorch import deploy
from epitorch.deploy import ParityError
from epitorch.errors import ExportError, InputError, MissingExtraError
from epitorch.export import TARGETS
from epitorch.export._onnx import run_onnx
from epitorch.export._openvino import run_openvino
from epitorch.models.mobilenetv2 import mobilenetv2_plan
from epitorch.nn import EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLayer, EpitomeLinear
from epitorch.plans import LayerPlan, Plan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[nn.Module, Path]]:
    """Model and ONNX file of a net, written once."""
    folder, made = tmp_path_factory.mktemp("onnx"), {}

    def write(name: str) -> tuple[nn.Module, Path]:
        if name not in made:
            make, shape = NETS[name]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model, x = moved(make()), torch.randn(2, *shape)
            out = folder / f"{name}.onnx"
            report = epitorch.export(model, x, "onnx", out, strategy="size")
            assert report.difference < 1e-5
            assert report.bytes == out.stat().st_size
            assert report.checked == ((2, *shape), (1, *shape))
            made[name] = model, out
        return made[name]

    return write


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", NETS)
def test_runtimes_agree_with_the_trained_model(name: str, runtime: str, exported: Any) -> None:
    model, out = exported(name)
    run = run_onnx if runtime == "onnxruntime" else run_openvino  # OpenVINO reads ONNX files as well
    batches = [(torch.randn(n, *NETS[name][1]),) for n in (1, 3)]
    for (x,), (got,) in zip(batches, run(out, batches), strict=True):
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(got.roll(1, 1), expected, atol=1e-2)  # negative control


@pytest.mark.parametrize("name", NETS)
def test_each_epitome_is_stored_once_and_nothing_made_from_it(name: str, exported: Any) -> None:
    model, out = exported(name)
    assert_small(out, model, torch.zeros(1, *NETS[name][1]), slack=24_000)


def test_a_batch_norm_goes_into_a_wide_convolution_without_bias(tmp_path: Path) -> None:
    """Its zero bias stays an `Expand` in torch's graph, since it is longer than what is folded."""
    model = moved(nn.Sequential(nn.Conv2d(3, 40, 3, bias=False), nn.BatchNorm2d(40), nn.ReLU()))
    report = epitorch.export(model, torch.randn(2, 3, 6, 6), "onnx", tmp_path / "net.onnx")
    assert report.difference < 1e-5
    assert [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node] == ["Conv", "Relu"]


def assert_small(file: Path, model: nn.Module, x: Tensor, slack: int = 64 * 1024) -> None:
    proto = onnx.load(file)
    stored = 4 * epitorch.count(model, x).params
    assert file.stat().st_size <= 1.03 * stored + slack
    assert {node.domain for node in proto.graph.node} == {""}
    assert [entry.domain for entry in proto.opset_import] == [""]
    sizes = Counter(int(np.prod(tensor.dims)) for tensor in proto.graph.initializer)
    epitomes = Counter(layer.epitome.numel() for layer in model.modules() if isinstance(layer, EpitomeLayer))
    weights = {int(np.prod(layer.weight_shape)) for layer in model.modules() if isinstance(layer, EpitomeLayer)}
    assert all(sizes[size] >= number for size, number in epitomes.items())
    assert sum(size * number for size, number in sizes.items()) <= 1.03 * stored / 4 + slack / 4
    large = {size for size in weights if size > max(epitomes) and size > 2_000}
    assert not large & set(sizes)


def test_a_batch_of_none(exported: Any) -> None:
    _, out = exported("two_axes")
    (got,) = run_onnx(out, [(torch.zeros(0, 3, 9, 9),)])[0]
    assert got.shape[:2] == (0, 8)


def test_the_file_says_where_it_is_from(exported: Any) -> None:
    proto = onnx.load(exported("two_axes")[1])
    assert (proto.producer_name, proto.producer_version) == ("epitorch", epitorch.__version__)
    said = {entry.key: entry.value for entry in proto.metadata_props}
    assert said["epitorch_strategy"] == "size"
    assert said["epitorch_layers"] == "both 2, product_map 1, wrapping 1"
    assert proto.opset_import[0].version == 20
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param


@pytest.mark.parametrize("target", ["onnx", "openvino"])
def test_strategies_store_what_they_run(target: Any, tmp_path: Path) -> None:
    """A layer that reuse folds: its dense weight (6,912 bytes), or its epitome (1,728)."""
    model = moved(nn.Sequential(EpitomeConv2d(3, 64, 3, epitome_shape=(16, 3, 3, 3), channel_starts="grid")))
    x, sizes = torch.randn(1, 3, 5, 5), {}
    for strategy in ("reuse", "size"):
        out = tmp_path / f"{strategy}{TARGETS[target].suffix}"
        epitorch.export(model, x, target, out, strategy=strategy)  # type: ignore[arg-type]
        sizes[strategy] = (out if target == "onnx" else out.with_suffix(".bin")).stat().st_size
    assert sizes["reuse"] >= 64 * 27 * 4
    assert sizes["size"] < sizes["reuse"] - (0 if target == "onnx" else 4_000)


def test_the_report_says_if_dense_weights_make_the_file_large(tmp_path: Path) -> None:
    """Starts per pair of blocks are not reused: only strategy size keeps such a file as small as the model."""
    model = nn.Sequential(EpitomeLinear(512, 512, epitome_shape=(128, 128), channel_starts="grid", index="direct"))
    x = torch.randn(1, 512)
    reports = {s: epitorch.export(model, x, "onnx", tmp_path / f"{s}.onnx", strategy=s) for s in ("reuse", "size")}  # type: ignore[arg-type]
    trained = 4 * (128 * 128 + 2 * 16 + 512)
    assert reports["reuse"].trained_bytes == reports["size"].trained_bytes == trained
    assert reports["reuse"].bytes > 2**20 > 4 * reports["size"].bytes
    assert "strategy size stores their epitomes" in str(reports["reuse"])
    assert "strategy size stores" not in str(reports["size"])
    plain = epitorch.export(nn.Linear(512, 512), x, "onnx", tmp_path / "plain.onnx")
    assert (plain.trained_bytes, "strategy size stores" in str(plain)) == (None, False)


def test_a_deployed_net_and_a_plain_one_are_taken_as_they_are(tmp_path: Path) -> None:
    model, x, out = moved(linear()), torch.randn(2, 8), tmp_path / "net.onnx"
    net = deploy(model, x, "dense")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    epitorch.export(net, x, "onnx", out, strategy="size")
    assert sorted(list(t.dims) for t in onnx.load(out).graph.initializer if len(t.dims) == 2) == [[6, 32], [32, 8]]
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)
    assert out.stat().st_mode & 0o777 == 0o644


def test_dynamic_image_size(tmp_path: Path) -> None:
    model = moved(nn.Sequential(EpitomeConv2d(3, 8, 3, epitome_shape=(4, 3, 3, 3)), nn.ReLU()))
    out = tmp_path / "net.onnx"
    other = torch.randn(2, 3, 12, 7)
    report = epitorch.export(model, torch.randn(1, 3, 9, 9), "onnx", out, dynamic="all", check_inputs=[other])
    assert report.checked == ((2, 3, 12, 7), (1, 3, 12, 7))
    epitorch.export(model, torch.randn(1, 3, 9, 9), "onnx", out, dynamic="none")
    with pytest.raises(Exception, match=r"(?i)dimension"):
        run_onnx(out, [(other,)])


@pytest.mark.parametrize("strategy", ["reuse", "size"])
def test_pt2_round_trip(strategy: Any, tmp_path: Path) -> None:
    model, out = moved(made_in_the_graph()), tmp_path / "net.pt2"
    epitorch.export(model, torch.randn(1, 3, 9, 9), "pt2", out, strategy=strategy)
    program = torch.export.load(out)
    x = torch.randn(3, 3, 9, 9)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-4, rtol=1e-4)
    stored = {tuple(value.shape) for value in program.state_dict.values()}
    assert ((32, 3, 3, 3) in stored) == (strategy == "reuse")
    assert ((16, 3, 3, 3) in stored) == (strategy == "size")


class Doubled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_every_folded_layer_keeps_its_epitome(tmp_path: Path) -> None:
    """Transposed, flattened, and a subclass with a forward of its own."""
    model = nn.Sequential(
        EpitomeConvTranspose2d(3, 16, 2, stride=2, epitome_shape=(3, 8, 2, 2), channel_starts="grid"),
        EpitomeConv2d(16, 16, 3, flatten_kernel=True, epitome_shape=(16, 40)),
        Doubled(16, 8, 1),
    )
    epitorch.convert_(model, Plan({"2": LayerPlan((4, 16, 1, 1))}))
    moved(model)
    epitorch.export(model, torch.randn(1, 3, 6, 6), "pt2", tmp_path / "net.pt2", strategy="size")
    program, x = torch.export.load(tmp_path / "net.pt2"), torch.randn(4, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-4, rtol=1e-4)
    stored = sorted(value.numel() for value in program.state_dict.values() if value.dim() > 1)
    assert stored == [4 * 16, 3 * 8 * 4, 16 * 40]


def test_openvino_in_half_precision(tmp_path: Path) -> None:
    model = moved(nn.Sequential(EpitomeConv2d(3, 16, 3, epitome_shape=(6, 3, 3, 3)), nn.ReLU()))
    sizes = []
    for half in (False, True):
        out = tmp_path / f"{half}.xml"
        report = epitorch.export(model, torch.randn(1, 3, 9, 9), "openvino", out, compress_to_fp16=half)
        sizes.append(out.with_suffix(".bin").stat().st_size)
        assert report.bytes == sizes[-1] + out.stat().st_size
        assert (report.difference > 1e-5) == half
    assert sizes[1] < 0.7 * sizes[0]


# ---- whole networks ----


def resnet10(starts: str) -> nn.Module:
    """One block of ResNet-18 in each stage, both channel axes halved; the whole one is in benchmarks/export_size.py."""
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and name != "conv1"}
    halves = {n: LayerPlan((c.out_channels // 2, c.in_channels // 2, *c.kernel_size)) for n, c in layers.items()}
    epitorch.convert_(model, Plan(halves))
    moved(model)
    for layer in model.modules():
        if isinstance(layer, EpitomeLayer) and starts == "whole":
            layer.snap_routing()
    return model


def mobilenetv2(starts: str) -> nn.Module:
    """The first blocks of MobileNetV2 and its last convolution, c = 0.18; the whole one likewise."""
    setting = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]]
    model = torchvision.models.MobileNetV2(num_classes=10, inverted_residual_setting=setting)
    epitorch.convert_(model, mobilenetv2_plan(model, 0.18, last_conv=True))
    return moved(model)


@pytest.mark.parametrize(
    ("make", "starts"),
    [(resnet10, "whole"), (resnet10, "fractional"), (mobilenetv2, "fractional")],
)
def test_whole_networks(make: Callable[[str], nn.Module], starts: str, tmp_path: Path) -> None:
    model, x, out = make(starts), torch.randn(2, 3, 32, 32), tmp_path / "net.onnx"
    epitorch.export(model, x, "onnx", out, strategy="size")
    assert_small(out, model, x)
    operators = Counter(node.op_type for node in onnx.load(out).graph.node)
    assert bool(operators["Sub"]) == (starts == "fractional")  # whole starts are not interpolated
    batch = (torch.randn(3, 3, 32, 32),)
    with torch.no_grad():
        expected = model(*batch)
    for run in (run_onnx, run_openvino):
        torch.testing.assert_close(run(out, [batch])[0][0], expected, atol=2e-4, rtol=1e-4)


# ---- what goes wrong ----


def test_a_damaged_file_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight changed between writing and checking."""
    model, x, out = moved(linear()), torch.randn(2, 8), tmp_path / "net.onnx"
    target = TARGETS["onnx"]

    def damaged(path: Path, batches: Any) -> Any:
        proto = onnx.load(path)
        values = numpy_helper.to_array(proto.graph.initializer[0]).copy()
        values.flat[0] += 1
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(values, proto.graph.initializer[0].name))
        onnx.save(proto, path)
        return run_onnx(path, batches)

    out.write_text("old")
    monkeypatch.setitem(TARGETS, "onnx", replace(target, run=damaged))
    with pytest.raises(ParityError, match="does not compute what torch computes"):
        epitorch.export(model, x, "onnx", out)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("net.onnx", "old")]


class Threshold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_traced_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"^0.1: torch.export cannot trace"):
        epitorch.export(
            nn.Sequential(nn.Sequential(nn.ReLU(), Threshold())), torch.randn(2, 3), "pt2", tmp_path / "net.pt2"
        )
    assert not list(tmp_path.iterdir())


def test_a_file_that_the_runtime_refuses(tmp_path: Path) -> None:
    fixed: dict[str, Any] = {"dynamic": "none", "check_inputs": torch.randn(3, 4)}
    with pytest.raises(ExportError, match="the runtime does not run"):
        epitorch.export(nn.Linear(4, 2), torch.randn(2, 4), "pt2", tmp_path / "n.pt2", **fixed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "onx"}, "did you mean 'onnx'"),
        ({"out": "net.pt"}, "a file whose name ends in .onnx"),
        ({"out": None}, "a file whose name ends in .onnx"),
        ({"out": "none/net.onnx"}, "mkdir -p"),
        ({"strategy": "siez"}, "did you mean 'size'"),
        ({"dynamic": "bach"}, "did you mean 'batch'"),
        ({"opset": 11}, "from 18 to 23"),
        ({"compress_to_fp16": True}, "to=openvino"),
        ({"compiled": True}, "to=pt2"),
        ({"example_input": (torch.zeros(1, 4), 3)}, "Tensor, int"),
        ({"check_inputs": []}, "check_inputs is empty"),
        ({"check_inputs": [torch.zeros(0, 4)]}, "check_inputs holds nothing"),
        ({"example_input": torch.zeros(0, 4)}, "example_input holds nothing"),
        ({"to": ["onnx"]}, "to is not known"),
        ({"out": 5}, "a file whose name ends in .onnx"),
        ({"out": b"net.onnx"}, "a file whose name ends in .onnx"),
        ({"out": "a\0.onnx"}, "a file whose name ends in .onnx"),
        ({"out": "n" * 300 + ".onnx"}, "File name too long"),
        ({"dynamic": False}, "dynamic is not known"),
        ({"net_or_model": 3}, "this is no model"),
        ({"check_inputs": torch.zeros(2, 5)}, "does not run on inputs of shapes [(2, 5)]"),
        ({"example_input": torch.zeros(2, 5)}, "does not run on inputs of shapes [(2, 5)]"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"example_input": torch.randn(1, 4), "to": "onnx", "out": "net.onnx"} | options
    given = {"net_or_model": nn.Linear(4, 2)} | given
    if isinstance(given["out"], str):
        given["out"] = tmp_path / given["out"]
    with pytest.raises(InputError, match=re.escape(words)):
        epitorch.export(**given)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnxruntime", "executorch"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'epitorch[onnx]'")):
        epitorch.export(nn.Linear(4, 2), torch.randn(1, 4), "onnx", tmp_path / "net.onnx")
    with pytest.raises(MissingExtraError, match="pip install executorch"):
        epitorch.export(nn.Linear(4, 2), torch.randn(1, 4), "executorch", tmp_path / "net.pte")


def test_compiling_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExportError, match="needs a C\\+\\+ compiler"):
        epitorch.export(nn.Linear(4, 2), torch.randn(1, 4), "pt2", tmp_path / "net.pt2", compiled=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_package(tmp_path: Path) -> None:
    model, out = moved(EpitomeLinear(4, 8, epitome_shape=(4, 4))), tmp_path / "net.pt2"
    epitorch.export(model, torch.randn(2, 4), "pt2", out, compiled=True)
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch._inductor.aoti_load_package(str(out))(x), model(x))
