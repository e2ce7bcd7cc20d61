"""A timm model to a budget of parameters, trained with timm's optimiser and schedule, written for ONNX Runtime.

python examples/timm_to_budget.py --model resnet18 --params 2_000_000 --data DIR --epochs 2 --out net.onnx

DIR is CIFAR-10 as `epitorch train` takes it (docs/recipes.md), or the word digits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import epitorch
from epitorch.training.data import ArrayLoader, Normalize, channel_stats, load_images


def main(arguments: list[str] | None = None) -> Path:
    """Convert, train, export; return the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--params", type=int, default=2_000_000)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, help="at most so many for each epoch")
    parser.add_argument("--out", type=Path, default=Path("net.onnx"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    images = load_images(options.data, "train")
    channels, height, width = images.image_shape
    example = torch.zeros(1, channels, height, width)
    normalize = Normalize(*channel_stats(images))

    model = timm.create_model(options.model, num_classes=len(images.classes), in_chans=channels)
    plan = epitorch.plan(model, example, params=options.params)
    epitorch.convert_(model, plan)
    print(f"{epitorch.count(model, example).params:,} parameters")
    # timm makes groups of its own from a model; groups that are given it takes as they are
    optimizer = create_optimizer_v2(epitorch.param_groups(model, lr=1e-3, weight_decay=0.05), opt="adamw", lr=1e-3)
    schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=options.epochs)

    loader = ArrayLoader(images, 128, shuffle=True, seed=0)
    for epoch in range(options.epochs):
        loader.set_epoch(epoch)
        model.train()
        for number, (x, y) in enumerate(loader):
            if number == options.batches:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(normalize(x)), y)
            loss.backward()
            optimizer.step()
        schedule.step(epoch + 1)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    print(epitorch.export(model.eval(), example, "onnx", options.out, strategy="size"))
    return options.out


if __name__ == "__main__":
    main()
