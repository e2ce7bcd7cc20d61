"""`export_int8`: int8 kernels on weights made from int8 epitomes, each stored once."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_nets import moved
from onnx import numpy_helper
from test_export_command import checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from epitorch.cli import main
from epitorch.deploy import ParityError
from epitorch.errors import ExportError, InputError, MissingExtraError
from epitorch.export import Int8Report, export_int8
from epitorch.export._int8 import _compared, _errors
from epitorch.export._made import round_rows
from epitorch.export._onnx import run_onnx
from epitorch.functional import sample_weight
from epitorch.nn import EpitomeConv2d, EpitomeConvTranspose2d, EpitomeLayer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
Written = Callable[[str], tuple[Int8Report, nn.Module, Path]]


def network() -> nn.Module:
    """Fractional starts on both axes, grid starts, a batch norm behind a made weight, and plain layers."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        EpitomeConv2d(16, 32, 3, padding=1, bias=False, epitome_shape=(8, 8, 3, 3)),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        EpitomeConv2d(32, 32, 3, epitome_shape=(16, 16, 3, 3), channel_starts="grid"),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def images(number: int, seed: int = 5) -> Tensor:
    return torch.randn(number, 3, 9, 9, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder, made = tmp_path_factory.mktemp("int8"), {}

    def write(strategy: str) -> tuple[Int8Report, nn.Module, Path]:
        if strategy not in made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = moved(network())
            out, words = folder / f"{strategy}.onnx", strategy  # type: Path, Any
            made[strategy] = export_int8(model, images(1), images(32), "onnx", out, strategy=words), model, out
        return made[strategy]

    return write


@pytest.mark.parametrize("strategy", ["size", "dense", "reuse"])
def test_int8_is_near_torch_on_other_images(strategy: str, written: Written) -> None:
    report, model, out = written(strategy)
    assert report.bytes == out.stat().st_size
    assert (report.images, report.compared, report.float_weights) == (32, 32, ())
    assert report.error < 0.1
    with torch.no_grad():
        expected = model(images(16, seed=6))
    ((got,),) = run_onnx(out, [(images(16, seed=6),)])
    assert (got - expected).norm() < 0.1 * expected.norm()
    assert (got.roll(1, 1) - expected).norm() > 0.1 * expected.norm()  # negative control


@pytest.mark.parametrize("strategy", ["size", "dense", "reuse"])
def test_every_weight_runs_in_an_int8_kernel(strategy: str, written: Written, tmp_path: Path) -> None:
    _, _, out = written(strategy)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "run.onnx"), 3
    onnxruntime.InferenceSession(str(out), options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "run.onnx").graph.node)
    assert (kinds["QLinearConv"], kinds["QGemm"], kinds["Conv"], kinds["Gemm"]) == (3, 1, 0, 0)
    if strategy == "size":  # nothing is made from an epitome in a pass
        assert not kinds.keys() & {"Cast", "Split", "Concat", "Gather", "Slice"}


def test_each_epitome_is_stored_once_in_8_bits(written: Written) -> None:
    _, model, out = written("size")
    tensors = [numpy_helper.to_array(tensor) for tensor in onnx.load(out).graph.initializer]
    int8 = Counter(value.size for value in tensors if value.dtype == np.int8 and value.size > 64)
    layers = [layer for layer in model.modules() if isinstance(layer, EpitomeLayer)]
    plain = Counter([16 * 3 * 9, 5 * 32])
    assert int8 == plain + Counter(layer.epitome.numel() for layer in layers)
    assert max(value.size for value in tensors if value.dtype == np.float32) == 32  # scales
    dense = [numpy_helper.to_array(tensor) for tensor in onnx.load(written("dense")[2]).graph.initializer]
    assert {32 * 16 * 9, 32 * 32 * 9} <= {value.size for value in dense if value.dtype == np.int8}


