"""What epitorch adds to `import torch`, and what `epitorch --help` takes: processor time of fresh processes, in turns.

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

AFTER_TORCH = "import time, torch; t = time.process_time(); {}; print(time.process_time() - t)"
HELP = (
    "import contextlib, io, time\n"
    "from epitorch.cli import main\n"
    "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(['--help'])\n"
    "print(time.process_time())"
)
CODES = {
    "epitorch": AFTER_TORCH.format("import epitorch; epitorch.convert_"),  # the first name loads all that is public
    "torch": AFTER_TORCH.format("import torch"),  # once more: what measuring itself takes
    "help": HELP,  # of the whole process
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CODES}
    for turn in range(arguments.rounds + 1):
        for name, times in seconds.items():
            done = subprocess.run([sys.executable, "-c", CODES[name]], capture_output=True, check=True)
            if turn:  # the first reads the files
                times.append(float(done.stdout))
    report = {
        "what": "processor time of epitorch's names after `import torch`, and of `epitorch --help`; fresh processes",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "n": arguments.rounds,
        "load_average": round(os.getloadavg()[0], 2),
        "milliseconds_median": {name: round(1000 * median(times), 1) for name, times in seconds.items()},
        "milliseconds_least": {name: round(1000 * min(times), 1) for name, times in seconds.items()},
    }
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
