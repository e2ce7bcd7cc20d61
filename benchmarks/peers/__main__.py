"""Command line of the comparison: run, one, latency, report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.peers.jobs import Job
from benchmarks.peers.parts import PARTS, part_named, smoke
from benchmarks.peers.runs import run
from epitorch.errors import EpitorchError

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    arguments = _parser().parse_args()
    try:
        return int(arguments.go(arguments))
    except EpitorchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = _command(commands, "one", _one, "make one run")
    one.add_argument("--method", required=True)
    one.add_argument("--budget", default="own")
    one.add_argument("--seed", type=int, default=0)
    return parser


def _command(commands, name, go, told):  # type: ignore[no-untyped-def]
    command = commands.add_parser(name, help=told, description=told)
    command.set_defaults(go=go)
    command.add_argument("--part", choices=PARTS, required=True)
    command.add_argument("--full", action="store_true")
    command.add_argument("--smoke", action="store_true")
    command.add_argument("--data", required=True)
    command.add_argument("--out", type=Path, default=Path("runs/peers"))
    return command


def _part(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]
    part = part_named(arguments.part, full=arguments.full)
    return smoke(part) if arguments.smoke else part


def _one(arguments: argparse.Namespace) -> int:
    job = Job(
        _part(arguments),
        arguments.method,
        arguments.budget,
        arguments.seed,
        arguments.data,
        arguments.out.absolute(),
        arguments.smoke,
    )
    result = run(job)
    print({key: value for key, value in result.items() if key not in ("environment", "identity")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
