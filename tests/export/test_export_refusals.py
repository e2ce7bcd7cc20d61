"""What cannot be exported is said in one message: where the file would be, what the model says, nothing on stderr."""

from __future__ import annotations

import errno
import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epitorch
from epitorch.errors import ExportError, InputError, ShapeError, explain
from epitorch.export import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(("target", "name"), [("onnx", "net.onnx"), ("openvino", "net.xml"), ("openvino", "net.bin")])
def test_a_folder_under_the_name(target: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=rf"(?s)out is not a file.*{name}"):
        epitorch.export(nn.Linear(4, 2), torch.randn(2, 4), target, tmp_path / f"net{TARGETS[target].suffix}")
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_folder_that_cannot_be_written_into() -> None:
    with pytest.raises(InputError, match=r"(?s)the file cannot be written.*: /proc/net.onnx"):
        epitorch.export(nn.Linear(4, 2), torch.randn(2, 4), "onnx", "/proc/net.onnx")


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(job: Any, path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setitem(TARGETS, "onnx", replace(TARGETS["onnx"], write=full))
    with pytest.raises(ExportError, match=rf"No space left on device: {re.escape(str(tmp_path / 'net.onnx'))}"):
        epitorch.export(nn.Linear(4, 2), torch.randn(2, 4), "onnx", tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


class Returns(nn.Module):
    def __init__(self, beside: Any) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> Any:
        return {"scores": [2 * x], "beside": self.beside}


@pytest.mark.parametrize("beside", [3, 0.5, "text", torch.float32])
def test_outputs_must_be_tensors(beside: Any, tmp_path: Path) -> None:
    words = rf"(?s)output cannot be exported.*outputs that are tensors.*got: +{type(beside).__name__}"
    with pytest.raises(InputError, match=words):
        epitorch.export(Returns(beside), torch.randn(2, 4), "onnx", tmp_path / "net.onnx")
    report = epitorch.export(Returns((torch.ones(1),)), torch.randn(2, 4), "pt2", tmp_path / "net.pt2")
    assert report.difference == 0


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 4:
            raise ShapeError(explain("channels do not fit", expected="4 channels", got=f"{x.shape[1]} channels"))
        if x.shape[0] != 2:
            raise ValueError("two samples, please")
        return 2 * x


def test_the_models_own_message_is_shown_whole(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        epitorch.export(Picky(), torch.randn(2, 5), "onnx", tmp_path / "net.onnx")
    assert all(words in str(caught.value) for words in ("channels do not fit", "4 channels", "5 channels"))
    assert "dynamic='none'" not in str(caught.value)
    with pytest.raises(InputError, match=r"(?s)shapes \[\(1, 4\)\].*two samples, please.*dynamic='none'"):
        epitorch.export(Picky(), torch.randn(2, 4), "onnx", tmp_path / "net.onnx")


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(("net", "words"), [(Unknown(), "bessel_j0"), (Branches(), "data-dependent")])
def test_a_failed_export_writes_nothing_but_its_message(
    net: nn.Module, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, disabled = logging.getLogger("torch.fx"), logging.root.manager.disable
    before = logger.level, warnings.filters[:]
    with pytest.raises(ExportError, match=words) as caught:
        epitorch.export(net, torch.rand(2, 3), "onnx", tmp_path / "net.onnx")
    assert capfd.readouterr() == ("", "")
    assert "\x1b" not in str(caught.value)
    assert (logger.level, warnings.filters[:]) == before
    assert logging.root.manager.disable == disabled
