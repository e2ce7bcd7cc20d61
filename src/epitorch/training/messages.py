"""What a run says: its log file, and silence about what does not apply."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logged(path: Path) -> Iterator[logging.Logger]:
    """Give a logger that writes to the run's file, and to standard error where that is no terminal."""
    log = logging.Logger(f"epitorch.run.{path.parent.name}", logging.INFO)
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    if not sys.stderr.isatty():  # a terminal has the progress bar
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
    try:
        yield log
    finally:
        for handler in handlers:
            handler.close()


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's remarks about hardware and tips; warnings still come."""
    names = ("pytorch_lightning", "lightning.fabric", "lightning_fabric", "pytorch_lightning.utilities.rank_zero")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def known_warnings() -> Iterator[None]:
    """Hide the warnings of Lightning that do not apply here."""
    with warnings.catch_warnings():
        # There are no worker processes: the images are on the device already.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        # Lightning's use of torch's tree utilities.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated.*", category=FutureWarning)
        # Few steps in a trial run.
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        # The CPU was asked for.
        warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
        # fp16: the scaler skips the first steps, and with them the optimiser.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
        # Names that torch is about to change; the new ones are missing in older versions.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers. is deprecated.*")
        warnings.filterwarnings("ignore", message=".*functional.all_reduce is deprecated.*", category=FutureWarning)
        # Learners are used until their routing maps freeze, and unused afterwards.
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified.*")
        yield
