"""Our counts beside other tools' and the paper's: makes `docs/reconciliation.md` and its JSON.

    python benchmarks/reconcile.py            # writes both
    python benchmarks/reconcile.py --check    # exit status 1 if the committed page is not what this makes

Every number on the page is counted here or quoted from `paper_tables.py`; explanations are marked as guesses.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import paper_tables as paper
import reconcile_counts as ours
import reconcile_guesses as guesses
from paper_tables import Printed
from reconcile_claims import claims_table
from reconcile_counts import Counted
from reconcile_format import HEAD, change, comparison, millions, same, span, table

ROOT = Path(__file__).resolve().parents[1]
PAGE_PATH = ROOT / "docs" / "reconciliation.md"
TEMPLATE_PATH = ROOT / "benchmarks" / "reconciliation_template.md"
JSON_PATH = ROOT / "benchmarks" / "results" / "reconcile.json"
WIDTHS = (0.75, 0.5, 0.35, 0.18)


def main() -> int:
    """Write the page and the JSON, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed page, write nothing")
    checking = parser.parse_args().check
    page, counts = report()
    if checking:
        same = PAGE_PATH.read_text(encoding="utf-8") == page and committed_counts() == counts
        print("the committed page is up to date" if same else "the committed page differs: run benchmarks/reconcile.py")
        return 0 if same else 1
    PAGE_PATH.write_text(page, encoding="utf-8")
    data = {"environment": environment(), "counts": counts}
    JSON_PATH.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


def environment() -> dict[str, str]:
    """Versions that the counts were made with."""
    packages = {name: version(name) for name in ("torch", "torchvision", "fvcore")}
    return {"command": "python benchmarks/reconcile.py", "python": platform.python_version(), **packages}


def committed_counts() -> dict[str, Any]:
    """What the committed JSON says."""
    return json.loads(JSON_PATH.read_text(encoding="utf-8"))["counts"]


def report() -> tuple[str, dict[str, Any]]:
    """The page's text, and every count by name."""
    counts = networks()
    sections = {
        "worked": worked_example(),
        "whole": whole_network(),
        "imagenet": imagenet_table(counts),
        "multiplier": multiplier_table(counts),
        "rates": rate_table(),
        "subsets": subset_table(counts),
        "cifar": cifar_table(counts),
        "efficientnet": efficientnet_table(counts),
        "claims": claims_table(counts),
        **imagenet_facts(counts),
        **cifar_facts(counts),
        **efficientnet_facts(counts),
    }
    template = TEMPLATE_PATH.read_text(encoding="utf-8")
    return template.format(**sections), {name: one.to_dict() for name, one in counts.items()}


def networks() -> dict[str, Counted]:
    """Every network of the tables, counted once."""
    found = {"imagenet dense": ours.counted(partial(ours.imagenet_narrow, 1.0), 224)}
    for c in WIDTHS:
        found[f"imagenet narrow {c}"] = ours.counted(partial(ours.imagenet_narrow, c), 224)
        found[f"imagenet epitome {c}"] = ours.counted(partial(ours.imagenet_epitome, c), 224)
    for width in paper.WIDTH_MULTIPLIER:
        found[f"width multiplier {width}"] = ours.counted(partial(ours.width_multiplier, width), 224)
    found["cifar dense"] = ours.counted(partial(ours.cifar_narrow, 1.0, 1.0), 32)
    found["cifar narrow 0.18"] = ours.counted(partial(ours.cifar_narrow, 0.18, 0.18), 32)
    found["cifar narrow 0.18, classifier 0.5"] = ours.counted(partial(ours.cifar_narrow, 0.18, 0.09), 32)
    found["cifar epitome 0.18"] = ours.counted(partial(ours.cifar_epitome, 0.18), 32)
    found["cifar epitome 0.18, classifier 0.5"] = ours.counted(partial(ours.cifar_epitome, 0.18, 0.5), 32)
    found["cifar classifier only 0.5"] = ours.counted(ours.cifar_classifier_only, 32)
    found["cifar dense with shortcuts"] = ours.counted(guesses.WithShortcuts, 32)
    for variant, sizes in {"b0": (224,), "b1": (224, 240)}.items():
        for size in sizes:
            found[f"{variant} dense {size}"] = ours.counted(partial(ours.efficientnet, variant, None), size)
            found[f"{variant} epitome {size}"] = ours.counted(partial(ours.efficientnet, variant, 0.5), size)
    return found


# ---- why tools disagree ----


