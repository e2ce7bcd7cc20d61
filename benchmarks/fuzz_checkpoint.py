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
import contextlib
import copy
import importlib
import json
import os
import platform
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

import epitorch
from epitorch.checkpoint import load_checkpoint, save_checkpoint
from epitorch.checkpoint._config import content_hash
from epitorch.checkpoint._pretrained import describe
from epitorch.errors import CheckpointError
from epitorch.models.resolve import build_model

IMAGE = torch.zeros(1, 1, 8, 8)
WEIGHTS, CONFIG = "model.safetensors", "config.json"
# What a mutation meets that the ones before it have left nothing for.
UNFIT = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, StopIteration, struct.error)
STORAGES = (None, "float16", "bfloat16", "int8")
NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    4,
    7,
    255,
    2**16,
    2**31,
    2**32,
    2**53,
    2**63,
    2**64,
    10**30,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
]
WORDS = [
    "",
    "\ud800",
    "\0",
    "../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1:9/x",
    "os:system",
    "builtins:eval",
    "subprocess:run",
    "timm:hf-hub:evil/model",
    "timm:resnet18",
    "torchvision:resnet18",
    "torchvision:fasterrcnn_resnet50_fpn",
    "epitorch:mobilenetv2",
    "epitorch:resnet20",
    "factory:x",
    "conv3",
    "conv1",
    "conv3.epitome",
    "conv3.learner",
    "head",
    "float16",
    "int8",
    "grid",
    "fixed",
    "direct",
    "__class__",
    "a" * 5000,
    "%s%n{0}",
]
KEYS = [
    "pretrained",
    "weights",
    "checkpoint_path",
    "pretrained_cfg",
    "widths",
    "num_classes",
    "plan",
    "layers",
    "shared",
    "others",
    "epitomes",
    "epitome_shape",
    "block_in",
    "block_out",
    "index",
    "group_length",
    "__class__",
    "later",
]


# ---- the inputs ----


@dataclass
class Seed:
    """A sound checkpoint."""

    config: bytes
    weights: bytes


@dataclass
class Spoiled:
    """A spoiled one, and how it came about."""

    config: bytes
    weights: bytes
    how: list[str] = field(default_factory=list)


def seeds(folder: Path) -> list[Seed]:
    """A checkpoint for each storage, with and without the learner, and a dense one."""
    made = []
    for storage in STORAGES:
        for learner in (False, True):
            save_checkpoint(folder, *_network(), learner=learner, dtype=storage)  # type: ignore[arg-type]
            made.append(Seed((folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()))
    model = build_model("epitorch:digits_cnn", {"widths": [2, 4]})
    save_checkpoint(folder, model, describe(model, None, None, None, {}))
    made.append(Seed((folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()))
    return made


def _network() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = build_model("epitorch:digits_cnn", {"widths": [2, 2, 4]})
    epitorch.convert_(model, epitorch.Plan({"conv3": epitorch.LayerPlan((2, 1, 3, 3))}, {"conv1": "stem"}))
    given = epitorch.checkpoint.ModelInput((1, 8, 8), (0.5,), (0.25,), tuple("0123456789"))
    return model, describe(model, None, None, given, {"test_accuracy": 0.5})


def spoil(seed: Seed, rng: random.Random, right: float = 0.5) -> Spoiled:
    """Mutate a checkpoint once to four times."""
    made = Spoiled(seed.config, seed.weights)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        mutate = rng.choice(MUTATIONS)
        mutate(made, rng)
        made.how.append(mutate.__name__)
    if rng.random() < right:
        _make_right(made)
        made.how.append("hashes made right")
    return made


def _make_right(made: Spoiled) -> None:
    """The hashes that the spoiled content would have."""
    with contextlib.suppress(*UNFIT):
        content = json.loads(made.config)
        if isinstance(content.get("weights"), dict):
            content["weights"].update(sha256=sha256(made.weights).hexdigest(), bytes=len(made.weights))
        content.pop("sha256", None)
        made.config = json.dumps({**content, "sha256": content_hash(content)}).encode()


# ---- mutations of bytes ----


def _of_bytes(change: Callable[[bytearray, random.Random], bytes]) -> Callable[[Spoiled, random.Random], None]:
    def mutate(made: Spoiled, rng: random.Random) -> None:
        which = rng.choice(["config", "weights"])
        setattr(made, which, bytes(change(bytearray(getattr(made, which)), rng)))

    mutate.__name__ = change.__name__.strip("_")
    return mutate


def _place(data: bytearray, rng: random.Random) -> int:
    """Headers more often than what follows."""
    return rng.randrange(min(len(data), 600) if rng.random() < 0.5 else len(data)) if data else 0


def _flip(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 8])):
        if data:
            data[_place(data, rng)] ^= 1 << rng.randrange(8)
    return data


def _cut(data: bytearray, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _remove(data: bytearray, rng: random.Random) -> bytes:
    at = _place(data, rng)
    del data[at : at + rng.choice([1, 4, 8, 100])]
    return data


def _insert(data: bytearray, rng: random.Random) -> bytes:
    at = _place(data, rng)
    what = rng.choice([rng.randbytes(8), b"{", b"[" * 2000, b"\0" * 16, b'"', b"9" * 5000, b"\xff\xfe", b"NaN", b","])
    return data[:at] + what + data[at:]


def _double(data: bytearray, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at : at + 200] * 2 + data[at + 200 :]


def _swap(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(4):
        if data:
            a, b = _place(data, rng), _place(data, rng)
            data[a], data[b] = data[b], data[a]
    return data


def _nested(data: bytearray, rng: random.Random) -> bytes:
    depth = rng.choice([100, 1000, 100_000])
    return rng.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])


