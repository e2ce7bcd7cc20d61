"""Files say how a picture becomes the network's input, and what its outputs are called."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import onnx
import openvino
import pytest
import torch
from PIL import Image
from torch import nn

import epitorch
from epitorch.checkpoint import ModelInput
from epitorch.errors import InputError
from epitorch.models.resolve import build_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CLASSES = tuple(f"Klasse „{i}“ <&>" for i in range(10))
SEEN = ModelInput((3, 8, 8), (0.1, 0.5, 0.9), (0.2, 0.3, 0.4), CLASSES)
KEYS = {"epitorch_input", "epitorch_labels"}
SCRIPT = Path(__file__).parents[2] / "docs" / "howto" / "runtimes.md"


def network() -> nn.Module:
    torch.manual_seed(0)
    model = build_model("epitorch:digits_cnn", {"channels": 3, "widths": [4, 8]})
    epitorch.convert_(model, epitorch.plan(model, torch.zeros(1, 3, 8, 8), ratio=1.5))
    return model.eval()


def stated(file: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(file).metadata_props}


def test_onnx_states_what_the_checkpoint_knows(tmp_path: Path) -> None:
    epitorch.save_pretrained(network(), tmp_path / "saved", input=SEEN)
    loaded, x, out = epitorch.from_pretrained(tmp_path / "saved"), torch.randn(1, 3, 12, 10), tmp_path / "net.onnx"
    epitorch.export(loaded, x, "onnx", out)
    said = stated(out)
    assert json.loads(said["epitorch_input"]) == {
        "shape": [3, 12, 10],
        "range": [0, 1],
        "mean": list(SEEN.mean),
        "std": list(SEEN.std),
    }
    assert tuple(json.loads(said["epitorch_labels"])) == CLASSES
    epitorch.export(epitorch.deploy(loaded, x), x, "onnx", out)
    assert stated(out).keys() >= KEYS


def test_nothing_is_stated_that_nobody_knows(tmp_path: Path) -> None:
    model, x, out = network(), torch.randn(1, 3, 8, 8), tmp_path / "net.onnx"
    epitorch.export(model, x, "onnx", out)
    assert not KEYS & stated(out).keys()
    epitorch.export(model, x, "onnx", out, input=ModelInput((3, 8, 8), SEEN.mean, SEEN.std, ()))
    assert KEYS & stated(out).keys() == {"epitorch_input"}


def test_openvino_states_the_same(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 8, 8)
    for name, seen in (("known", SEEN), ("unknown", None)):
        epitorch.export(network(), x, "openvino", tmp_path / f"{name}.xml", input=seen)
    known, unknown = (openvino.Core().read_model(tmp_path / f"{name}.xml") for name in ("known", "unknown"))
    assert json.loads(known.get_rt_info(["epitorch", "epitorch_input"]).astype(str))["std"] == list(SEEN.std)
    assert tuple(json.loads(known.get_rt_info(["epitorch", "epitorch_labels"]).astype(str))) == CLASSES
    assert not any(unknown.has_rt_info(["epitorch", key]) for key in KEYS)


def test_sounds_are_on_another_scale(tmp_path: Path) -> None:
    model, out = nn.Sequential(nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()), tmp_path / "net.onnx"
    epitorch.export(model.eval(), torch.randn(1, 1, 64), "onnx", out, input=ModelInput((1, 64), (0.0,), (1.0,), ()))
    assert json.loads(stated(out)["epitorch_input"])["range"] == [-1, 1]


def test_an_input_of_other_channels_is_refused(tmp_path: Path) -> None:
    grey = ModelInput((1, 8, 8), (0.5,), (0.5,), ())
    with pytest.raises(InputError, match="input is not what this model gets"):
        epitorch.export(network(), torch.randn(1, 3, 8, 8), "onnx", tmp_path / "net.onnx", input=grey)


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """The script of the docs, where epitorch and torch cannot be imported."""
    blocks = re.findall(r"```python\n(.*?)```", SCRIPT.read_text(encoding="utf-8"), re.DOTALL)
    (script,) = [block for block in blocks if "photo.png" in block and "epitorch.export" not in block]
    assert len([line for line in script.splitlines() if line]) == 10
    barred = "import sys\nsys.modules['torch'] = sys.modules['epitorch'] = None\n"
    return subprocess.run([sys.executable, "-c", barred + script], cwd=folder, capture_output=True, text=True)


class Colours(nn.Module):
    """The class is the channel that is largest on average, after normalisation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@pytest.mark.parametrize(("colour", "right", "unprepared"), [((80, 120, 130), 0, 2), ((10, 200, 230), 1, 2)])
def test_the_script_of_the_docs_finds_the_class_that_torch_finds(
    colour: tuple[int, int, int], right: int, unprepared: int, tmp_path: Path
) -> None:
    epitorch.export(Colours().eval(), torch.randn(1, 3, 8, 8), "onnx", tmp_path / "net.onnx", input=SEEN)
    Image.new("RGB", (20, 30), colour).save(tmp_path / "photo.png")
    pixels = torch.tensor(colour).view(1, 3, 1, 1) / 255
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (SEEN.mean, SEEN.std))
    assert [int(Colours()(x).argmax()) for x in ((pixels - mean) / std, pixels)] == [right, unprepared]
    done = run_script(tmp_path)
    assert done.stdout.strip() == CLASSES[right], done.stderr


def test_the_script_stops_where_a_file_says_nothing(tmp_path: Path) -> None:
    epitorch.export(network(), torch.randn(1, 3, 8, 8), "onnx", tmp_path / "net.onnx")
    done = run_script(tmp_path)
    assert done.returncode == 1
    assert "epitorch_input" in done.stderr
