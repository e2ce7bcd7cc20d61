"""What `import epitorch` adds to `import torch`: processor time of fresh processes, in turns.

python benchmarks/import_time.py --out benchmarks/results/import_time.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

CODE = "import time, torch; t = time.process_time(); import {module}; print(time.process_time() - t)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"epitorch": [], "torch": []}  # torch once more: what measuring itself takes
    for turn in range(arguments.rounds + 1):
        for module, times in seconds.items():
            done = subprocess.run([sys.executable, "-c", CODE.format(module=module)], capture_output=True, check=True)
            if turn:  # the first reads the files
                times.append(float(done.stdout))
    report = {
        "what": "processor time of `import epitorch` after `import torch`, fresh processes",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "n": arguments.rounds,
        "load_average": round(os.getloadavg()[0], 2),
        "milliseconds_median": {module: round(1000 * median(times), 1) for module, times in seconds.items()},
        "milliseconds_least": {module: round(1000 * min(times), 1) for module, times in seconds.items()},
    }
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
