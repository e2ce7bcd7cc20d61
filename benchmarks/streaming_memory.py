"""Memory along an epoch of streamed images: does it stay flat once the shuffle buffer is full?

    python benchmarks/streaming_memory.py --data DIR --out benchmarks/results/streaming_memory.json

DIR holds JPEGs in a parquet file, such as shared/data/imagenet1k-sample. They are repeated into shards of both kinds, a
few thousand images each, and one epoch is streamed with a worker process through timm's training transform. VmRSS and
VmHWM (the peak) of both processes are read from /proc along the way. Then twelve epochs are read and shuffled, in one
process and without decoding: a slow leak would add up. The control
keeps a quarter of every batch: there memory must grow, or the measurement shows nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from epitorch.training.data_images import load_image_training
from epitorch.training.data_kinds import make_loader
from epitorch.training.data_workers import StreamLoader
from epitorch.training.recipe_images import ImagesSection

IMAGES, SHARD, BUFFER, BATCH, HELD_OUT = 6000, 250, 1000, 50, 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epoch", help=argparse.SUPPRESS)  # a key of PLACES: one measurement, in here
    arguments = parser.parse_args()
    if arguments.epoch:
        print(
            json.dumps(reading(arguments.data) if "read" in arguments.epoch else epoch(arguments.data, arguments.epoch))
        )
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sizes = {kind: write(Path(folder) / kind, kind, arguments.data) for kind in ("parquet", "tar")}
        measured = {kind: measure(Path(folder) / place, kind) for kind, place in PLACES.items()}
    report = {**about(), "bytes_of_shards": sizes, "measured": measured}
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


PLACES = {"parquet": "parquet", "tar": "tar", "parquet_read": "parquet", "tar_read": "tar", "control": "tar"}


def about() -> dict[str, Any]:
    names = ("torch", "timm", "webdataset", "pyarrow", "pillow")
    return {
        "what": "resident memory (VmRSS, MiB) along an epoch of streamed images",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "cpu": cpu(),
        "n": 1,
        "images": IMAGES,
        "images_a_shard": SHARD,
        "shuffle_buffer": BUFFER,
        "batch_size": BATCH,
        "workers": 1,
    }


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(folder: Path, kind: str) -> dict[str, Any]:
    """In a process of its own: peaks are for ever."""
    command = [sys.executable, __file__, "--data", str(folder), "--epoch", kind]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


# ---- shards ----


def write(folder: Path, kind: str, source: Path) -> int:
    """Write the shards and return their bytes."""
    folder.mkdir()
    (file,) = source.glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    for shard in range(IMAGES // SHARD):
        part = [rows[i % len(rows)] for i in range(shard * SHARD, (shard + 1) * SHARD)]
        (write_parquet if kind == "parquet" else write_tar)(folder, shard, part)
    return sum(file.stat().st_size for file in folder.iterdir())


def write_parquet(folder: Path, shard: int, rows: list[dict[str, Any]]) -> None:
    name = f"train-{shard:05d}-of-{IMAGES // SHARD:05d}.parquet"
    schema = pa.schema([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())])
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / name, row_group_size=100)


def write_tar(folder: Path, shard: int, rows: list[dict[str, Any]]) -> None:
    with tarfile.open(folder / f"sample-train-{shard:04d}.tar", "w") as tar:
        for i, row in enumerate(rows):
            for suffix, content in (("jpg", row["image"]["bytes"]), ("cls", str(row["label"]).encode())):
                info = tarfile.TarInfo(f"{shard:04d}{i:04d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


# ---- one epoch ----


def reading(folder: Path) -> dict[str, Any]:
    """Memory after each of twelve epochs of reading and shuffling."""
    images = load_image_training(folder, ImagesSection(shuffle_buffer=BUFFER), HELD_OUT).train
    points = []
    for number in range(12):
        loader = StreamLoader(images, BATCH, shuffle=True, drop_last=True)
        loader.set_epoch(number)
        read = sum(len(sample.data) for sample in loader.next_pass().samples(0, 1))
        points.append({"epoch": number, "bytes": read, "VmRSS": status(psutil.Process().pid, "VmRSS")})
    return {"points": points}


def epoch(folder: Path, kind: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    data = load_image_training(folder, ImagesSection(shuffle_buffer=BUFFER), HELD_OUT)
    loader = make_loader(data.train, BATCH, torch.device("cpu"), shuffle=True, workers=1)
    kept: list[Any] = []
    points = []
    for number, (images, _) in enumerate(loader):
        if kind == "control":
            kept.append(images[: BATCH // 4].clone())
        if number % 10 == 0 or number + 1 == len(loader):
            points.append({"batch": number, **memory()})
    return {"batches": len(loader), "points": points, **summary(points)}


def memory() -> dict[str, float]:
    """MiB of this process and of its worker."""
    own = psutil.Process()
    seen = dict(zip(("main", "worker"), (own, *own.children()), strict=False))  # the worker ends before the last look
    return {f"{name}_{key}": status(process.pid, key) for name, process in seen.items() for key in ("VmRSS", "VmHWM")}


def status(pid: int, key: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return round(int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) / 1024, 1)


def summary(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over the second and the last quarter of the epoch: the buffer is full by then."""
    quarter = len(points) // 4
    parts = {"second_quarter": points[quarter : 2 * quarter], "last_quarter": points[-quarter:]}
    keys = ("main_VmRSS", "worker_VmRSS")
    means = {
        name: {key: round(sum(p[key] for p in part if key in p) / sum(key in p for p in part), 1) for key in keys}
        for name, part in parts.items()
    }
    growth = {key: round(means["last_quarter"][key] - means["second_quarter"][key], 1) for key in keys}
    return {"means": means, "growth": growth}


if __name__ == "__main__":
    sys.exit(main())
