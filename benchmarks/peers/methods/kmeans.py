"""Weight sharing: the weights of each layer become the nearest of a few values, and the file holds their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.peers.budgets import Levels, spread
from benchmarks.peers.methods.base import Task
from benchmarks.peers.networks import peer
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

MOST_BITS = 8
_SAMPLED = 50_000  # weights of a layer that the centres are fitted to


def share_weights(model: nn.Module, task: Task, folder: Path) -> tuple[nn.Module, Path]:
    """Fit centres to every layer's weights, write numbers and centres, and read the network back."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)]
    names = [f"{name}.weight" for name in names]
    state = model.state_dict()
    tops = dict.fromkeys(names, MOST_BITS)
    bits = spread(tops, lambda bits: len(_packed(state, bits, _any_codes(state, bits))), task.limit)
    codes = {name: _fitted(state[name], bits[name], task.seed) for name in names}
    file = folder / "weights.safetensors"
    file.write_bytes(_packed(state, bits, codes))
    return load_shared(model, file), file


Codes = dict[str, tuple[np.ndarray, np.ndarray]]  # numbers of the weights (n,), centres (2^bits,)


def _any_codes(state: dict[str, Tensor], bits: Levels) -> Codes:
    """Of the right sizes: what they are does not change the file's length."""
    sizes = {name: (state[name].numel(), min(2**n, state[name].numel())) for name, n in bits.items()}
    return {name: (np.zeros(n, np.uint8), np.zeros(k, np.float32)) for name, (n, k) in sizes.items()}


def _fitted(weight: Tensor, bits: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the nearest centres, and the centres by scikit-learn's k-means begun at quantiles."""
    cluster: Any = peer("sklearn.cluster")
    values = weight.numpy().reshape(-1, 1)
    centres = min(2**bits, len(values))
    sample = np.random.default_rng(seed).permutation(values)[:_SAMPLED]
    begin = np.quantile(sample, (np.arange(centres) + 0.5) / centres).reshape(-1, 1)
    fit = cluster.KMeans(centres, init=begin, n_init=1, max_iter=50, random_state=seed).fit(sample)
    found = np.sort(fit.cluster_centers_[:, 0]).astype(np.float32)
    return np.searchsorted((found[1:] + found[:-1]) / 2, values[:, 0]).astype(np.uint8), found


def _packed(state: dict[str, Tensor], bits: Levels, codes: Codes) -> bytes:
    """The file: whole tensors as they are, the others as numbers of `bits` bits without gaps, and centres."""
    tensors = {name: value for name, value in state.items() if name not in bits}
    for name, (numbers, centres) in codes.items():
        digits = np.unpackbits(numbers[:, None], axis=1)[:, 8 - bits[name] :]
        tensors[f"{name}#"] = torch.from_numpy(np.packbits(digits))
        tensors[f"{name}@"] = torch.from_numpy(centres)
    return save({name: value.contiguous() for name, value in tensors.items()}, {"bits": json.dumps(bits)})


def load_shared(model: nn.Module, file: Path) -> nn.Module:
    """Fill a network of the same layers from a file."""
    own = model.state_dict()
    with safe_open(file, "pt") as opened:
        bits = json.loads(opened.metadata()["bits"])
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    for name, n in bits.items():
        digits = np.unpackbits(stored.pop(f"{name}#").numpy())[: n * own[name].numel()].reshape(-1, n)
        numbers = digits @ (1 << np.arange(n)[::-1])
        stored[name] = stored.pop(f"{name}@")[torch.from_numpy(numbers)].view_as(own[name])
    model.load_state_dict(stored)
    return model


CODE = (share_weights, _fitted, _packed, load_shared)
