"""From a trained or deployed model to a file for another runtime."""

from epitorch.export._export import TARGETS, ExportReport, export

__all__ = ["TARGETS", "ExportReport", "export"]
