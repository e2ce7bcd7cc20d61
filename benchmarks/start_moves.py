"""How far learned starts move in training, from the `starts.json` that `epitorch train` writes beside a run.

    python benchmarks/start_moves.py results/trials/start-moves/*.json

One row per run: starts, how far they are in the end from where they began, in positions (not round the circle), and how
far from the nearest whole position.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any


def main() -> int:
    files = [Path(name) for name in sys.argv[1:]]
    if not files:
        print(__doc__)
        return 2
    print("| run | starts | moved, mean | median | largest | first epoch, mean | from whole, mean |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for file in files:
        begun, first, last = starts(json.loads(file.read_text(encoding="utf-8")))
        moved = [abs(b - a) for a, b in zip(begun, last, strict=True)]
        early = mean(abs(b - a) for a, b in zip(begun, first, strict=True))
        apart = mean(abs(value - round(value)) for value in last)
        print(
            f"| {file.stem} | {len(begun)} | {mean(moved):.3f} | {median(moved):.3f} | {max(moved):.2f} "
            f"| {early:.3f} | {apart:.3f} |"
        )
    return 0


def starts(content: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Before training, after the first epoch and at the end, of all layers."""
    histories = [history for layer in content["layers"].values() for history in layer.values() if history]
    begun, first, last = ([x for history in histories for x in flat(history[k])] for k in (0, 1, -1))
    return begun, first, last


def flat(value: Any) -> Iterator[float]:
    """Numbers in nested lists."""
    if not isinstance(value, list):
        yield float(value)
        return
    for item in value:
        yield from flat(item)


if __name__ == "__main__":
    sys.exit(main())