def worked_example() -> str:
    """Layer by layer in three tools."""
    tools = ours.in_three_tools(ours.small_network(), 32)
    names = {"0": "convolution 3x3, stride 2", "1": "batch norm", "2": "ReLU6", "3": "depthwise 3x3"}
    names |= {"4": "batch norm", "5": "ReLU6", "6": "convolution 1x1 with bias", "7": "mean", "9": "linear with bias"}
    rows = []
    for name, what in names.items():
        written, result = ours.by_hand(name) if name in ours.BY_HAND else ("-", 0)
        flops, fvcore = tools.torch_by_module.get(name, 0), tools.fvcore_by_module.get(name, 0)
        rows.append((what, written, f"{result:,}", f"{flops:,}", f"{fvcore:,}"))
    hand = sum(ours.by_hand(name)[1] for name in ours.BY_HAND)
    if hand != tools.ours:
        raise RuntimeError(f"count says {tools.ours}, the written products sum to {hand}")
    rows.append(("**total**", "", f"{tools.ours:,}", f"{tools.torch_flops:,}", f"{tools.fvcore_total:,}"))
    return table(("layer", "by hand", "ours (MAdds)", "torch (FLOPs)", "fvcore"), rows)


def whole_network() -> str:
    """MobileNetV2 at 224x224, and what other conventions would make of it."""
    build = partial(ours.imagenet_narrow, 1.0)
    tools, outputs = ours.in_three_tools(build(), 224), ours.elements(build, 224)
    operators = tools.fvcore_by_operator
    convolved = operators["conv"] + operators["linear"]
    other = ", ".join(f"{name} {n:,}" for name, n in operators.items() if name not in ("conv", "linear"))
    half, plain, norm = tools.torch_flops // 2, tools.ours, outputs.batch_norm
    rows = [
        ("`epitorch.count`", plain, "one multiply-add is 1"),
        ("`torch.utils.flop_counter`", tools.torch_flops, f"one multiply-add is 2; half of it: {same(half, plain)}"),
        ("fvcore, convolutions and linear layers", convolved, f"one multiply-add is 1: {same(convolved, plain)}"),
        ("fvcore, its total", tools.fvcore_total, f"and {other}"),
        ("ours + bias", plain + outputs.bias, f"one addition for each of {outputs.bias:,} outputs of the classifier"),
        ("ours + activations", plain + outputs.activation, f"one operation for each of {outputs.activation:,} outputs"),
        ("ours + batch norm", plain + norm, f"one operation for each of {norm:,} outputs"),
        ("ours + batch norm as two", plain + 2 * norm, "a multiplication and an addition each"),
    ]
    lines = [f"| {what} | {number:,} | {remark} |" for what, number, remark in rows]
    return "\n".join(["| count | number | what it is |", "|---|---:|---|", *lines])


# ---- MobileNetV2 on ImageNet ----


def imagenet_table(counts: dict[str, Counted]) -> str:
    """The paper's table "Ablation"."""
    rows = [comparison(paper.IMAGENET_DENSE, counts["imagenet dense"])]
    rows += [comparison(paper.IMAGENET_NARROW[c], counts[f"imagenet narrow {c}"]) for c in WIDTHS]
    rows += [comparison(paper.IMAGENET_EPITOME[c], counts[f"imagenet epitome {c}"]) for c in WIDTHS]
    return table(HEAD, rows)


def multiplier_table(counts: dict[str, Counted]) -> str:
    """Rows that the paper cites from elsewhere: a check of our convention."""
    return table(HEAD, [comparison(row, counts[f"width multiplier {c}"]) for c, row in paper.WIDTH_MULTIPLIER.items()])


def rate_table() -> str:
    """The printed compression rates against the printed parameters."""
    rows = []
    for c in WIDTHS:
        row, dense = paper.IMAGENET_EPITOME[c], float(paper.IMAGENET_DENSE.params)
        implied = dense / float(row.rate)
        rows.append((row.row, row.rate, f"{dense / float(row.params):.3f}", f"{implied:.3f}"))
    return table(("row", "rate printed", "3.4 / params printed", "params that the rate implies (M)"), rows)


def subset_table(counts: dict[str, Counted]) -> str:
    """Could some layers have been left out? The closest combination for each column."""
    rows = []
    for title, printed in (("narrow", paper.IMAGENET_NARROW), ("epitome", paper.IMAGENET_EPITOME)):
        parts = {c: guesses.by_group(counts[f"imagenet {title} {c}"]) for c in WIDTHS}
        for which, (column, what) in enumerate((("params", "parameters"), ("madds", "MAdds"))):
            best = guesses.closest_subset([(parts[c], float(getattr(printed[c], column))) for c in WIDTHS], which)
            missing = ", ".join(words for name, words in guesses.GROUPS.items() if name not in best.groups)
            rows.append(f"| {title}, {what} | {missing} | {best.worst:.3f} |")
    head = ["| rows | left out in the closest count | worst row still off by (M) |", "|---|---|---:|"]
    return "\n".join(head + rows)


