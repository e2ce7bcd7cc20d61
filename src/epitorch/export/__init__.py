"""From a trained or deployed model to a file for another runtime."""

from epitorch.export._export import TARGETS, ExportReport, export
from epitorch.export._int8 import Int8Report, export_int8
from epitorch.export._onnx import open_onnx
from epitorch.export._openvino import open_openvino

__all__ = ["TARGETS", "ExportReport", "Int8Report", "export", "export_int8", "open_onnx", "open_openvino"]
