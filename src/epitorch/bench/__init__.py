"""Networks side by side in every runtime: latency, throughput, bytes, memory, multiply-adds."""

from epitorch.bench._bench import bench
from epitorch.bench._report import BenchReport, BenchRow

__all__ = ["BenchReport", "BenchRow", "bench"]
