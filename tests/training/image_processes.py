"""Run by two processes: `python image_processes.py OUT DATA RECIPE`, RECIPE arguments of `image_recipe` as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

sys.path.insert(0, str(Path(__file__).parent))

from image_files import image_recipe, seen
from run_helpers import quiet

from epitorch.training.run import train


class Images(pl.Callback):
    """Writes down, for each rank, which images each epoch gave it, and the final weights."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.epochs: list[list[int]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.epochs.append([])

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.epochs[-1] += seen(batch[0])

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        kept = {"epochs": self.epochs, "state": pl_module.model.state_dict()}
        torch.save(kept, self.out.with_suffix(f".rank{trainer.global_rank}.pt"))


def main() -> None:
    out, data, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    recipe = image_recipe(**options)
    train(recipe, data, out, accelerator="cpu", console=quiet(), callbacks=[Images(out)], workers=1)


if __name__ == "__main__":
    main()
