"""Run by two processes: `python two_processes.py OUT RECIPE`, RECIPE being arguments of `rank_free_recipe` as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

sys.path.insert(0, str(Path(__file__).parent))

from run_helpers import KillAt, Killed, quiet, rank_free_recipe

from epitorch.training.run import train


class Keep(pl.Callback):
    """Writes each rank's weights and the images of its first batch when training ends."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.first: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.first = batch[0].clone() if self.first is None else self.first

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        state = {"state": pl_module.model.state_dict(), "first": self.first}
        torch.save(state, self.out.with_suffix(f".rank{trainer.global_rank}.pt"))


def main() -> None:
    out, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    kill, devices = options.pop("kill", None), options.pop("devices", None)
    callbacks = [Keep(out), *([KillAt(kill)] if kill else [])]
    torch.set_num_threads(1)
    try:
        result = train(
            rank_free_recipe(**options),
            "digits",
            out,
            accelerator="cpu",
            console=quiet(),
            callbacks=callbacks,
            devices=devices,
            checkpoint_steps=3,
        )
    except Killed:
        sys.exit(9)
    print("accuracy", result.accuracy.test, flush=True)


if __name__ == "__main__":
    main()
