"""The tables of results on the pages are those of the committed files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_tables", ROOT / "benchmarks" / "results_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_have_the_committed_results(script: ModuleType) -> None:
    pages = script.pages()
    assert ROOT / "docs/audio.md" in pages
    for page in pages:
        assert script.filled(page) == page.read_text(encoding="utf-8"), f"run benchmarks/results_tables.py: {page}"


def test_a_changed_number_on_a_page_is_found(script: ModuleType, tmp_path: Path) -> None:
    text = (ROOT / "docs/audio.md").read_text(encoding="utf-8")
    changed = tmp_path / "audio.md"
    changed.write_text(text.replace("| wsnet-4x | 7", "| wsnet-4x | 8"), encoding="utf-8")
    assert changed.read_text(encoding="utf-8") != text
    assert script.filled(changed) == text


@pytest.mark.parametrize(
    ("ran", "shown"),
    [
        ("epitorch sweep s.yaml --data '/my data/cifar' --jobs 2", "epitorch sweep s.yaml --data DIR --jobs 2"),
        ("e --data=/home/u/cifar --out=/home/u/runs/x --jobs=2", "e --data DIR --out runs/x --jobs=2"),
        ("e --out /tmp/myruns/x --results /home/runs/results/x", "e --out DIR --results results/x"),
        ("e --out /work/runs --results results/x", "e --out runs --results results/x"),
    ],
)
def test_commands_name_no_folders_of_one_machine(script: ModuleType, ran: str, shown: str) -> None:
    assert script.anywhere(ran) == shown