def test_what_the_file_makes_is_the_weight_of_the_rounded_epitome(written: Written) -> None:
    """Against a computation that shares nothing with the graph: round the rows, sample, round per channel."""
    _, model, out = written("size")
    layer = next(layer for layer in reversed(list(model.modules())) if isinstance(layer, EpitomeLayer))
    rows, scale = round_rows(layer.epitome.detach().numpy(), 0)
    with torch.no_grad():
        weight = sample_weight(torch.from_numpy(rows * scale), layer.starts(), layer.spec).numpy()
    steps = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127
    proto = onnx.load(out)
    rounding = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    made = next(node for node in rounding if _shape_of(proto, node.output[0]) == weight.shape)
    got = _value_of(proto, made.output[0])
    assert np.abs(got - np.rint(weight / steps)).max() <= 1  # a half may fall to either side
    assert (got == np.rint(weight / steps)).mean() > 0.99
    assert (np.roll(got, 1, 0) == np.rint(weight / steps)).mean() < 0.2  # negative control


def _value_of(proto: onnx.ModelProto, name: str) -> np.ndarray:
    asked = onnx.ModelProto.FromString(proto.SerializeToString())
    asked.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT8, None))
    session = onnxruntime.InferenceSession(asked.SerializeToString(), providers=["CPUExecutionProvider"])
    value: np.ndarray = session.run([name], {session.get_inputs()[0].name: images(1).numpy()})[0]
    return value.astype(np.float32)


def _shape_of(proto: onnx.ModelProto, name: str) -> tuple[int, ...]:
    inferred = onnx.shape_inference.infer_shapes(proto)
    shapes = {entry.name: entry.type.tensor_type.shape.dim for entry in inferred.graph.value_info}
    return tuple(size.dim_value for size in shapes.get(name, ()))


def test_what_has_no_int8_kernel_and_what_no_epitome_makes(tmp_path: Path) -> None:
    """A transposed convolution stays in float, its epitome in 8 bits; another made weight is stored for good."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 8, 3)),
        nn.ReLU(),
        EpitomeConvTranspose2d(8, 8, 2, stride=2, epitome_shape=(8, 4, 2, 2)),
    )
    report = export_int8(moved(model), images(1), images(16), "onnx", tmp_path / "n.onnx")
    assert report.error < 0.1
    assert len(report.float_weights) == 1
    assert report.agreement is None
    tensors = [numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "n.onnx").graph.initializer]
    assert {8 * 3 * 9, 8 * 4 * 4} == {value.size for value in tensors if value.dtype == np.int8 and value.size > 64}
    assert max(value.size for value in tensors if value.dtype == np.float32) <= 8


def test_rows_are_rounded_to_half_a_step() -> None:
    values = np.random.default_rng(0).normal(size=(4, 3, 2, 2)).astype(np.float32)
    values[2] = 0
    rounded, scale = round_rows(values, 0)
    assert rounded.dtype == np.int8
    assert scale.shape == (4, 1, 1, 1)
    assert (np.abs(rounded * scale - values) <= 0.5001 * scale).all()
    assert np.abs(rounded).max(axis=(1, 2, 3)).tolist() == [127, 127, 0, 127]


# ---- openvino ----


def test_openvino_runs_int8_kernels_on_epitomes_stored_once(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(1)
    model, out = moved(network()), tmp_path / "net.xml"
    report = export_int8(model, images(1), images(32), "openvino", out)
    assert report.error < 0.1
    assert report.float_weights == ()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.bin", "net.xml"]
    stored = sum(layer.epitome.numel() for layer in model.modules() if isinstance(layer, EpitomeLayer))
    assert stored < (tmp_path / "net.bin").stat().st_size < 32 * 32 * 9  # the larger dense weight alone
    compiled = openvino.Core().compile_model(out, "CPU")
    kinds = [
        (node.get_rt_info()["layerType"].astype(str), node.get_rt_info()["primitiveType"].astype(str))
        for node in compiled.get_runtime_model().get_ordered_ops()
    ]
    convolutions = [str(kernel) for kind, kernel in kinds if kind == "Convolution"]
    assert len(convolutions) == 3
    assert all(kernel.endswith("I8") for kernel in convolutions)


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"calibration": images(7)}, "too few inputs to calibrate on"),
        ({"calibration": images(16)[:, :, :8]}, "calibration inputs are not like the example"),
        ({"to": "pt2"}, "to is not known for int8"),
        ({"strategy": "siz"}, "did you mean 'size'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    given = {"calibration": images(16), "to": "onnx", "out": tmp_path / "n.onnx"} | options
    with pytest.raises(InputError, match=words):
        export_int8(nn.Conv2d(3, 4, 3), images(1), **given)
    assert not list(tmp_path.iterdir())


def test_a_model_without_weights_names_its_operators(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"(?s)nothing in this model can be quantised.*Relu"):
        export_int8(nn.ReLU(), images(1), images(16), "onnx", tmp_path / "n.onnx")
    assert not list(tmp_path.iterdir())


def test_ranges_from_other_images_are_found_out(tmp_path: Path) -> None:
    """The output is compared where it was calibrated, so only a network that int8 cannot hold fails there."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 2, 1, bias=False))
    with torch.no_grad():
        model[0].weight[:2], model[0].weight[2:] = 1e6, 1e-3
        model[1].weight[:, :2], model[1].weight[:, 2:] = 0, 1
    with pytest.raises(ParityError, match="does not compute what torch computes"):
        export_int8(model.eval(), images(1), images(16), "onnx", tmp_path / "n.onnx")
    assert not list(tmp_path.iterdir())


