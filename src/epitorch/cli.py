"""The command line: arguments in, one function call, exit code out. No logic of its own.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C (after the checkpoint is written).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from epitorch import _cli_models, _cli_runs
from epitorch._extras import extra_of
from epitorch._parsers import parser
from epitorch.errors import InputError, MissingExtraError, explain

DEBUG = "EPITORCH_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; default those of the process.

    Returns:
        The exit code.
    """
    try:
        arguments = parser().parse_args(argv)
        if "command" not in arguments:
            parser().print_help()
            return 0
        _COMMANDS[arguments.command](arguments)
        return 0
    except KeyboardInterrupt:
        return _failed("stopped by Ctrl-C", 130)
    except BrokenPipeError:  # the reader of standard output has gone, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, MissingExtraError) as error:
        return _failed(str(error), 2)
    except ModuleNotFoundError as error:
        return _failed(*_missing(error))
    except OSError as error:
        return _failed(_refused(error), 1)
    except Exception as error:
        return _failed(str(error) or type(error).__name__, 1)


def _refused(error: OSError) -> str:
    return explain(
        "the system refused to read or write",
        expected="files that can be read, and a disk with room",
        got=error.strerror or error,
        where=str(error.filename) if error.filename else None,
    )


def _missing(error: ModuleNotFoundError) -> tuple[str, int]:
    """Message and exit code where a package is not installed: wrong input if it belongs to an extra."""
    package = (error.name or "").split(".")[0]
    extra = extra_of(package)
    if extra is None:
        return str(error), 1
    message = explain(
        f"'{package}' is needed here",
        expected=f"the optional dependencies '{extra}'",
        got="it is not installed",
        fix=f"pip install 'epitorch[{extra}]'",
    )
    return message, 2


def _failed(message: str, code: int) -> int:
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


_COMMANDS = {
    "demo": _cli_runs.demo_command,
    "train": _cli_runs.train_command,
    "eval": _cli_runs.eval_command,
    "count": _cli_models.count_command,
    "plan": _cli_models.plan_command,
    "convert": _cli_models.convert_command,
    "export": _cli_models.export_command,
    "deploy": _cli_models.deploy_command,
    "bench": _cli_models.bench_command,
    "sweep": _cli_runs.sweep_command,
    "reproduce": _cli_runs.reproduce_command,
    "doctor": _cli_models.doctor_command,
    "completion": _cli_models.completion_command,
    "report": _cli_runs.report_command,
    "push": _cli_models.push_command,
}
