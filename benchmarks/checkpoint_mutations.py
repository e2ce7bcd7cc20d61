"""How `fuzz_checkpoint.py` spoils a checkpoint: sound ones to begin with, and mutations of bytes, JSON and headers."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

import epitorch
from epitorch.checkpoint import save_checkpoint
from epitorch.checkpoint._config import content_hash
from epitorch.checkpoint._pretrained import describe
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
