"""The pictures of the docs, each computed by the library: python docs/figures.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "epitorch"

import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from epitorch import LayerPlan, Plan, convert_, count  # noqa: E402
from epitorch.nn import EpitomeLinear  # noqa: E402

FOLDER = Path(__file__).parent / "figures"
OUT, IN, O, I = 12, 12, 6, 6  # noqa: E741


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    save("sampling", sampling())
    save("forms", forms())
    save("reuse", reuse())


def save(name: str, figure: Any) -> None:
    """Write the figure, on white, so that it can be read in dark pages too."""
    figure.savefig(FOLDER / f"{name}.svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)


def source_of(layer: EpitomeLinear, axis: int) -> Tensor:
    """For every weight, the position on one axis of the epitome that it is read from: shape (OUT, IN)."""
    with torch.no_grad():
        positions = torch.arange(layer.epitome.shape[axis], dtype=torch.float32)
        layer.epitome.copy_(positions[:, None] if axis == 0 else positions[None, :])
        return layer.weight.clone()


def linear(starts: str = "separable", **values: list[float]) -> EpitomeLinear:
    """A layer of 12 x 12 from an epitome of 6 x 6, with starts of our choice."""
    layer = EpitomeLinear(IN, OUT, bias=False, epitome_shape=(O, I), index="fixed", channel_starts=starts).eval()  # type: ignore[arg-type]
    for axis, value in values.items():
        buffer = dict(layer.named_buffers())[f"routing_map.{axis}_starts"]
        buffer.copy_(torch.tensor(value).view_as(buffer))
    return layer


def draw(axes: Any, matrix: Tensor, title: str, ylabel: str = "", xlabel: str = "") -> None:
    """Draw positions as colours."""
    axes.imshow(matrix.numpy(), cmap="viridis", vmin=0, vmax=max(O, I) - 1)
    axes.set(title=title, xticks=[], yticks=[], ylabel=ylabel, xlabel=xlabel)


def sampling() -> Any:
    """A weight whose filters are read from an epitome's rows, at a whole and at a fractional start."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
    draw(axes[0], torch.arange(O)[:, None].expand(O, I), "epitome\n6 x 6, coloured by row", "6 rows")
    for axis, starts in zip(axes[1:], ([0.0, 2.0], [0.0, 2.5]), strict=True):
        layer = linear(out=starts, **{"in": [0.0, 0.0]})
        title = f"weight 12 x 12\nstarts {starts[0]:g} and {starts[1]:g}"
        draw(axis, source_of(layer, 0), title, "12 filters", "12 inputs")
    return figure


def forms() -> Any:
    """Which column of the epitome every weight reads: one start per block of inputs, or one per pair of blocks."""
    figure, axes = plt.subplots(1, 2, figsize=(6.2, 3.4))
    separable = linear(out=[0.0, 0.0], **{"in": [0.0, 2.0]})
    grid = linear("grid", out=[0.0, 0.0, 0.0, 0.0], **{"in": [0.0, 2.0, 4.0, 1.0]})
    draw(axes[0], source_of(separable, 1), "separable: a start per block\nrank at most 6", "12 filters", "12 inputs")
    draw(axes[1], source_of(grid, 1), "grid: a start per pair\nrank up to 12", "", "12 inputs")
    return figure


def reuse() -> Any:
    """Multiply-adds of a convolution whose epitome is shorter along filters, inputs or both."""
    shapes = {"dense": None, "filters / 4": (16, 64), "inputs / 4": (64, 16), "both / 2": (32, 32)}
    names, products, mixing = [], [], []
    for name, shape in shapes.items():
        model = nn.Sequential(nn.Conv2d(64, 64, 1, bias=False))
        if shape is not None:
            plan = LayerPlan((*shape, 1, 1), index="direct", block_out=shape[0] - 1, block_in=shape[1] - 1)
            convert_(model, Plan({"0": plan}))
        cost = count(model, torch.zeros(1, 64, 28, 28))
        names.append(name)
        products.append((cost.madds - cost.madds_interpolation) / 1e6)
        mixing.append(cost.madds_interpolation / 1e6)
    figure, axes = plt.subplots(figsize=(6, 2.4))
    axes.barh(names, products, label="products and sums")
    axes.barh(names, mixing, left=products, label="interpolation")
    axes.invert_yaxis()
    axes.set(xlabel="million operations, 1x1 convolution, 64 channels, 28x28")
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
