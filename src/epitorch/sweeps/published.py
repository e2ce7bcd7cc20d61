"""Published results of other methods, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from epitorch._yaml import read_yaml
from epitorch.errors import InputError, explain, suggest


@dataclass(frozen=True)
class PublishedPoint:
    """One published result.

    Args:
        method: Points of one method are joined in a plot.
        label: Which of its sizes.
        accuracy: Top-1, in percent.
        madds: Multiply-adds of an image, in millions.
        params: In millions; None where they are not printed.
        source: Where the numbers stand.
    """

    method: str
    label: str
    accuracy: float
    madds: float
    params: float | None
    source: str


def published_points(dataset: str) -> list[PublishedPoint]:
    """Return the published results on `imagenet` or `cifar10`.

    Raises:
        InputError: If there are none for this data set.
    """
    name = "published.yaml"
    data = read_yaml(files(__package__).joinpath(name).read_text(encoding="utf-8"), name).data
    if dataset not in data:
        raise InputError(
            explain(
                f"there are no published results on '{dataset}'{suggest(dataset, list(data))}",
                expected=f"one of {', '.join(data)}",
                got=dataset,
            )
        )
    return [PublishedPoint(**row) for row in data[dataset]]
