"""Hugging Face's Trainer with a converted network: handwritten digits.

python examples/huggingface_trainer.py --steps 200
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import epitorch
from epitorch.models.small import digits_cnn


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Dictionaries with the names that the model's forward has."""

    def __init__(self, first: int, last: int) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[first:last], dtype=torch.float32)[:, None] / 16
        self.labels = torch.tensor(digits.target[first:last])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class WithLoss(nn.Module):
    """The Trainer wants the loss from the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and logits of a batch."""
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: Any) -> dict[str, float]:
    """Of logits and labels, both numpy."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main(arguments: list[str] | None = None) -> float:
    """Train, return the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = digits_cnn()
    epitorch.convert_(model, epitorch.plan(model, torch.zeros(1, 1, 8, 8), ratio=2))
    optimizer = torch.optim.AdamW(epitorch.param_groups(model, lr=5e-3, weight_decay=0.01))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=WithLoss(model),
            args=TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=64,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
            ),
            train_dataset=Digits(0, 1437),
            eval_dataset=Digits(1437, 1797),
            compute_metrics=accuracy,
            optimizers=(optimizer, None),  # the Trainer adds its schedule
        )
        trainer.train()
        reached = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy {reached:.3f}")
    return float(reached)


if __name__ == "__main__":
    main()
