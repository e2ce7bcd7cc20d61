"""Measured times, kept between runs: by machine, runtime, layer and input."""

from __future__ import annotations

import json
import platform
from math import inf
from pathlib import Path

from epitorch._files import cache_dir, write_atomic

Times = dict[str, float | None]
"""Seconds by candidate; None for one that the runtime does not take."""


class TimingCache:
    """Seconds by key, in one JSON file; a file that is damaged or missing is an empty cache.

    Args:
        path: The file; default `timings.json` in `$EPITORCH_CACHE`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_dir().expanduser() / "timings.json"
        self._known = _read(self.path)
        self._new: dict[str, Times] = {}

    def get(self, key: str) -> Times | None:
        """Seconds of each candidate, or None."""
        return self._new.get(key) or self._known.get(key)

    def put(self, key: str, seconds: Times) -> None:
        """Remember; `save` writes it."""
        self._new[key] = seconds

    def save(self) -> None:
        """Add what is new to the file as it is now; another process may have written to it. No room is no error."""
        if not self._new:
            return
        try:
            content = json.dumps(_read(self.path) | self._new, indent=0)
            write_atomic(self.path, content.encode())
        except OSError:
            return  # a cache that cannot be kept costs time, not results


def machine() -> str:
    """What the times hold for."""
    return f"{platform.machine()} {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _read(path: Path) -> dict[str, Times]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if _is_times(value)}


def _is_times(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(n is None or _is_seconds(n) for n in value.values())


def _is_seconds(value: object) -> bool:
    return isinstance(value, float) and 0 < value < inf
