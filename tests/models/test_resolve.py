"""Models by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from epitorch.errors import InputError, MissingExtraError
from epitorch.models import resolve
from epitorch.models.resolve import build_model, is_library_name

IMAGE = torch.zeros(2, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("epitorch:mobilenetv2", {"num_classes": 7, "cifar": True}),
        ("epitorch:efficientnet", {"num_classes": 7, "grouped_squeeze": True}),
        ("epitorch:digits_cnn", {"num_classes": 7, "channels": 3}),
        ("timm:mobilenetv2_035", {"num_classes": 7}),
        ("torchvision:squeezenet1_1", {"num_classes": 7}),
        ("torchvision.models:squeezenet1_1", {"num_classes": 7}),
    ],
)
def test_every_form_builds_a_model(name: str, arguments: dict[str, Any]) -> None:
    model = build_model(name, arguments).eval()
    assert model(IMAGE).shape == (2, 7)


def test_arguments_reach_the_factory() -> None:
    narrow = build_model("epitorch:digits_cnn", {"widths": [4, 4]})
    assert narrow.conv2.weight.shape == (4, 4, 3, 3)  # type: ignore[union-attr]
    assert build_model("epitorch:digits_cnn").conv2.weight.shape == (32, 16, 3, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mobilenetv2", "no known form"),
        ("mobilenetv2", "perhaps epitorch:mobilenetv2"),
        (":x", "no known form"),
        ("timm:", "no known form"),
        ("epitorch:mobilenet_v2", "did you mean 'mobilenetv2'"),
        ("timm:mobilenetv2_10", "did you mean 'mobilenetv2_1"),
        ("timm:hf-hub:someone/model", "has no model"),
        ("torchvision:resnet19", "did you mean 'resnet1"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("torch.nope:f", "no module 'torch.nope'"),
        ("epitorch.models.small:digit_cnn", "did you mean 'digits_cnn'"),
        ("epitorch.models.small:__doc__", "has no model"),
    ],
)
def test_unknown_names(name: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        build_model(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("epitorch:mobilenetv2", {"num_clases": 10}),
        ("torchvision:squeezenet1_1", {"nonsense": 1}),
        ("epitorch:digits_cnn", {"num_classes": 0}),
        ("epitorch:digits_cnn", {"widths": []}),
        ("torchvision:squeezenet1_1", {"num_classes": -1}),
        ("builtins:dict", {}),
    ],
)
def test_wrong_arguments_are_the_users_error(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        build_model(name, arguments)


def test_an_import_error_inside_the_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_models.py").write_text("import a_module_that_is_missing\n")
    (tmp_path / "my_models.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(2, 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        build_model("broken_models:net")
    assert isinstance(build_model("my_models:net"), nn.Linear)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_missing_library_says_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtraError, match=r"epitorch\[models\]"):
        build_model(f"{library}:resnet18")


def test_library_names() -> None:
    assert all(is_library_name(f"{name}:x") for name in ("epitorch", "timm", "torchvision"))
    assert not is_library_name("os:system")
    assert not is_library_name("timm.models:x")
    assert set(resolve.OWN_MODELS) == {"mobilenetv2", "efficientnet", "digits_cnn", "resnet20", "soundnet8"}
