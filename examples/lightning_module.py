"""A LightningModule of your own: handwritten digits, torchvision's SqueezeNet at a third of its parameters.

python examples/lightning_module.py --epochs 5
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchvision.models import squeezenet1_1

import epitorch


class Classifier(pl.LightningModule):
    """The model is converted before its optimiser is made; nothing else differs."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.model: nn.Module = squeezenet1_1(num_classes=10)
        epitorch.convert_(self.model, epitorch.plan(self.model, torch.zeros(1, 3, 32, 32), ratio=ratio))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Accuracy of a batch, with the routing map."""
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Starts and learners get a rate of their own."""
        return torch.optim.AdamW(epitorch.param_groups(self.model, lr=1e-3, weight_decay=0.01))


def main(arguments: list[str] | None = None) -> float:
    """Train, return the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batches", type=int, help="at most so many for each epoch")
    options = parser.parse_args(arguments)
    pl.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, size=32, mode="bilinear").repeat(1, 3, 1, 1)
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        limit_train_batches=options.batches,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(ratio=3), DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=128))
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
