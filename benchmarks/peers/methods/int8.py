"""Weights and activations in 8 bits, as ONNX Runtime's static quantisation makes them."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.methods.base import Task
from benchmarks.peers.networks import peer
from torch import Tensor, nn

import epitorch
from epitorch.export import open_onnx


def quantize(model: nn.Module, task: Task, folder: Path) -> tuple[nn.Module, Path]:
    """Write the network as ONNX in 8 bits, weights by channel, and give the network that runs that file."""
    runtime: Any = peer("onnxruntime.quantization")
    from onnxruntime.quantization.shape_inference import quant_pre_process

    file = folder / "model.onnx"
    with tempfile.TemporaryDirectory() as scratch:
        whole, ready = Path(scratch, "whole.onnx"), Path(scratch, "ready.onnx")
        epitorch.export(model.eval(), task.example, "onnx", whole, strategy="dense", dynamic="batch")
        quant_pre_process(str(whole), str(ready), skip_symbolic_shape=True)
        before = logging.root.level
        logging.root.setLevel(logging.ERROR)  # it would tell of every tensor
        try:
            runtime.quantize_static(
                str(ready),
                str(file),
                _Reader(ready, task.samples()),
                per_channel=True,
                activation_type=runtime.QuantType.QUInt8,
                weight_type=runtime.QuantType.QInt8,
            )
        finally:
            logging.root.setLevel(before)
    return OnnxNet(file), file


class _Reader:
    """Hands the calibration inputs to the quantiser, one batch at a time."""

    def __init__(self, file: Path, samples: Tensor) -> None:
        import onnx

        self.name = onnx.load(file).graph.input[0].name
        self.batches = iter(samples.split(32))

    def get_next(self) -> dict[str, Any] | None:
        """The next batch, None after the last."""
        batch = next(self.batches, None)
        return None if batch is None else {self.name: batch.contiguous().numpy()}


class OnnxNet(nn.Module):
    """A network in a file, run by ONNX Runtime on one thread."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self._run = open_onnx(file)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits. shape: (N, C, ...) -> (N, classes)."""
        return torch.from_numpy(self._run([x.contiguous().numpy()])[0])


CODE = (quantize, _Reader)