def _pickled(data: bytearray, rng: random.Random) -> bytes:
    return b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93\x8c\x08touch /x\x85R."


# ---- mutations of the configuration ----


def json_value(made: Spoiled, rng: random.Random) -> None:
    """Replace, remove, rename or repeat something in the configuration."""
    with contextlib.suppress(*UNFIT):
        content = json.loads(made.config)
        places = list(_places(content))
        if places:
            _change(*rng.choice(places), rng)
        made.config = json.dumps(content).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(below):
        yield value, key
        yield from _places(part)


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    way = rng.randrange(8)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[rng.choice(KEYS + WORDS)] = holder.pop(key)
    elif way == 2 and isinstance(holder, list):
        holder.extend([copy.deepcopy(holder[key])] * rng.choice([1, 3, 50]))
    elif way == 3 and isinstance(holder, dict):
        holder[rng.choice(KEYS + WORDS)] = _value(rng)
    elif way == 4 and type(holder[key]) in (int, float):
        holder[key] = holder[key] * rng.choice([0, -1, 2, 1000, 10**9])
    else:
        holder[key] = _value(rng)


def _value(rng: random.Random) -> Any:
    return rng.choice(
        [
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(WORDS),
            lambda: rng.choice([None, True, False, [], {}]),
            lambda: [rng.choice(NUMBERS) for _ in range(rng.choice([1, 2, 4, 40]))],
            lambda: {rng.choice(KEYS): rng.choice(NUMBERS)},
        ]
    )()


def bomb(made: Spoiled, rng: random.Random) -> None:
    """A network or an epitome of absurd size."""
    with contextlib.suppress(*UNFIT):
        content = json.loads(made.config)
        big = rng.choice([10**4, 10**5, 10**6, 10**9, 10**12])
        layer = next(iter((content.get("plan") or {"layers": {"": {}}})["layers"].values()))
        rng.choice(
            [
                lambda: content["arguments"].update(widths=[big, big]),
                lambda: content["arguments"].update(widths=[1] * rng.choice([10, 100, 100, 20_000])),
                lambda: content["arguments"].update(num_classes=big),
                lambda: layer.update(epitome_shape=[big, big, 3, 3]),
                lambda: layer.update(block_out=1, block_in=1, channel_starts="grid"),
                lambda: content.update(input={**content["input"], "shape": [big, big, big]}),
                lambda: content.update(model=rng.choice(WORDS), arguments={"num_classes": big}),
                lambda: content.update(input_shape=[big, big]),
            ]
        )()
        made.config = json.dumps(content).encode()


# ---- mutations of the header of the tensors ----


def header(made: Spoiled, rng: random.Random) -> None:
    """Change names, dtypes, shapes or offsets."""
    with contextlib.suppress(*UNFIT):
        length = struct.unpack("<Q", made.weights[:8])[0]
        content = json.loads(made.weights[8 : 8 + length])
        name = rng.choice(list(content))
        _change_tensor(content, name, rng)
        text = json.dumps(content).encode()
        made.weights = struct.pack("<Q", len(text)) + text + made.weights[8 + length :]


def _change_tensor(content: dict[str, Any], name: str, rng: random.Random) -> None:
    entry, other = content[name], content[rng.choice(list(content))]
    way = rng.randrange(8)
    if way == 0:
        del content[name]
    elif way == 1:
        content[rng.choice([*WORDS, *list(content)])] = content.pop(name)
    elif way == 2:
        entry["dtype"] = rng.choice(["F64", "F16", "BF16", "I8", "U8", "I64", "BOOL", "F8_E4M3", "C64", "F4", "x", 3])
    elif way == 3:
        entry["shape"] = rng.choice([[], [0], [10**18, 10**18], list(reversed(entry["shape"])), [*entry["shape"], 1]])
    elif way == 4:
        entry["data_offsets"] = rng.choice([[0, 2**63], [5, 1], other.get("data_offsets"), [-1, 4], [0], [2**64, 0]])
    elif way == 5:
        content[rng.choice(WORDS)] = copy.deepcopy(entry)
    elif way == 6:
        content["__metadata__"] = _value(rng)
    else:
        content[name], other_name = other, rng.choice(list(content))
        content[other_name] = entry


def header_length(made: Spoiled, rng: random.Random) -> None:
    """Promise a header of another length."""
    length = rng.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, 100_000_000, len(made.weights), len(made.weights) - 8])
    made.weights = struct.pack("<Q", max(0, length)) + made.weights[8:]


def values(made: Spoiled, rng: random.Random) -> None:
    """Overwrite numbers by others: not finite, of absurd size."""
    data = bytearray(made.weights)
    for _ in range(rng.choice([1, 4, 50])):
        at = rng.randrange(max(1, len(data) - 4))
        what = [float("nan"), float("inf"), -1e38, 1e30]
        data[at : at + 4] = rng.choice([struct.pack("<f", rng.choice(what)), rng.randbytes(4), b"\xff" * 4])
    made.weights = bytes(data)


MUTATIONS: list[Callable[[Spoiled, random.Random], None]] = [
    *(_of_bytes(change) for change in (_flip, _cut, _remove, _insert, _double, _swap, _nested, _pickled)),
    *[json_value] * 6,
    *[header] * 5,
    *[bomb] * 2,
    header_length,
    values,
]


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
