"""Names in an ONNX file: arguments, outputs, the batch axis, and the weights' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch.export._onnx import run_onnx
from epitorch.nn import EpitomeConv2d

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Named(nn.Module):
    """Two arguments, three outputs; one is an argument, and an inner value could take any name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = EpitomeConv2d(3, 16, 3, epitome_shape=(4, 3, 3, 3), channel_starts="grid")
        self.norm = nn.BatchNorm2d(16)

    def forward(self, image: Tensor, gain: Tensor) -> Any:
        y = self.norm(self.layer(image)).relu() * gain[:, :, None, None]
        return {"y": y, "gain": gain, "mean": y.mean((2, 3)).repeat(2, 1)}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model, out = Named().eval(), tmp_path_factory.mktemp("names") / "net.onnx"
    epitorch.export(model, (torch.randn(2, 3, 9, 9), torch.randn(2, 1)), "onnx", out, strategy="size", dynamic="all")
    return model, out


def axes(value: Any) -> list[Any]:
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def test_ends_of_the_graph(named: tuple[nn.Module, Path]) -> None:
    graph = onnx.load(named[1]).graph
    assert [value.name for value in graph.input] == ["image", "gain"]
    assert [value.name for value in graph.output] == ["output", "output_1", "output_2"]
    first, second = map(axes, graph.input)
    assert first[:2] == ["batch", 3]
    assert isinstance(first[2], str)
    assert second == ["batch", 1]
    assert axes(graph.output[0])[:2] == ["batch", 16]
    assert axes(graph.output[1]) == ["batch", 1]
    assert axes(graph.output[2])[0] == "2*batch"


def test_names_are_unique_and_weights_keep_theirs(named: tuple[nn.Module, Path]) -> None:
    proto = onnx.load(named[1])
    onnx.checker.check_model(proto, full_check=True)
    stored = [tensor.name for tensor in proto.graph.initializer]
    names = [name for node in proto.graph.node for name in node.output] + stored + ["image", "gain"]
    assert len(names) == len(set(names))
    assert "layer.epitome" in stored
    inner = [name for name in names if "." not in name and not name.startswith(("output", "image", "gain"))]
    assert len(inner) > 20
    assert max(map(len, inner)) <= 4


def test_no_attribute_says_what_holds_anyway(named: tuple[nn.Module, Path]) -> None:
    graph = onnx.load(named[1]).graph
    (conv,) = (node for node in graph.node if node.op_type == "Conv")
    assert not {attribute.name for attribute in conv.attribute} - {"kernel_shape"}


class ArgumentCalledOutput(nn.Module):
    def forward(self, output: Tensor) -> Any:
        twice = 2 * output
        return output, twice, twice


def test_an_argument_called_output(tmp_path: Path) -> None:
    x, out = torch.randn(2, 3), tmp_path / "net.onnx"
    epitorch.export(ArgumentCalledOutput(), x, "onnx", out)
    graph = onnx.load(out).graph
    assert [value.name for value in graph.input] == ["output"]
    assert [value.name for value in graph.output] == ["output_", "output_1_", "output_2_"]
    (got,) = run_onnx(out, [(x,)])
    torch.testing.assert_close(got, [x, 2 * x, 2 * x])


def test_strides_dilations_and_other_choices_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, dilation=2, groups=3),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        nn.ConvTranspose2d(6, 4, 3, stride=(2, 1), padding=1, output_padding=(1, 0)),
        nn.LeakyReLU(0.3),
        nn.AvgPool2d(2, count_include_pad=False),
        nn.Flatten(2),
        nn.Softmax(1),
    ).eval()
    report = epitorch.export(net, torch.randn(2, 3, 19, 17), "onnx", tmp_path / "net.onnx")
    assert report.difference < 1e-5


def bytes_and_stored(layers: int, out: Path, options: dict[str, Any]) -> tuple[int, int]:
    torch.manual_seed(0)
    net = nn.Sequential(*[EpitomeConv2d(8, 8, 3, padding=1, **options) for _ in range(layers)]).eval()
    for layer in net:
        sizes = layer.spec.start_sizes
        layer.set_starts({axis: torch.rand_like(v) * max(sizes[axis]) for axis, v in layer.starts().items()})
    x = torch.randn(2, 8, 9, 9)
    size = epitorch.export(net, x, "onnx", out, strategy="size", dynamic="none").bytes
    return size, 4 * epitorch.count(net, x).params


@pytest.mark.parametrize(
    "options",
    [
        {"epitome_shape": (4, 6, 4, 4), "channel_starts": "grid", "block_out": 1, "block_in": 1},
        {"epitome_shape": (4, 4, 3, 3)},
    ],
)
def test_a_small_layer_adds_what_the_documentation_says(options: dict[str, Any], tmp_path: Path) -> None:
    """1.03 x 4 bytes a parameter and 4 KiB a layer; the 64 KiB for a whole file would hide what four layers add."""
    (one, stored_one), (four, stored_four) = (bytes_and_stored(n, tmp_path / "n.onnx", options) for n in (1, 4))
    assert stored_four - stored_one < four - one <= 1.03 * (stored_four - stored_one) + 3 * 4096
    assert one <= 1.03 * stored_one + 4096
