"""Make the module that runs a trained layer under one strategy of method section 5."""

from __future__ import annotations

from epitorch.cost.analysis import declined_by
from epitorch.cost.formulas import ON_DIAGONALS, STRATEGIES, Strategy
from epitorch.deploy.reuse_layers import (
    ReuseConv,
    ReuseConvTranspose,
    ReuseDiagonals,
    ReuseDiagonalsTranspose,
    ReuseLayer,
    ReuseLinear,
    ReusePartialConv,
    ReuseStrategy,
)
from epitorch.errors import InputError, explain, suggest
from epitorch.nn import EpitomeLayer, EpitomeLinear


def reuse_layer(layer: EpitomeLayer, strategy: ReuseStrategy) -> ReuseLayer:
    """Make the module that runs `layer` under one strategy.

    Args:
        layer: The trained layer; its tensors are taken, not copied.
        strategy: Any but "folded", which is `layer.to_dense()`.

    Raises:
        InputError: If the strategy does not apply to the layer, with the reason (`epitorch.cost.Reason`).
        StartsError: If a start is not finite.

    Example:
        >>> from epitorch.nn import EpitomeConv1d
        >>> layer = EpitomeConv1d(4, 8, 3, epitome_shape=(4, 4, 9), spatial_starts="out")
        >>> reuse_layer(layer, "integral")(torch.zeros(1, 4, 16)).shape
        torch.Size([1, 8, 14])
    """
    _check_applies(layer, strategy)
    if isinstance(layer, EpitomeLinear):
        return ReuseLinear(layer, strategy).eval()
    transposed: bool = layer.transposed
    if strategy in ON_DIAGONALS:
        return (ReuseDiagonalsTranspose if transposed else ReuseDiagonals)(layer, strategy).eval()
    if layer.spec.channel_starts != "separable":
        return ReusePartialConv(layer, strategy).eval()
    return (ReuseConvTranspose if transposed else ReuseConv)(layer, strategy).eval()


def _check_applies(layer: EpitomeLayer, strategy: Strategy) -> None:
    known = [name for name in STRATEGIES if name != "folded"]
    if strategy not in known:
        raise InputError(
            explain(
                "strategy is not known",
                expected=" | ".join(known),
                got=f"{strategy!r}{suggest(str(strategy), list(known))}",
                fix="a folded layer is layer.to_dense()",
            )
        )
    reason = declined_by(layer, strategy)
    if reason is not None:
        others = ", ".join(name for name in known if declined_by(layer, name) is None)
        raise InputError(
            explain(
                f"strategy {strategy!r} does not apply to the layer",
                expected=others or "no reuse: only the folded layer works",
                got=reason,
                where=layer.qualified_name or type(layer).__name__,
                fix="choose a strategy that applies, or fold the layer with to_dense()",
            )
        )
