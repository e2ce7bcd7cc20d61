"""The tables of docs/experiments.md: every row of tables/ with what the paper prints and what `epitorch.count` counts.

    python benchmarks/experiments.py           # writes the tables into the page
    python benchmarks/experiments.py --check   # exit code 1 if the page has others

Networks are counted on the meta device with every start between two positions, as training leaves them; those with
fixed starts (WSNet) are counted with the starts that they have.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from epitorch.conversion import convert_
from epitorch.cost import Cost, count
from epitorch.models.efficientnet import efficientnet, efficientnet_plan
from epitorch.models.mobilenetv2 import mobilenetv2, mobilenetv2_plan
from epitorch.plans import Plan
from epitorch.training.recipe import Recipe, load_recipe
from epitorch.training.starting import first_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "experiments.md"
TABLES = ROOT / "tables"
CIFAR = 32  # pixels
POWERS = ((1.0, 1.0), (1.5, 0.5), (2.0, 0.0), (2.5, -1.0))  # of c in the first and in the last 1x1 convolution
_BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Counted:
    """Cost of a row's network, per sample."""

    params: int
    madds: int
    interpolation: int


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if arguments.check:
        print("the page is up to date" if new == old else "the page has other tables: run without --check")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def filled(page: str) -> str:
    """Return the page with the tables made anew, in the places that it marks."""
    counts = {
        name: counted(name) for name in sorted({row["recipe"] for table in tables().values() for row in table["rows"]})
    }

    def made(match: re.Match[str]) -> str:
        own = {"front-heavy": front_heavy, "grouped-squeeze": grouped_squeeze}.get(match[2])
        return match[1] + (own() if own else rendered(tables()[match[2]], counts)) + match[4]

    return _BLOCK.sub(made, page)


def tables() -> dict[str, dict[str, Any]]:
    """Every file of tables/ as plain data."""
    return {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(TABLES.glob("*.yaml"))}


def counted(name: str) -> Counted:
    """Build and count the network of a recipe.

    Args:
        name: Under recipes/.
    """
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    fixed = recipe.epitome is not None and recipe.epitome.index == "fixed"
    cost = _cost(recipe, "cpu" if fixed else "meta")
    return Counted(cost.params, cost.madds, cost.madds_interpolation)


def _cost(recipe: Recipe, device: str) -> Cost:
    with torch.device(device):
        example = torch.zeros(1, *_shape(recipe))
        return count(first_model(recipe, example).model.eval(), example)


def _shape(recipe: Recipe) -> tuple[int, ...]:
    if recipe.sound is not None:
        return 1, round(recipe.sound.clip_seconds * recipe.sound.sample_rate)
    size = CIFAR if recipe.images is None else recipe.images.size
    return 3, size, size


def rendered(table: Mapping[str, Any], counts: Mapping[str, Counted]) -> str:
    """One table in Markdown; columns that the paper leaves empty in every row are left out."""
    columns = [
        key for key in ("accuracy", "params", "madds") if any(row["paper"][key] is not None for row in table["rows"])
    ]
    heads = {"accuracy": "accuracy printed (%)", "params": "params printed (M)", "madds": "MAdds printed (M)"}
    titles = [
        "row",
        "recipe",
        *(heads[key] for key in columns),
        "params, ours (M)",
        "MAdds, ours (M)",
        "of it interpolation",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for row in table["rows"]:
        own = counts[row["recipe"]]
        printed = ["-" if row["paper"][key] is None else f"{row['paper'][key]}" for key in columns]
        ours = [
            f"{own.params / 1e6:.3f}",
            f"{own.madds / 1e6:.1f}",
            f"{own.interpolation / 1e6:.1f}" if own.interpolation else "-",
        ]
        lines.append(
            "| " + " | ".join([row["label"].replace("*", "\\*"), f"`{row['recipe']}`", *printed, *ours]) + " |"
        )
    return "\n".join(lines) + "\n"


# ---- readings of what the paper says in a phrase ----


def front_heavy(c: float = 0.75) -> str:
    """Readings of "-A": c to a power that changes evenly from the first 1x1 convolution to the last."""
    lines = [
        "| powers of c | params (M) | of them never read (M) | MAdds (M) | of it interpolation |",
        "|---|" + "---:|" * 4,
    ]
    for first, last in POWERS:
        with torch.device("meta"):
            model = mobilenetv2()
            plan, unread = _raised(model, mobilenetv2_plan(model, c, index="fixed"), c, first, last)
            convert_(model, plan)
            cost = count(model, torch.zeros(1, 3, 224, 224))
        cells = (f"{cost.params / 1e6:.3f}", f"{unread / 1e6:.3f}", *_madds(cost))
        lines.append(f"| {first:g} to {last:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _raised(model: nn.Module, uniform: Plan, c: float, first: float, last: float) -> tuple[Plan, int]:
    """The plan with other powers of c, and how many numbers of its epitomes lie beyond the weight."""
    modules: dict[str, Any] = dict(model.named_modules())
    layers, unread = {}, 0
    for i, (name, layer) in enumerate(uniform.layers.items()):
        shape, axis = list(modules[name].weight.shape), i % 2  # filters of the first, inputs of the second
        whole = shape[axis]
        shape[axis] = int(c ** (first + (last - first) * i / (len(uniform.layers) - 1)) * whole + 1e-9)
        unread += max(0, shape[axis] - whole) * shape[1 - axis]
        layers[name] = replace(layer, epitome_shape=tuple(shape))
    return Plan(layers), unread


def grouped_squeeze(c: float = 0.5) -> str:
    """EfficientNet with and without grouped squeeze-excitation."""
    lines = ["| network | squeeze-excitation | compressed | params (M) | MAdds (M) | of it interpolation |"]
    lines.append("|---|---|---|" + "---:|" * 3)
    for variant in ("b0", "b1"):
        for grouped in (False, True):
            for what, last in (("nothing", None), ("the blocks' 1x1", False), ("and the last convolution", True)):
                with torch.device("meta"):
                    model = efficientnet(variant, grouped_squeeze=grouped)
                    if last is not None:
                        convert_(model, efficientnet_plan(model, c, last_conv=last, index="fixed"))
                    cost = count(model, torch.zeros(1, 3, 224, 224))
                kind = "grouped" if grouped else "as it is"
                cells = (variant, kind, what, f"{cost.params / 1e6:.3f}", *_madds(cost))
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _madds(cost: Cost) -> tuple[str, str]:
    return f"{cost.madds / 1e6:.1f}", f"{cost.madds_interpolation / 1e6:.1f}" if cost.madds_interpolation else "-"


if __name__ == "__main__":
    sys.exit(main())
