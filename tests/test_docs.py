"""What README and docs say is run or looked up."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import pytest

from epitorch.training.recipe import EpitomeSection, TrainingSection
from epitorch.training.recipe_images import ImagesSection

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_readme_examples_run_in_order() -> None:
    scope: dict[str, object] = {}
    blocks = python_blocks(ROOT / "README.md")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), scope)
    assert len(blocks) >= 3
    assert "33 converted" in printed.getvalue()
    assert scope["layer"].weight.shape == (128, 64, 3, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if python_blocks(page)], ids=lambda page: page.name)
def test_examples_of_the_docs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in python_blocks(page):
            exec(compile(block, page.name, "exec"), scope)
    assert scope


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "@@" not in text
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_every_recipe_key_is_documented() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    sections = (EpitomeSection, TrainingSection, ImagesSection)
    keys = {key for section in sections for key in section.__dataclass_fields__}
    assert len(keys) > 20
    assert not {key for key in keys if f"`{key}`" not in text}


def of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_out_of_the_docs_are_told_as_paths() -> None:
    markdown = "[`a.json`](../benchmarks/results/a.json), [the driver](../../benchmarks/b.py), [plans](plans.md)"
    told = of_docs("hooks").on_page_markdown(markdown)
    assert told == "`a.json`, the driver (`benchmarks/b.py`), [plans](plans.md)"


def test_pictures_are_those_that_the_pages_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = of_docs("figures")
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    figures.main()
    shown = set(re.findall(r"figures/(\w+)\.svg", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")))
    assert {file.stem for file in tmp_path.glob("*.svg")} == shown
    layer = figures.linear(out=[0.0, 2.5], **{"in": [0.0, 0.0]})
    assert figures.source_of(layer, 0)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 2.5, 3.5, 4.5, 2.5, 0.5, 1.5]
