"""Sounds in a loop of your own: the 8-layer waveform network on ESC-10, one fold, at a quarter of its parameters.

python examples/audio_esc10.py --data DIR --epochs 10

DIR has meta/esc50.csv and audio/. `epitorch train esc10/epitome-4x --data DIR` is the whole experiment (docs/audio.md).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import epitorch
from epitorch.models.audio import soundnet8, soundnet8_plan
from epitorch.training.data import ArrayLoader
from epitorch.training.data_audio import load_sounds, sound_stats
from epitorch.training.data_audio_batches import NormalizeSound, SoundAugment
from epitorch.training.recipe_sound import SoundSection


def main(arguments: list[str] | None = None) -> float:
    """Train on four folds, return the accuracy on the fifth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sample-rate", type=int, default=22_050)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the clips")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    section = SoundSection(
        fold=1, sample_rate=options.sample_rate, clip_seconds=options.seconds, crop_seconds=0.6 * options.seconds
    )
    train, test = (load_sounds(options.data, split, section) for split in ("train", "test"))
    augment = SoundAugment(round(section.crop_seconds * section.sample_rate), section.gain_db)
    normalize = NormalizeSound(*sound_stats(train))

    model = soundnet8(len(train.classes))
    epitorch.convert_(model, soundnet8_plan(model, "4x", index="direct"))
    optimizer = torch.optim.AdamW(epitorch.param_groups(model, lr=2e-3, weight_decay=0.01))
    generator = torch.Generator().manual_seed(0)
    batches = ArrayLoader(train, 32, shuffle=True, drop_last=len(train) > 32)
    for epoch in range(options.epochs):
        batches.set_epoch(epoch)
        model.train()
        for sounds, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(normalize(augment(sounds, generator))), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        right = [(model(normalize(sounds)).argmax(1) == labels).float() for sounds, labels in ArrayLoader(test, 8)]
    accuracy = float(torch.cat(right).mean())
    print(f"accuracy {accuracy:.3f}, {epitorch.count(model, normalize(test.images[:1])).params:,} parameters")
    return accuracy


if __name__ == "__main__":
    main()
