"""The files of tables/: complete, true to the paper, and beside the page that shows them."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from epitorch.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
TABLES = {
    file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "tables").glob("*.yaml"))
}
ROWS = [(name, row) for name, table in TABLES.items() for row in table["rows"]]
OF_THE_PAPER = (
    "esc50",
    "esc50-extended",
    "imagenet-ablation",
    "imagenet-comparison",
    "imagenet-plot",
    "cifar10",
    "cifar10-classifier",
)
OUR_OWN = ("esc10", "cifar10-short", "cifar10-resnet20")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield {name: importlib.import_module(name) for name in ("experiments", "paper_tables")}
    sys.path.remove(str(ROOT / "benchmarks"))


def recipes_without_row(rows: list[tuple[str, Any]]) -> list[str]:
    named = {row[key] for _, row in rows for key in ("recipe", "short")}
    files = [file for folder in (*OF_THE_PAPER, *OUR_OWN) for file in (ROOT / "recipes" / folder).glob("*.yaml")]
    return sorted({f"{file.parent.name}/{file.stem}" for file in files} - named)


def test_there_is_a_file_for_each_table() -> None:
    assert set(TABLES) == {*OF_THE_PAPER, *OUR_OWN}
    for table in TABLES.values():
        assert list(table) == ["title", "source", "metric", "data", "rows"]
        assert all(isinstance(table[key], str) and table[key] for key in ("title", "source", "metric", "data"))
        names = [row["name"] for row in table["rows"]]
        assert len(names) == len(set(names)) > 1
    assert {name for name, table in TABLES.items() if table["source"] == "ours"} == set(OUR_OWN)


@pytest.mark.parametrize("table, row", ROWS, ids=[f"{name}/{row['name']}" for name, row in ROWS])
def test_each_row_names_its_recipes_and_what_is_printed(table: str, row: dict[str, Any]) -> None:
    assert list(row) == ["name", "label", "recipe", "short", "paper"]
    assert list(row["paper"]) == ["accuracy", "params", "madds", "note"]
    for key in ("accuracy", "params", "madds"):
        value = row["paper"][key]
        assert value is None or (type(value) in (int, float) and value > 0)
        assert value is None or table not in OUR_OWN
    assert row["paper"]["note"] is None or isinstance(row["paper"]["note"], str)
    assert row["recipe"].endswith(row["name"])
    full, short = (load_recipe(ROOT / "recipes" / f"{row[key]}.yaml") for key in ("recipe", "short"))
    assert full.model == short.model
    assert short.training.epochs <= 100
    if full != short:
        assert row["short"] == f"{row['recipe']}-short"
        assert full.training.epochs > short.training.epochs
        assert (short.training.schedule, short.training.precision) == ("cosine", "bf16")
        assert (full.epitome is None) == (short.epitome is None)
        if full.epitome is not None and short.epitome is not None:
            same = ("c", "policy", "last_conv", "classifier", "index", "momentum")
            assert [getattr(full.epitome, key) for key in same] == [getattr(short.epitome, key) for key in same]


def test_each_recipe_of_the_tables_folders_is_in_a_table() -> None:
    assert recipes_without_row(ROWS) == []
    fewer = [(name, row) for name, row in ROWS if row["name"] != "epitome-0.75-a"]  # negative control
    assert recipes_without_row(fewer) == [
        "imagenet-comparison/epitome-0.75-a",
        "imagenet-comparison/epitome-0.75-a-short",
    ]


@pytest.mark.parametrize(
    "folder", ["imagenet-ablation", "imagenet-comparison", "imagenet-plot", "cifar10", "cifar10-classifier"]
)
@pytest.mark.parametrize("short", [False, True])
def test_rows_of_a_table_are_trained_alike(folder: str, short: bool) -> None:
    files = [file for file in (ROOT / "recipes" / folder).glob("*.yaml") if file.stem.endswith("-short") == short]
    recipes = [load_recipe(file) for file in files]
    assert len(recipes) >= 2
    assert len({(recipe.training, recipe.data, recipe.images) for recipe in recipes}) == 1
    arguments = [recipe.training.optimizer_arguments for recipe in recipes]
    assert arguments == [arguments[0]] * len(recipes)


def test_the_full_recipes_for_imagenet_have_the_released_schedule() -> None:
    training = load_recipe(ROOT / "recipes/imagenet-ablation/dense.yaml").training
    assert (training.optimizer, training.schedule, training.warmup_epochs) == ("rmsproptf", "step", 5)
    assert (training.decay_rate, training.weight_decay, training.ema_decay) == (0.97, 1e-5, 0.9999)
    for name, key in (("imagenet-ablation/dense", "dropout"), ("imagenet-comparison/efficientnet-b0", "drop_rate")):
        assert load_recipe(ROOT / "recipes" / f"{name}.yaml").model.arguments[key] == 0.2


# ---- against the paper's numbers as they were written down before ----


def printed(table: str, label: str) -> tuple[float | None, ...]:
    (row,) = [row for row in TABLES[table]["rows"] if row["label"] == label]
    return tuple(row["paper"][key] for key in ("accuracy", "params", "madds"))


def test_numbers_are_those_printed(scripts: dict[str, Any]) -> None:
    paper = scripts["paper_tables"]
    groups = {
        "imagenet-ablation": [paper.IMAGENET_DENSE, *paper.IMAGENET_NARROW.values(), *paper.IMAGENET_EPITOME.values()],
        "imagenet-comparison": [
            *paper.WIDTH_MULTIPLIER.values(),
            paper.LARGER_UPPER_LAYERS,
            *paper.EFFICIENTNET.values(),
        ],
        "cifar10": [paper.CIFAR_DENSE, paper.CIFAR_NARROW, paper.CIFAR_EPITOME],
        "cifar10-classifier": [paper.CLASSIFIER_NARROW, paper.CLASSIFIER_EPITOME],
    }
    for table, rows in groups.items():
        for row in rows:
            wanted = tuple(float(text) if text else None for text in (row.top1, row.params, row.madds))
            assert printed(table, row.row.removesuffix(" (cited)")) == wanted, row.row
    assert printed("esc50", "WSNet") == (float(paper.ESC_WSNET), None, None)
    assert printed("esc50", "Ours") == (float(paper.ESC_OURS), None, None)


# ---- the page ----


def test_the_page_has_each_row_of_each_table(scripts: dict[str, Any]) -> None:
    page = scripts["experiments"].PAGE.read_text(encoding="utf-8")
    none_counted = dict.fromkeys((row["recipe"] for _, row in ROWS), scripts["experiments"].Counted(0, 0, 0))
    for name, table in TABLES.items():
        (block,) = re.findall(rf"<!-- table {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
        own = scripts["experiments"].rendered(table, none_counted)
        assert without_counts(block) == without_counts(own)
        assert block.count("\n") == len(table["rows"]) + 2


def without_counts(block: str) -> list[list[str]]:
    """Cells but the last three, which are counted."""
    return [line.split(" | ")[:-3] for line in block.strip().splitlines() if "---" not in line]


@pytest.mark.parametrize(
    "name",
    [
        "imagenet-comparison/efficientnet-b0-epitome-0.5",
        "imagenet-comparison/epitome-0.75-a",
        "imagenet-comparison/width-0.35",
        "cifar10-classifier/epitome-0.5-fc",
        "esc50/wsnet-4x",
    ],
)
def test_the_page_has_the_counted_cost(name: str, scripts: dict[str, Any]) -> None:
    page = scripts["experiments"].PAGE.read_text(encoding="utf-8")
    cost = scripts["experiments"].counted(name)
    lerps = f"{cost.interpolation / 1e6:.1f}" if cost.interpolation else "-"
    ending = f"| {cost.params / 1e6:.3f} | {cost.madds / 1e6:.1f} | {lerps} |"
    lines = [line for line in page.splitlines() if f"| `{name}` |" in line]
    assert lines
    assert all(line.endswith(ending) for line in lines)
    assert not lines[0].endswith(ending.replace(f"{cost.params / 1e6:.3f}", f"{cost.params / 1e6 + 0.001:.3f}"))


def test_readings_of_front_heavy_are_those_of_the_page(scripts: dict[str, Any]) -> None:
    page = scripts["experiments"].PAGE.read_text(encoding="utf-8")
    made = scripts["experiments"].front_heavy()
    assert f"<!-- table front-heavy -->\n{made}<!-- end -->" in page
    assert made.replace("3.198", "3.197") not in page  # negative control


def test_an_installed_package_carries_tables_and_recipes() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    inside = {"recipes": "epitorch/recipes", "tables": "epitorch/tables", "sweeps": "epitorch/sweep_files"}
    assert targets["wheel"]["force-include"] == inside
    assert set(inside) <= {name.strip("/") for name in targets["sdist"]["include"]}
