"""Spoil checkpoints in every way that we can think of, load them, and see that nothing but a CheckpointError comes out.

Each input is one small checkpoint (digits network with an epitome layer, in one of four storages) with one to four
mutations of `config.json` and `model.safetensors`: of bytes, of the JSON's structure, of the header of the tensors.
Half of the inputs (--right) get their hashes made right again, as an attacker would, so that what stands behind them is
reached. An input passes if it raises CheckpointError, or if it loads (the mutation was harmless). It fails if any other
exception comes, if a file is opened or a process started that the checkpoint does not need (an audit hook watches), if
it takes more than --seconds, or if the process grows beyond --memory.

    python benchmarks/fuzz_checkpoint.py --inputs 100000 --out benchmarks/results/fuzz_checkpoint.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoint_mutations import CONFIG, WEIGHTS, Spoiled, seeds, spoil
from epitorch.checkpoint import load_checkpoint
from epitorch.errors import CheckpointError

# ---- one input ----


class Watch:
    """Notes what a loading must not do: start processes, open files elsewhere, connect, unpickle, import by name."""

    FORBIDDEN = ("os.system", "subprocess.Popen", "socket.connect", "pickle.find_class", "os.exec", "os.remove")

    def __init__(self, folder: Path) -> None:
        self.folder, self.on, self.seen = str(folder), False, list[str]()
        self.allowed = (str(folder), *(path for path in sys.path if path), sys.prefix, sys.base_prefix)
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in self.FORBIDDEN:
            self.seen.append(f"{event} {arguments!r:.100}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith(self.allowed):
                self.seen.append(f"open {path:.100}")


def outcome(made: Spoiled, folder: Path, watch: Watch, seconds: float) -> tuple[str, str | None]:
    """What loading came to, and what was wrong with that."""
    (folder / CONFIG).write_bytes(made.config)
    (folder / WEIGHTS).write_bytes(made.weights)
    watch.seen.clear()
    begun = time.process_time()
    watch.on = True
    try:
        word, wrong = _loaded(folder)
    finally:
        watch.on = False
    took = time.process_time() - begun
    if took > seconds:
        wrong = f"{took:.1f} s"
    return word, wrong or (f"did {watch.seen[0]}" if watch.seen else None)


def _loaded(folder: Path) -> tuple[str, str | None]:
    try:
        model = load_checkpoint(folder).model
    except CheckpointError as error:
        return _kind(error), None if len(str(error)) < 4000 else f"a message of {len(str(error))} characters"
    except BaseException as error:
        return type(error).__name__, f"{type(error).__name__}: {error!s:.300}"
    assert isinstance(model, nn.Module)
    return "loaded", None


def _kind(error: CheckpointError) -> str:
    text = str(error)
    known = ("is damaged", "another architecture", "cannot be rebuilt", "is missing", "format", "not a finite number")
    return next((word for word in known if word in text.replace("\n", " ")), "other CheckpointError")


# ---- all of them ----


@dataclass
class Found:
    """Counts, and what failed."""

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    mutations: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)


def fuzz(
    inputs: int, seed: int, *, seconds: float = 5.0, keep: Path | None = None, tell: int = 0, right: float = 0.5
) -> Found:
    """Load so many spoiled checkpoints; failures are kept as files in `keep`."""
    found = Found()
    for name in ("timm", "torchvision", "torchvision.models.detection"):
        importlib.import_module(name)  # what importing opens is not the checkpoint's doing
    fast = "/dev/shm" if os.path.isdir("/dev/shm") else None  # every input is written
    with tempfile.TemporaryDirectory(dir=fast) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(place) / "c"
        sound = seeds(folder)
        watch = Watch(folder)
        for number in range(inputs):
            rng = random.Random(f"{seed}-{number}")
            made = spoil(rng.choice(sound), rng, right)
            word, wrong = outcome(made, folder, watch, seconds)
            found.inputs += 1
            found.outcomes[word] += 1
            found.mutations.update(made.how)
            if wrong is not None:
                found.failures.append({"number": number, "how": made.how, "wrong": wrong})
                _keep(made, keep, number)
            if tell and number % tell == tell - 1:
                print(f"{number + 1:,} inputs, {len(found.failures)} failures, {dict(found.outcomes)}", flush=True)
    return found


def _keep(made: Spoiled, keep: Path | None, number: int) -> None:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{number}.{CONFIG}").write_bytes(made.config)
        (keep / f"{number}.{WEIGHTS}").write_bytes(made.weights)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--right", type=float, default=0.5, help="share of inputs whose hashes are made right")
    parser.add_argument("--seconds", type=float, default=5.0, help="of processor time for one input")
    parser.add_argument("--memory", type=int, default=6, help="GiB of address space for the process")
    parser.add_argument("--keep", type=Path, help="folder for inputs that fail")
    parser.add_argument("--out", type=Path, help="JSON file; the run is added to those that it has")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    limit = arguments.memory << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    begun = time.process_time()
    found = fuzz(
        arguments.inputs,
        arguments.seed,
        seconds=arguments.seconds,
        keep=arguments.keep,
        tell=2000,
        right=arguments.right,
    )
    report = {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": arguments.seed,
        "inputs": found.inputs,
        "failures": found.failures,
        "outcomes": dict(found.outcomes.most_common()),
        "mutations": dict(found.mutations.most_common()),
        "seconds_allowed": arguments.seconds,
        "address_space_gib": arguments.memory,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "processor_seconds": round(time.process_time() - begun),
    }
    print(json.dumps({key: report[key] for key in ("inputs", "failures", "outcomes", "peak_memory_mib")}, indent=1))
    if arguments.out is not None:
        _add(report, arguments.out)
    return 1 if found.failures else 0


def _add(run: dict[str, Any], out: Path) -> None:
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"mended": [], "runs": []}
    runs = [*before["runs"], run]
    report = {
        "what": "spoiled checkpoints loaded by load_checkpoint; a failure is anything but a CheckpointError or a model",
        "inputs": sum(r["inputs"] for r in runs),
        "failures": sum(len(r["failures"]) for r in runs),
        "mended": before["mended"],
        "runs": runs,
    }
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
