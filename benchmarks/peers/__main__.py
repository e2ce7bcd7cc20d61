"""Command line of the comparison: run, one, latency, report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import report
from benchmarks.peers.common import installed
from benchmarks.peers.driver import Settings, make
from benchmarks.peers.jobs import Job, jobs_of
from benchmarks.peers.latency import time_all
from benchmarks.peers.methods import METHODS
from benchmarks.peers.parts import PARTS, Part, part_named, smoke
from benchmarks.peers.runs import run

from epitorch.errors import EpitorchError, MissingExtraError, explain

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE.parents[1] / "docs" / "results" / "peers.md"


def main() -> int:
    arguments = _parser().parse_args()
    try:
        return int(arguments.go(arguments))
    except EpitorchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


# ---- commands ----


def _run(arguments: argparse.Namespace) -> int:
    broken: list[str] = []
    for name in arguments.part:
        jobs = _jobs(name, arguments)
        _check_packages(jobs)
        settings = Settings(arguments.results, arguments.jobs, arguments.threads, arguments.retry, arguments.full)
        broken += make(jobs, settings)
        if not arguments.no_latency:
            print(f"timed: {_timed(name, arguments)}")
    for job in broken:
        print(f"not made: {job}", file=sys.stderr)
    return 1 if broken else 0


def _latency(arguments: argparse.Namespace) -> int:
    for name in arguments.part:
        print(_timed(name, arguments))
    return 0


def _timed(name: str, arguments: argparse.Namespace) -> Path:
    """All that is finished, whatever was asked for: one file has them side by side."""
    out = arguments.out.absolute()
    jobs = jobs_of(_part(name, arguments), _path(arguments.data), out, smoke=arguments.smoke)
    return time_all(jobs, arguments.results, rounds=arguments.rounds)


def _one(arguments: argparse.Namespace) -> int:
    part = _part(arguments.part, arguments)
    out = arguments.out.absolute()
    job = Job(part, arguments.method, arguments.budget, arguments.seed, _path(arguments.data), out, arguments.smoke)
    result = run(job)
    print({key: value for key, value in result.items() if key not in ("environment", "identity")})
    return 0


def _report(arguments: argparse.Namespace) -> int:
    print(report.write(arguments.results, arguments.page))
    return 0


def _jobs(name: str, arguments: argparse.Namespace) -> list[Job]:
    return jobs_of(
        _part(name, arguments),
        _path(arguments.data),
        arguments.out.absolute(),
        methods=arguments.methods,
        budgets=arguments.budgets,
        seeds=arguments.seeds,
        smoke=arguments.smoke,
    )


def _part(name: str, arguments: argparse.Namespace) -> Part:
    part = part_named(name, full=arguments.full)
    return smoke(part) if arguments.smoke else part


def _path(data: str) -> str:
    return str(Path(data).absolute())  # a run that goes on elsewhere must find the same data


def _check_packages(jobs: list[Job]) -> None:
    """Say before the first run which packages are missing for which methods."""
    missing = {name: job.method for job in jobs for name in METHODS[job.method].needs if installed(name) is None}
    if missing:
        told = ", ".join(f"{name} (for {method})" for name, method in missing.items())
        fix = "pip install -r benchmarks/peers/requirements.txt, or name other --methods"
        raise MissingExtraError(
            explain("packages are missing", expected="all that the methods need", got=told, fix=fix)
        )


# ---- arguments ----


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    commands = parser.add_subparsers(required=True)
    runs = _command(commands, "run", _run, "make all runs of parts, time the networks, keep the results")
    runs.add_argument("--jobs", type=int, default=1, help="runs at a time")
    runs.add_argument("--threads", type=int, default=1, help="of each run")
    runs.add_argument("--retry", action="store_true", help="make failed runs again")
    runs.add_argument("--no-latency", action="store_true", help="do not time the networks")
    latency = _command(commands, "latency", _latency, "time the finished networks again")
    _selection(runs)
    _place(latency)
    one = _command(commands, "one", _one, "make one run, in this process")
    one.add_argument("--part", choices=PARTS, required=True)
    one.add_argument("--method", choices=METHODS, required=True)
    one.add_argument("--budget", default="own", help="params-0.5, madds-0.25, bytes-0.125 or own")
    one.add_argument("--seed", type=int, default=0)
    page = commands.add_parser("report", help="write the page and its plots from the results")
    page.set_defaults(go=_report)
    page.add_argument("--results", type=Path, default=RESULTS)
    page.add_argument("--page", type=Path, default=PAGE)
    return parser


def _command(commands: Any, name: str, go: Any, told: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=told, description=told)
    command.set_defaults(go=go)
    command.add_argument("--data", required=True, help="folder of the data; part b: the parquet file of images")
    command.add_argument("--out", type=Path, default=Path("runs/peers"), help="folder of the runs")
    command.add_argument("--full", action="store_true", help="part e: the part's full schedule, for a GPU")
    command.add_argument("--smoke", action="store_true", help="two steps of everything, for a tiny set")
    return command


def _selection(command: argparse.ArgumentParser) -> None:
    _place(command)
    command.add_argument("--methods", nargs="+", default=(), help="default: all of the part")
    command.add_argument("--budgets", nargs="+", default=(), help="default: those of the part")
    command.add_argument("--seeds", nargs="+", type=int, default=(), help="default: those of the part")


def _place(command: argparse.ArgumentParser) -> None:
    command.add_argument("--part", nargs="+", choices=PARTS, required=True)
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the results that are committed")
    command.add_argument("--rounds", type=int, default=30, help="how often each network is timed")


if __name__ == "__main__":
    sys.exit(main())
