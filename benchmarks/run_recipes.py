"""Run recipes for several seeds, some at a time, and sum up.

    python benchmarks/run_recipes.py recipes/cifar10-short --data DIR --out runs/cifar10-short \
        --seeds 0 1 2 --jobs 8 --minutes 9

Each run is `epitorch train` in a process of its own. Seeds go one after the other, so that what is finished when the
time is up is complete: a seed is not begun when less time is left than the last one took. `OUT/summary.json` and
`OUT/summary.md` hold each run and, for each recipe, mean and standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any


def main() -> int:
    arguments = _arguments()
    recipes = [
        recipe for path in arguments.recipes for recipe in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])
    ]
    missing = [str(recipe) for recipe in recipes if not recipe.is_file()]
    if missing or not recipes:
        print(f"error: no such recipes: {', '.join(missing) or arguments.recipes}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * arguments.minutes
    took, failed = 0.0, []
    for seed in arguments.seeds:
        if took > deadline - time.monotonic():
            print(f"seed {seed} not begun: the last one took {took:.0f} s")
            break
        begun = time.monotonic()
        with ThreadPoolExecutor(arguments.jobs) as pool:
            codes = list(pool.map(lambda recipe: _run(recipe, seed, arguments), recipes))  # noqa: B023
        failed += [f"{recipe.stem} seed {seed}" for recipe, code in zip(recipes, codes, strict=True) if code]
        took = time.monotonic() - begun
        print(f"seed {seed}: {took:.0f} s", flush=True)
        _sum_up(arguments.out)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path, nargs="+", help="files, or folders of them")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--threads", type=int, default=None, help="OMP_NUM_THREADS of each run")
    return parser.parse_args()


def _run(recipe: Path, seed: int, arguments: argparse.Namespace) -> int:
    out = arguments.out / f"{recipe.stem}-seed{seed}"
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "epitorch", "train", str(recipe), "--data", str(arguments.data)]
    command += ["--out", str(out), "--seed", str(seed)]
    environment = dict(os.environ)
    if arguments.threads:
        environment["OMP_NUM_THREADS"] = str(arguments.threads)
    with (out / "console.log").open("w", encoding="utf-8") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode


def _sum_up(out: Path) -> None:
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*/results.json"))]
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run["name"], []).append(run)
    rows = [_row(name, group) for name, group in sorted(groups.items())]
    rows.sort(key=lambda row: row["params"])
    (out / "summary.json").write_text(json.dumps({"rows": rows, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    (out / "summary.md").write_text(_table(rows), encoding="utf-8")


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    test = [run["accuracy"]["test"] for run in runs]
    gaps = [run["accuracy"]["gap"] for run in runs if run["accuracy"]["gap"] is not None]
    return {
        "name": name,
        "seeds": [run["seed"] for run in runs],
        "n": len(runs),
        "test_mean": mean(test),
        "test_std": stdev(test) if len(test) > 1 else None,
        "heldout_mean": mean(run["accuracy"]["heldout"][-1] for run in runs),
        "gap_mean": mean(gaps) if gaps else None,
        "train_loss": mean(run["loss"]["train"][-1] for run in runs),
        "params": runs[0]["parameters"]["total"],
        "madds": runs[0]["madds"]["executed"],
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| recipe | test % | held-out % | train loss | gap | params | MAdds (M) | n |", "|" + "---|" * 8]
    for row in rows:
        spread = f" +- {100 * row['test_std']:.2f}" if row["test_std"] is not None else ""
        gap = f"{100 * row['gap_mean']:+.2f}" if row["gap_mean"] is not None else ""
        lines.append(
            f"| {row['name']} | {100 * row['test_mean']:.2f}{spread} | {100 * row['heldout_mean']:.2f} "
            f"| {row['train_loss']:.3f} | {gap} | {row['params']:,} | {row['madds'] / 1e6:.2f} | {row['n']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
