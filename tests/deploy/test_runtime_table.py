"""The numbers on the page are those that the committed runs measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_table_of_the_page() -> None:
    path = ROOT / "benchmarks" / "resnet_runtime.py"
    spec = importlib.util.spec_from_file_location("resnet_runtime", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    reports = sorted((ROOT / "benchmarks" / "results").glob("runtime_*.json"))
    measured = {row for report in reports for row in benchmark.table(json.loads(report.read_text(encoding="utf-8")))}
    lines = (ROOT / "docs" / "runtimes.md").read_text(encoding="utf-8").splitlines()
    shown = {line for line in lines if line.startswith("| ") and "x (" in line}
    assert len(measured) > 20
    assert shown == measured
