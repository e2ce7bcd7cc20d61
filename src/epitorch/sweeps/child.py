"""The process of one run of a sweep: `python -m epitorch.sweeps.child ARGUMENTS...` is `epitorch ARGUMENTS...`.

It asks the kernel for SIGTERM when the process that started it ends, however that ends: the run then writes its state
and goes, and does not work on beside the sweep that is started next.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def follow_parent(parent: int) -> None:
    """Ask for SIGTERM when the parent ends; leave at once if it has ended already. Does nothing where Linux is not."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Run the command line; the first argument is the parent's process number."""
    parent, *arguments = sys.argv[1:]
    follow_parent(int(parent))
    sys.argv = ["epitorch", *arguments]  # what results.json tells as the command
    runpy.run_module("epitorch", run_name="__main__")


if __name__ == "__main__":
    main()
