"""A training loop in plain PyTorch: handwritten digits, a network of your own, half its parameters.

python examples/plain_loop.py --epochs 10
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import epitorch


class Net(nn.Module):
    """Three convolutions and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, shape: (N, 10)."""
        return self.head(self.body(x).mean((2, 3)))


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate, return the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    model = Net()
    plan = epitorch.plan(model, images[:1], ratio=2, skip=["body.0", "head"])
    print(epitorch.convert_(model, plan))
    optimizer = torch.optim.AdamW(epitorch.param_groups(model, lr=3e-3, weight_decay=0.01))

    for epoch in range(options.epochs):
        model.train()
        for x, y in DataLoader(train, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, DataLoader(test, batch_size=256))
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.3f}")

    net = epitorch.deploy(model.eval(), images[:1])
    print(epitorch.count(model, images[:1]))
    return evaluate(net, DataLoader(test, batch_size=256))


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Return the part of the images that are classified right."""
    model.eval()
    right = [(model(x).argmax(1) == y).float() for x, y in batches]
    return float(torch.cat(right).mean())


if __name__ == "__main__":
    main()
