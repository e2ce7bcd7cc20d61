"""How each layer of a deployed model runs: plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from epitorch.cost.analysis import aligned
from epitorch.cost.formulas import NO_NEED, Reason, Strategy

FORMAT = 1  # of `to_dict`


@dataclass(frozen=True)
class LayerDeployment:
    """One epitome layer of the trained model.

    Args:
        name: Qualified name.
        kind: Class of the trained layer.
        strategy: From a closed list (`epitorch.cost.Strategy`); `folded` is a plain layer.
        reason: Why; from a closed list (`epitorch.cost.Reason`).
        declined: Strategies that do not apply, each with its reason.
        madds: Operations that it executes per sample of the example, interpolation included.
        madds_dense: Multiply-adds of the plain layer.
        seconds: Of one pass by strategy, where they were measured.
    """

    name: str
    kind: str
    strategy: Strategy
    reason: Reason
    declined: tuple[tuple[Strategy, Reason], ...]
    madds: int
    madds_dense: int
    seconds: tuple[tuple[Strategy, float], ...] = ()


@dataclass(frozen=True)
class Deployment:
    """Report of `epitorch.deploy`; `str()` is a table.

    Args:
        strategy: What was asked for.
        layers: Every epitome layer of the trained model.
        difference: Largest difference between the two models on the example, over the largest output.
        network: Which of `networks` this is, where whole networks were measured.
        networks: Seconds of one pass of each.
    """

    strategy: str
    layers: tuple[LayerDeployment, ...]
    difference: float
    network: str | None = None
    networks: tuple[tuple[str, float], ...] = ()

    @property
    def folded(self) -> tuple[LayerDeployment, ...]:
        """The layers that became plain ones."""
        return tuple(layer for layer in self.layers if layer.strategy == "folded")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: seconds and declined strategies by name. What `epitorch report --deployment` reads."""
        data = asdict(self)
        for layer in data["layers"]:
            layer |= {"seconds": dict(layer["seconds"]), "declined": dict(layer["declined"])}
        return {"format": FORMAT, **data, "networks": dict(self.networks)}

    def __str__(self) -> str:
        rows = [_HEAD, *(_shown(layer) for layer in self.layers)]
        kept = [i for i, title in enumerate(_HEAD) if title not in _OPTIONAL or any(row[i] for row in rows[1:])]
        counts = f"{len(self.layers) - len(self.folded)} reused, {len(self.folded)} folded"
        lines = aligned(
            [tuple(row[i] for i in kept) for row in rows],
            left=tuple(place for place, i in enumerate(kept) if "MAdds" not in _HEAD[i]),
        )
        if self.network is not None:
            lines.append(f"network taken: {self.network}; measured: {_times(self.networks)}")
        lines.append(f"{counts}; difference to the trained model {self.difference:.1e}")
        return "\n".join(lines)


_HEAD = ("layer", "kind", "runs as", "MAdds", "MAdds (dense)", "reason", "declined", "measured")
_OPTIONAL = ("declined", "measured")  # left out where no layer has any


def _times(seconds: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {1e3 * value:.3f} ms" for name, value in sorted(seconds, key=lambda entry: entry[1]))


def _shown(layer: LayerDeployment) -> tuple[str, ...]:
    sizes = (f"{layer.madds:,}", f"{layer.madds_dense:,}")
    return (
        layer.name or "(model)",
        layer.kind,
        layer.strategy,
        *sizes,
        layer.reason,
        _listed(layer.declined),
        _times(layer.seconds),
    )


def _listed(declined: Iterable[tuple[Strategy, Reason]]) -> str:
    """Obstacles only; a strategy made of two parts fails where one part does."""
    parts = ("product_map", "wrapping", "integral")  # tap by tap fails where the integral map does
    single = [entry for entry in declined if entry[0] in parts and entry[1] not in NO_NEED]
    return "; ".join(f"{strategy}: {reason}" for strategy, reason in single)
