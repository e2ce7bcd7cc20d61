"""ESC-10 by cross-validation: recipes x folds x seeds, some runs at a time, and their summary.

    python benchmarks/esc10.py --data DIR --out runs/esc10 --results results/esc10 --jobs 2

Each run is `epitorch train` in a process and a folder of its own, `OUT/METHOD-foldF-seedS`, with its console output in
`OUT/METHOD-foldF-seedS.log`. Kill it whenever you like and start it again with the same arguments: runs that are
finished are kept (if the recipe's text is still the same), the others begin anew. Seeds go one after the other and in
each the folds, so that what is finished is paired. After every run `RESULTS/summary.json`, `RESULTS/runs.json` and
`RESULTS/summary.md` are written anew, and the run's result and log are copied to `RESULTS/runs/`. Only the recipe's
seed and fold differ between the runs of one method.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from epitorch._files import write_atomic
from epitorch.errors import EpitorchError
from epitorch.results import RunResult, load_results
from epitorch.training.folds import cross_validation, paired_difference
from epitorch.training.recipe import load_recipe

METHODS = ["baseline", "wsnet-4x", "epitome-4x"]
PAIRS = [("epitome-4x", "wsnet-4x"), ("epitome-4x", "baseline"), ("wsnet-4x", "baseline")]
GRACE = 60  # seconds for a run to write its checkpoint after SIGTERM


@dataclass
class Job:
    """One run."""

    method: str
    recipe: str
    fold: int
    seed: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    begun: float = field(default=0.0)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name


def main() -> int:
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with FileLock(arguments.out / ".driver.lock", timeout=0):
            return _go(arguments)
    except Timeout:
        print(f"error: another driver is at work in {arguments.out}", file=sys.stderr)
        return 2
    except EpitorchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with meta/esc50.csv and audio/")
    parser.add_argument("--out", type=Path, default=Path("runs/esc10"), help="default: runs/esc10")
    parser.add_argument("--results", type=Path, default=Path("results/esc10"), help="default: results/esc10")
    parser.add_argument("--set", default="esc10", help="folder under recipes/, default esc10")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="recipes of that folder")
    parser.add_argument("--folds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each run")
    parser.add_argument("--max-steps", type=int, help="for a trial; give --out and --results folders of their own")
    return parser.parse_args()


def _go(arguments: argparse.Namespace) -> int:
    jobs = [
        Job(method, f"{arguments.set}/{method}", fold, seed, arguments.out / f"{method}-fold{fold}-seed{seed}")
        for seed in arguments.seeds
        for fold in arguments.folds
        for method in arguments.methods
    ]
    waiting = [job for job in jobs if not _finished(job)]
    _say(f"{len(jobs)} runs, {len(jobs) - len(waiting)} finished before, {arguments.jobs} at a time")
    _sum_up(jobs, arguments)
    failed = _work_through(waiting, jobs, arguments)
    for name in failed:
        _say(f"failed: {name}, see {arguments.out / name}.log")
    return 1 if failed else 0


def _work_through(waiting: list[Job], jobs: list[Job], arguments: argparse.Namespace) -> list[str]:
    queue, running = list(waiting), []
    failed, took = [], []
    try:
        while queue or running:
            while len(running) < arguments.jobs and (job := _next(queue)) is not None:
                running.append(_start(job, arguments))
            time.sleep(1)
            for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
                running.remove(job)
                took.append(time.monotonic() - job.begun)
                if not _finished(job):
                    failed.append(job.name)
                _sum_up(jobs, arguments)
                left = len(queue) + len(running)
                minutes = sum(took) / len(took) * left / arguments.jobs / 60
                state = "failed" if job.name in failed else "done"
                _say(f"{state} {job.name} in {took[-1]:.0f} s; {left} left, about {minutes:.0f} min")
    except KeyboardInterrupt:
        _stop(running)
        _say("stopped; start again with the same arguments to go on")
        raise SystemExit(130) from None
    return failed


def _next(queue: list[Job]) -> Job | None:
    """Take the first job whose folder is free: runs outlive a driver that was killed outright, and may finish."""
    for job in list(queue):
        if _finished(job):
            queue.remove(job)
        elif not _busy(job):
            queue.remove(job)
            return job
    return None


def _busy(job: Job) -> bool:
    if not (job.folder / ".lock").is_file():
        return False
    try:
        with FileLock(job.folder / ".lock", timeout=0):
            return False
    except Timeout:
        return True


def _start(job: Job, arguments: argparse.Namespace) -> Job:
    command = [sys.executable, "-m", "epitorch", "train", job.recipe, "--data", arguments.data, "--overwrite"]
    command += ["--fold", str(job.fold), "--seed", str(job.seed), "--out", str(job.folder)]
    if arguments.max_steps:
        command += ["--max-steps", str(arguments.max_steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    job.begun = time.monotonic()
    with job.folder.with_name(f"{job.name}.log").open("wb") as log:
        # a session of its own: Ctrl-C reaches the driver alone, which then stops its runs in order
        job.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    _say(f"begun {job.name}")
    return job


def _stop(running: list[Job]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes = [job.process for job in running if job.process is not None]
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _finished(job: Job) -> bool:
    """Whether the folder has a result of this recipe as it is now, this fold and this seed."""
    result = _result(job)
    if result is None:
        return False
    same = result.recipe_sha256 == load_recipe(job.recipe).sha256
    return same and result.seed == job.seed and result.recipe["sound"]["fold"] == job.fold


def _result(job: Job) -> RunResult | None:
    file = job.folder / "results.json"
    return load_results(file)[0] if file.is_file() else None


# ---- summary ----


def _sum_up(jobs: list[Job], arguments: argparse.Namespace) -> None:
    runs: dict[str, list[RunResult]] = {}
    for job in jobs:
        result = _result(job) if _finished(job) else None
        if result is not None:
            runs.setdefault(job.method, []).append(result)
            _keep(job, arguments.results / "runs" / job.name)
    if not runs:
        return
    pairs = [pair for pair in _pairs(arguments.methods) if set(pair) <= set(runs)]
    summary = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "seeds": arguments.seeds,
        "folds": arguments.folds,
        "complete": sum(map(len, runs.values())) == len(jobs),
        "methods": {method: _method(results) for method, results in runs.items()},
        "differences": [asdict(paired_difference(runs[a], runs[b])) for a, b in pairs],
        "environment": next(iter(runs.values()))[-1].environment,
    }
    rows = [_row(method, result) for method, results in runs.items() for result in results]
    _write(arguments.results / "summary.json", json.dumps(summary, indent=1))
    _write(arguments.results / "runs.json", json.dumps(rows, indent=1))
    _write(arguments.results / "summary.md", _markdown(summary))


def _keep(job: Job, folder: Path) -> None:
    """Copy what is worth committing of a run."""
    for name in ("results.json", "train.log"):
        source = job.folder / name
        if source.is_file():
            write_atomic(folder / name, source.read_bytes())


def _pairs(methods: list[str]) -> list[tuple[str, str]]:
    known = [pair for pair in PAIRS if set(pair) <= set(methods)]
    others = [method for method in methods if method not in METHODS]
    return known + [(method, "wsnet-4x") for method in others if "wsnet-4x" in methods]


def _method(results: list[RunResult]) -> dict[str, Any]:
    gaps = [result.accuracy.gap for result in results if result.accuracy.gap is not None]
    last = results[-1]
    return {
        **asdict(cross_validation(results)),
        "gap_mean": sum(gaps) / len(gaps) if gaps else None,
        "train_loss_mean": sum(result.loss["train"][-1] or 0.0 for result in results) / len(results),
        "parameters": last.parameters.total,
        "madds_executed": last.madds.executed,
        "seconds_mean": sum(result.seconds.total for result in results) / len(results),
        "epochs": last.data["epochs_run"],
        "recipe_sha256": last.recipe_sha256,
    }


def _row(method: str, result: RunResult) -> dict[str, Any]:
    return {
        "method": method,
        "fold": result.recipe["sound"]["fold"],
        "seed": result.seed,
        "test": result.accuracy.test,
        "test_learner": result.accuracy.test_learner,
        "heldout": result.accuracy.heldout[-1] if result.accuracy.heldout else None,
        "test_clips": result.accuracy.test_images,
        "train_loss": result.loss["train"][-1],
        "parameters": result.parameters.total,
        "madds_executed": result.madds.executed,
        "seconds": result.seconds.total,
        "steps": result.data["steps_run"],
        "command": shlex.join(result.command),
        "git_commit": result.environment["git_commit"],
        "date": result.date,
    }


def _markdown(summary: dict[str, Any]) -> str:
    lines = ["| method | test % | sd (runs) | n | parameters | MAdds (M) | train loss |", "|---|" + "---:|" * 6]
    for method, row in summary["methods"].items():
        lines.append(
            f"| {method} | {100 * row['mean']:.2f} | {_percent(row['sd'])} | {row['n']} | {row['parameters']:,} "
            f"| {row['madds_executed'] / 1e6:.1f} | {row['train_loss_mean']:.3f} |"
        )
    lines += ["", "| difference | points | standard error (pairs) | (folds) | n |", "|---|" + "---:|" * 4]
    for row in summary["differences"]:
        errors = f"{_percent(row['standard_error'])} | {_percent(row['standard_error_folds'])}"
        lines.append(f"| {row['first']} - {row['second']} | {100 * row['mean']:+.2f} | {errors} | {row['n']} |")
    return "\n".join([*lines, "", f"`{summary['command']}`"])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _write(path: Path, text: str) -> None:
    write_atomic(path, f"{text}\n".encode())


def _say(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
