"""CPU time of fitting all convolutions of ResNet-18 but the stem, both channel axes cut by the root of 2.

    python benchmarks/fit_time.py --out benchmarks/results/fit_time.json

The weights are freshly drawn: the time hardly depends on their values.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epitorch.spec import EpitomeSpec
from epitorch.warmstart import fit_epitome

FORMS: dict[str, Any] = {"separable": "separable", "grid": "grid"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    report = {
        "what": "fitting the 19 convolutions of ResNet-18 after the stem, epitomes cut by sqrt(2) on both channel axes",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": 1,
        "n": 1,
        "cpu_seconds": {form: _time(form) for form in FORMS},
    }
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if out:
        out.write_text(text, encoding="utf-8")
    return 0


def _weights() -> list[Tensor]:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    return [p.detach() for p in resnet18().parameters() if p.dim() == 4 and p.shape[1] > 3]


def _time(form: str) -> dict[str, float]:
    seconds = []
    for weight in _weights():
        shape = (*(int(n / 2**0.5) for n in weight.shape[:2]), *weight.shape[2:])
        spec = EpitomeSpec.create(weight.shape, shape, channel_starts=FORMS[form])
        begun = time.process_time()
        fit_epitome(weight, spec)
        seconds.append(time.process_time() - begun)
    return {"all_layers": round(sum(seconds), 1), "slowest_layer": round(max(seconds), 1)}


if __name__ == "__main__":
    sys.exit(main())