def test_without_nncf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(MissingExtraError, match=r"epitorch\[int8\]"):
        export_int8(nn.Conv2d(3, 4, 3), images(1), images(16), "openvino", tmp_path / "n.xml")


# ---- command ----


def test_the_command_calibrates_on_held_out_training_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "run", trained=True)
    out = tmp_path / "net.onnx"
    command = f"export {tmp_path / 'run'} --to onnx --out {out} --int8 --calibration digits --calibration-images 20"
    assert main(shlex.split(f"{command} --seed 3 --json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == out.stat().st_size
    drawn = report["calibration"]
    assert (drawn["images"], drawn["seed"]) == (20, 3)
    assert "split train, 20 held out" in drawn["data"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--int8", "int8 needs images to calibrate on"),
        ("--int8 --calibration digits --data digits", "--data says nothing for int8"),
        ("--calibration digits", "--calibration is of int8 alone"),
    ],
)
def test_options_that_do_not_go_together(
    options: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(f"export {tmp_path} --to onnx --out {tmp_path}/n.onnx {options}")) == 2
    assert words in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: (x.index_fill(0, torch.tensor([9]), float("nan")),), "argument 0, input 9"),
        (lambda x: (x.index_fill(0, torch.tensor([3, 11]), float("inf")),), "in 2 of 16"),
    ],
)
def test_calibration_inputs_that_are_not_finite_are_refused_wherever_they_are(
    spoil: Any, words: str, tmp_path: Path
) -> None:
    net, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.rand(16, 3, 8, 8)
    with pytest.raises(InputError, match=words):
        export_int8(net, images[:1], spoil(images), "onnx", tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_arguments_with_unequal_numbers_of_calibration_inputs_are_refused(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    a = torch.rand(16, 4)
    with pytest.raises(InputError, match="16 and 10"):
        export_int8(Sum(), (a[:1], a[:1]), (a, a[:10]), "onnx", tmp_path / "net.onnx")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x.double(), r"torch.float32, but for the first axis[\s\S]*torch.float64"),
        (lambda x: x.mul(255).to(torch.uint8), "torch.uint8"),
        (lambda x: x * 0, "the same one 16 times"),
        (lambda x: x[:1].repeat(16, 1, 1, 1), "the same one 16 times"),
        (list, "stack inputs into one tensor"),
    ],
)
def test_calibration_inputs_of_another_kind_are_refused(spoil: Any, words: str, tmp_path: Path) -> None:
    net, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.rand(16, 3, 8, 8)
    with pytest.raises(InputError, match=words):
        export_int8(net, images[:1], [spoil(images)] if spoil is list else spoil(images), "onnx", tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_one_huge_calibration_input_does_not_hide_that_all_others_are_lost(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    images = torch.randn(16, 3, 8, 8)
    assert export_int8(net, images[:1], images, "onnx", tmp_path / "good.onnx").error < 0.1
    images[15] *= 1e6
    with pytest.raises(ParityError, match="does not compute what torch computes"):
        export_int8(net, images[:1], images, "onnx", tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


def test_inputs_that_torch_answers_with_nothing_but_zeros(tmp_path: Path) -> None:
    """As after a ReLU: there is no relative error there, and the file is right."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 1, bias=False), nn.ReLU()).eval()
    with torch.no_grad():
        net[1].weight.fill_(1.0)
    images = torch.rand(16, 3, 2, 2) * torch.tensor([1.0, -1.0]).repeat(8).view(16, 1, 1, 1)
    expected = net(images)
    assert int((expected == 0).sum()) == 8
    report = export_int8(net, images[:1], images, "onnx", tmp_path / "net.onnx")
    assert report.error < 0.1


def test_errors_where_torch_answers_zero_count_against_the_other_answers() -> None:
    two, zero, one = torch.full((1, 4), 2.0), torch.zeros(1, 4), torch.ones(1, 4)
    assert _errors([[two], [zero]], [[two], [zero]]).tolist() == [0.0]
    assert _errors([[two], [zero]], [[one], [one]]).tolist() == [0.5, 0.5]
    assert _errors([[zero]], [[one]]).tolist() == [float("inf")]
    assert torch.isnan(_errors([[two], [zero]], [[two], [zero * float("nan")]])[1])


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_that_loses_half_of_the_inputs_is_refused(order: int, tmp_path: Path) -> None:
    """Two batches, one of inputs so small that one scale for both leaves nothing of them."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False)).eval()
    images = torch.cat([torch.randn(16, 3, 2, 2) * scale for scale in (1e-3, 1.0)[::order]])
    with pytest.raises(ParityError, match="does not compute what torch computes"):
        export_int8(net, images[:16], images, "onnx", tmp_path / "net.onnx")


def test_zeros_that_are_right_do_not_hide_that_the_rest_is_wrong() -> None:
    """A file that always says zero, where more than half of torch's answers are zero."""
    one, zero = torch.ones(1, 4), torch.zeros(1, 4)
    with pytest.raises(ParityError, match=r"1\.000"):
        _compared([[zero]] * 3 + [[one]] * 2, [[zero]] * 5)
    assert _compared([[zero]] * 3 + [[one]] * 2, [[zero]] * 3 + [[one]] * 2) == (0.0, 1.0)


def test_a_model_whose_own_output_is_not_finite_is_told_so(tmp_path: Path) -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3)).log()

    images = torch.rand(16, 3, 2, 2)
    images[5] = 0
    with pytest.raises(InputError, match="own output is not finite"):
        export_int8(nn.Sequential(nn.Conv2d(3, 3, 1), Log()), images[:1], images, "onnx", tmp_path / "net.onnx")


def test_one_calibration_input_is_too_few(tmp_path: Path) -> None:
    image = torch.rand(1, 3, 8, 8)
    with pytest.raises(InputError, match=r"too few inputs to calibrate on[\s\S]*got: +1"):
        export_int8(nn.Conv2d(3, 8, 3).eval(), image, image, "onnx", tmp_path / "net.onnx")
