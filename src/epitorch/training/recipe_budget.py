"""The part of a recipe that asks for a budget: what `epitorch.plan` is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epitorch._rules import Place, Rule, choice, flag, number, optional, read_section, ruled, whole
from epitorch.errors import RecipeError, explain

_AXES = ("auto", "out", "in", "both")


def _patterns() -> Rule:
    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(isinstance(name, str) and name.strip() for name in value)

    return Rule("a list of name patterns, such as [conv1, 'layer4.*']", accepts, tuple)


def _axes() -> Rule:
    """One word for all layers, or a mapping from name pattern to one."""

    def accepts(value: Any) -> bool:
        words = list(value.values()) if isinstance(value, dict) else [value]
        return bool(words) and all(isinstance(word, str) and word in _AXES for word in words)

    return Rule(f"{' | '.join(_AXES)}, or a mapping from name pattern to one of them", accepts)


@dataclass(frozen=True)
class BudgetSection:
    """A budget for `epitorch.plan`, which says what each key means. Exactly one of the first three is given.

    Args:
        params: Largest number of parameters.
        madds: Largest number of executed multiply-adds per sample.
        ratio: Parameters of the model over those of the compressed one.
        policy: Which layers keep a larger share.
        form: Starts per block, per pair of blocks, per channel, or per pair on one axis (partial products).
        axes: Channel axes to shorten.
        align: Epitome channels are multiples of it.
        depthwise: Compress depthwise convolutions too.
        skip: Name patterns of layers to leave.
        only: Where given, all other layers are left too.
    """

    params: int | None = ruled(optional(whole(1)), None)
    madds: int | None = ruled(optional(whole(1)), None)
    ratio: float | None = ruled(optional(number(1, above=True)), None)
    policy: str = ruled(choice("uniform", "positions", "front_heavy"), "uniform")
    form: str = ruled(choice("auto", "separable", "grid", "fine", "partial"), "auto")
    axes: str | dict[str, str] = ruled(_axes(), "auto")  # noqa: RUF009
    align: int = ruled(whole(1), 1)
    depthwise: bool = ruled(flag(), False)
    skip: tuple[str, ...] = ruled(_patterns(), ())
    only: tuple[str, ...] = ruled(_patterns(), ())


def check_budget(options: dict[str, Any] | None, group_length: int | None, place: Place) -> None:
    """Raise RecipeError if a budget is not what `read_budget` takes, or gives epitomes that groups do not divide.

    Args:
        options: The budget.
        group_length: The section's.
        place: Of the section `epitome`.
    """
    if options is None:
        return
    budget = read_budget(options, place.below("budget"))
    if group_length is not None and budget.align % group_length:
        raise RecipeError(
            explain(
                "the budget's epitomes need not be multiples of the group length",
                expected=f"budget.align of {group_length}, or a multiple of it",
                got=f"align {budget.align}, group_length {group_length}",
                where=str(place.below("group_length")),
                fix=f"add align: {group_length} to the budget",
            )
        )


def read_budget(options: dict[str, Any], place: Place) -> BudgetSection:
    """Read a budget.

    Raises:
        RecipeError: If a key is unknown, a value does not fit, or not exactly one amount is given.
    """
    budget = read_section(BudgetSection, options, place)
    given = [key for key in ("params", "madds", "ratio") if getattr(budget, key) is not None]
    if len(given) != 1:
        raise RecipeError(
            explain(
                "a budget is one number",
                expected="exactly one of params, madds, ratio",
                got=" and ".join(given) or "none of them",
                where=str(place),
            )
        )
    return budget