def imagenet_facts(counts: dict[str, Counted]) -> dict[str, str]:
    """Numbers in the text on MobileNetV2."""
    narrow = {c: counts[f"imagenet narrow {c}"] for c in WIDTHS}
    epitome = {c: counts[f"imagenet epitome {c}"] for c in WIDTHS}
    over = {c: narrow[c].madds / 1e6 - float(paper.IMAGENET_NARROW[c].madds) for c in WIDTHS}
    executed = [epitome[c].madds / 1e6 - float(paper.IMAGENET_EPITOME[c].madds) for c in WIDTHS]
    plain = [epitome[c].plain / 1e6 - float(paper.IMAGENET_EPITOME[c].madds) for c in WIDTHS]
    last = guesses.by_group(narrow[0.5])["last"][1] / 1e6
    return {
        "dense_params": millions(counts["imagenet dense"].params, 3),
        "narrow_over": span(list(over.values())),
        "last": f"{last:.1f}",
        "narrow_left": span([last - over[c] for c in WIDTHS]),
        "epitome_over": span(executed),
        "epitome_plain_over": span(plain),
    }


# ---- CIFAR-10 ----


def cifar_table(counts: dict[str, Counted]) -> str:
    """Tables "CIFAR10" and "CIFAR10 FC Compress"."""
    alone = Printed("(classifier halved, all else dense)", "", "", "")
    return table(
        HEAD,
        [
            comparison(paper.CIFAR_DENSE, counts["cifar dense"]),
            comparison(paper.CIFAR_NARROW, counts["cifar narrow 0.18"]),
            comparison(paper.CIFAR_EPITOME, counts["cifar epitome 0.18"]),
            comparison(paper.CLASSIFIER_NARROW, counts["cifar narrow 0.18, classifier 0.5"]),
            comparison(paper.CLASSIFIER_EPITOME, counts["cifar epitome 0.18, classifier 0.5"]),
            ("classifier alone halved", *comparison(alone, counts["cifar classifier only 0.5"])[1:]),
        ],
    )


def cifar_facts(counts: dict[str, Counted]) -> dict[str, str]:
    """Numbers in the text on CIFAR-10."""
    dense, narrow = float(paper.CIFAR_DENSE.madds), float(paper.CIFAR_NARROW.madds)
    _, near_dense, near_narrow = guesses.closest_strides(dense, narrow)
    variant, norm = counts["cifar dense with shortcuts"], ours.elements(guesses.WithShortcuts, 32).batch_norm
    parts = guesses.by_group(counts["cifar epitome 0.18"])
    pointwise = ("first pointwise", "expansions", "projections", "last", "classifier")
    halved = counts["cifar dense"].params - counts["cifar classifier only 0.5"].params
    return {
        "near_dense": f"{near_dense:.2f}",
        "near_narrow": f"{near_narrow:.2f}",
        "shortcut_madds": millions(variant.madds, 2),
        "shortcut_norm": millions(variant.madds + 2 * norm, 2),
        "shortcut_params": millions(variant.params, 3),
        "halved": f"{halved:,}",
        "pointwise": millions(sum(parts[name][0] for name in pointwise), 3),
    }


# ---- EfficientNet ----


def efficientnet_table(counts: dict[str, Counted]) -> str:
    """Rows of "ImageNet-cross comparison" and the dense networks, which have no row there."""
    none = Printed("", "", "", "")
    rows = []
    for name in ("b0 dense 224", "b0 epitome 224", "b1 dense 224", "b1 epitome 224", "b1 dense 240", "b1 epitome 240"):
        variant, kind, size = name.split()
        printed = paper.EFFICIENTNET[variant] if kind == "epitome" else none
        row = comparison(printed, counts[name])
        title = f"{printed.row or 'dense ' + variant}, {size}x{size}"
        rows.append((title, row[1] or "-", *row[2:]))
    return table(HEAD, rows)


def efficientnet_facts(counts: dict[str, Counted]) -> dict[str, str]:
    """Numbers in the text on EfficientNet."""
    printed = float(paper.EFFICIENTNET["b1"].madds)
    return {f"b1_{size}": change(counts[f"b1 epitome {size}"].madds / 1e6, printed) for size in (224, 240)}


if __name__ == "__main__":
    sys.exit(main())
