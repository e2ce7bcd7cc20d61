"""The fastest way to run a model on this machine, found by measuring."""

from epitorch.tuning._cache import machine
from epitorch.tuning._deploy import deploy
from epitorch.tuning._runtimes import Runtime, installed_runtimes

__all__ = ["Runtime", "deploy", "installed_runtimes", "machine"]
