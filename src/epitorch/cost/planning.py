"""From a budget to a plan: which layer gets an epitome of which shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from math import isfinite, sqrt
from numbers import Real
from typing import Any, Literal, get_args

from torch import Tensor, nn

from epitorch.cost._allocate import allocate
from epitorch.cost._ladder import AXES, FORMS, Axes, Form, Ladder, Rung, check_choice, executed_madds, ladder
from epitorch.cost._sensitivity import Sensitivity, Starts
from epitorch.cost._sensitivity import sensitivity as measure_sensitivity
from epitorch.cost._survey import Candidate, Survey, survey
from epitorch.cost.analysis import interpolated_by
from epitorch.errors import ConversionError, InputError, explain, suggest
from epitorch.init import first_starts
from epitorch.plans import Budget, BudgetKind, LayerPlan, Plan, Reason, Selector, check_selectors
from epitorch.spec import EpitomeSpec, semantic_order

Policy = Literal["uniform", "positions", "front_heavy", "sensitivity"]
Index = Literal["learner", "direct", "fixed"]
FRONT, BACK = 1.5, 0.5  # "front_heavy": the common share is raised to this power in the first and in the last layer


def plan(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...],
    *,
    params: int | None = None,
    madds: int | None = None,
    ratio: float | None = None,
    policy: Policy = "uniform",
    form: Form = "auto",
    axes: Axes | Mapping[str, Axes] = "auto",
    skip: Collection[Selector] = (),
    only: Collection[Selector] = (),
    depthwise: bool = False,
    align: int = 1,
    index: Index = "learner",
    sensitivity: Sensitivity | None = None,
) -> Plan:
    """Choose an epitome for every layer so that the model meets a budget.

    Exactly one budget is given. The plan's total is at most the budget and misses it by less than the smallest next
    step of any layer; a smaller budget never gives a larger total.

    Args:
        model: Any model; it is not changed.
        example_input: A tensor, or a tuple of the model's arguments. The model runs on it once, in eval mode.
        params: Largest number of parameters: epitomes, routing maps and all that stays; shared ones once, no learners.
        madds: Largest number of multiply-adds per sample that the deployed model executes (`deploy` with
            strategy="reuse"), interpolation included, with every start between two positions, or with index="fixed" on
            one.
        ratio: Parameters of the model over those of the compressed one: `params` in other words.
        policy: "uniform" keeps the same share of every weight (the paper). "positions" keeps shares in proportion to
            the root of the positions at which a weight is used, its multiply-adds per parameter: much in front, where
            maps are large, little at the end, where most parameters are. "front_heavy" keeps a smaller share of
            the first layers and a larger one of the last (the paper's "-A"). "sensitivity" spends the budget where a
            parameter saves most of the measured cost.
        form: Starts per block ("separable"), per pair of blocks ("grid"), per channel ("fine", the form for a warm
            start), or per pair of blocks on the one axis that is shortened ("partial": rank is kept and work saved,
            for a few additions; convolutions of one group, and linear layers). "auto" is separable for a budget on
            multiply-adds, and for one on parameters grid where separable starts would lower the weight's rank.
        axes: Channel axes to shorten, or a mapping from name pattern to them (the first that matches; else "auto").
            "auto" minds the rank: the longer axis first, down to the shorter one, then both; with form="partial" one
            axis alone, the longer one of 1x1 kernels, the inputs of larger ones, while that keeps most rank.
        skip: Layers to leave: name patterns (`fnmatch`), types, or functions of name and layer.
        only: Where given, all other layers are left too.
        depthwise: Compress depthwise convolutions too.
        align: Epitome channels are multiples of it, or whole axes.
        index: How starts come about. A layer whose forward is never called gets "direct" instead of "learner".
        sensitivity: What `epitorch.sensitivity` measured; by default reconstruction errors, measured here.

    Returns:
        A plan that names every convolution and linear layer, converted or left with the reason.

    Raises:
        InputError: If not exactly one budget is given, an option is unknown or the model refuses the example.
        ConversionError: If nothing can be converted or the budget cannot be met: the message names the totals that can.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(8, 64, 1), nn.Conv2d(64, 64, 3))
        >>> plan(model, torch.zeros(1, 8, 9, 9), ratio=2).params <= 37_568 // 2
        True
    """
    _check_options(policy, form, axes, align, index)
    _check_one_budget(params=params, madds=madds, ratio=ratio)
    if madds is not None and form == "grid":
        raise InputError(
            explain(
                "starts per pair of blocks save no multiply-adds",
                expected="form='partial', 'separable', 'fine' or 'auto' for a budget on multiply-adds",
                got="form='grid'",
            )
        )
    kind: BudgetKind = "params" if madds is None else "madds"
    if sensitivity is not None and not isinstance(sensitivity, Sensitivity):
        raise InputError(
            explain("sensitivity is not valid", expected="what epitorch.sensitivity measured", got=repr(sensitivity))
        )
    surveyed = survey(model, example_input, skip=skip, only=only, depthwise=depthwise, uncalled=kind == "params")
    if isinstance(axes, Mapping):
        check_selectors("axes", list(axes), surveyed.facts)
    amount = _amount(surveyed, params, madds, ratio)
    _check_not_converted(surveyed)
    ladders = ladders_of(surveyed, kind, form, axes, align, whole_starts=index == "fixed")
    if policy == "sensitivity" and sensitivity is None:
        searched: Starts = "searched_whole" if index == "fixed" else "searched"
        sensitivity = measure_sensitivity(
            model,
            example_input,
            form=form,
            starts=searched if form == "fine" else "even",
            skip=skip,
            only=only,
            depthwise=depthwise,
        )
    chosen = choose(surveyed, ladders, kind, amount, policy, sensitivity)
    shape = tuple(example_input.shape) if isinstance(example_input, Tensor) else None
    budget = Budget(surveyed.model, kind, amount, surveyed.params, surveyed.madds, shape)
    return _plan(surveyed, ladders, chosen, index, budget)


def choose(
    surveyed: Survey,
    ladders: Mapping[str, Ladder],
    kind: BudgetKind,
    amount: int,
    policy: Policy = "uniform",
    measured: Sensitivity | None = None,
) -> dict[str, Rung]:
    """Spend a budget on ladders.

    Args:
        surveyed: The model.
        ladders: For every candidate, in units of the budget.
        kind: Of the budget.
        amount: The budget.
        policy: As for `plan`.
        measured: Needed by the policy "sensitivity".

    Returns:
        A rung for every candidate.

    Raises:
        ConversionError: If the budget lies below the smallest total or above that of the model as it is.
    """
    climbing = {name: rungs for name, rungs in ladders.items() if len(rungs) > 1}
    costs = [[rung.cost for rung in rungs] for rungs in climbing.values()]
    dense = surveyed.params if kind == "params" else surveyed.madds
    fixed = dense - sum(ladder[-1] for ladder in costs)
    _check_feasible(kind, amount, fixed + sum(ladder[0] for ladder in costs), dense, bool(climbing))
    positions = {c.name: max(1, c.geometry.kernel_positions) for c in surveyed.candidates}
    levels = allocate(costs, _keys(climbing, policy, measured, positions), amount - fixed)
    found = {name: rungs[level] for (name, rungs), level in zip(climbing.items(), levels, strict=True)}
    return {name: found.get(name, rungs[-1]) for name, rungs in ladders.items()}


# ---- order of the steps ----


def _keys(
    ladders: Mapping[str, Ladder], policy: Policy, measured: Sensitivity | None, positions: Mapping[str, int]
) -> list[list[float]]:
    """For each rung of each ladder when it is climbed to; small numbers first, rising along a ladder."""
    if policy == "sensitivity":
        return [_by_gain(name, rungs, measured) for name, rungs in ladders.items()]
    if policy == "uniform":
        return [[rung.share for rung in rungs] for rungs in ladders.values()]
    if policy == "positions":
        return [[rung.share / sqrt(positions[name]) for rung in rungs] for name, rungs in ladders.items()]
    last = max(len(ladders) - 1, 1)
    powers = [FRONT + (BACK - FRONT) * position / last for position in range(len(ladders))]
    return [[r.share ** (1 / power) for r in rungs] for power, rungs in zip(powers, ladders.values(), strict=True)]


def _by_gain(name: str, rungs: Ladder, measured: Sensitivity | None) -> list[float]:
    """Minus the measured cost that a unit of the budget saves; never falling, so that the ladder's order is kept."""
    if measured is None or name not in measured.costs:
        known = [] if measured is None else list(measured.costs)
        raise InputError(
            explain(
                f"no sensitivity is known for '{name}'",
                expected="measurements of this model, with the same skip and depthwise",
                got=f"{len(known)} other layers{suggest(name, known)}",
                fix="run epitorch.sensitivity on this model",
            )
        )
    cost = measured.cost(name)
    keys = [0.0]
    for before, after in pairwise(rungs):
        gain = (cost(before.share) - cost(after.share)) / (after.cost - before.cost)
        keys.append(max(-gain, keys[-1]) if len(keys) > 1 else -gain)
    return keys


# ---- result ----


def _plan(
    surveyed: Survey, ladders: Mapping[str, Ladder], chosen: Mapping[str, Rung], index: Index, budget: Budget
) -> Plan:
    layers, facts, left = {}, dict(surveyed.facts), dict(surveyed.left)
    for layer in surveyed.candidates:
        spec = chosen[layer.name].spec(layer.shape)
        if spec is None:
            left[layer.name] = "budget" if len(ladders[layer.name]) > 1 else "too_small"
            continue
        planned = layer_plan(layer, spec, index)
        fresh = interpolated_by(
            spec, first_starts(spec, learned=planned.index != "fixed", by_learner=planned.index == "learner")
        )
        layers[layer.name] = planned
        facts[layer.name] = replace(
            facts[layer.name],
            madds_dense=layer.madds,
            madds=executed_madds(layer, spec, fresh if planned.index == "fixed" else None),
            madds_fresh=executed_madds(layer, spec, fresh),
            form=planned.form(),
        )
    order: list[str] = [*facts, *(name for name in left if name not in facts)]
    ordered: dict[str, Reason] = {name: left[name] for name in order if name in left}
    return Plan({name: layers[name] for name in order if name in layers}, ordered, facts, budget)


def layer_plan(layer: Candidate, spec: EpitomeSpec, index: Index) -> LayerPlan:
    """The plan of one layer, in its storage order."""
    return LayerPlan(
        semantic_order(spec.epitome_shape, layer.geometry.transposed),
        block_out=_shorter(spec.block_out, spec.epitome_shape[0]),
        block_in=_shorter(spec.block_in, spec.epitome_shape[1]),
        channel_starts=spec.channel_starts,
        # A forward that is never called would show a learner no features.
        index="direct" if index == "learner" and not layer.called else index,
    )


def _shorter(block: int, axis: int) -> int | None:
    """None, the default, where the block is the whole axis."""
    return block if block < axis else None


# ---- what was asked ----


def _check_options(policy: object, form: object, axes: object, align: object, index: object) -> None:
    check_choice("policy", policy, get_args(Policy))
    check_choice("form", form, FORMS)
    check_choice("index", index, get_args(Index))
    for choice in axes.values() if isinstance(axes, Mapping) else (axes,):
        check_choice("axes", choice, AXES)
    if type(align) is not int or align < 1:
        raise InputError(explain("align is not valid", expected="a whole number above 0", got=repr(align)))


def _check_one_budget(**budgets: float | None) -> None:
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        got = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "none"
        raise InputError(explain("a plan needs one budget", expected="one of params, madds, ratio", got=got))
    ((name, value),) = given.items()
    number = isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    if not number or value <= 0 or (name != "ratio" and value != int(value)):
        wanted = "a number of at least 1" if name == "ratio" else "a whole number above 0"
        raise InputError(explain(f"{name} is not valid", expected=wanted, got=repr(value)))
    if name == "ratio" and value < 1:
        raise InputError(explain("ratio is not valid", expected="at least 1: how many times smaller", got=repr(value)))


def _amount(surveyed: Survey, params: int | None, madds: int | None, ratio: float | None) -> int:
    if ratio is not None:
        return int(surveyed.params / ratio)
    return int(params if madds is None and params is not None else madds or 0)


def _axes_of(name: str, axes: Axes | Mapping[str, Axes]) -> Axes:
    if not isinstance(axes, Mapping):
        return axes
    return next((choice for pattern, choice in axes.items() if fnmatchcase(name, pattern)), "auto")


def _check_feasible(kind: BudgetKind, amount: int, least: int, most: int, any_ladder: bool) -> None:
    if any_ladder and least <= amount <= most:
        return
    what = "parameters" if kind == "params" else "multiply-adds"
    if not any_ladder:
        found = "no layer that can be made smaller with these options"
        asked, expected, fix = f"nothing to convert: {found}", f"{most:,} {what}, as the model is", _WIDER
    elif amount < least:
        asked, expected = "the budget is too small", f"at least {least:,} {what}, with every epitome at its smallest"
        fix = "raise the budget, or let more layers take part (skip, only, depthwise, align)"
    else:
        asked, expected = "the budget is larger than the model", f"at most {most:,} {what}, the model as it is"
        fix = "ask for less: there is nothing to compress"
    raise ConversionError(explain(asked, expected=expected, got=f"{amount:,}", fix=fix))


def _check_not_converted(surveyed: Survey) -> None:
    count = list(surveyed.left.values()).count("already_epitome")
    if count and not surveyed.candidates:
        raise ConversionError(
            explain(
                "this model is converted already",
                expected="layers without an epitome",
                got=f"{count} epitome layers, and nothing else to convert",
                fix="plan the dense model, or call to_dense_ first",
            )
        )


_WIDER = "look at skip, depthwise and align; a layer with a forward of its own saves no multiply-adds"


def ladders_of(
    surveyed: Survey,
    kind: BudgetKind,
    form: Form = "auto",
    axes: Axes | Mapping[str, Axes] = "auto",
    align: int = 1,
    *,
    whole_starts: bool = False,
) -> dict[str, Ladder]:
    """Every candidate's ladder, in units of the budget; layers of the same shape share one."""
    made: dict[tuple[Candidate, Axes], Ladder] = {}
    found = {}
    for layer in surveyed.candidates:
        key = replace(layer, name=""), _axes_of(layer.name, axes)
        if key not in made:
            made[key] = ladder(key[0], kind, form, key[1], align, whole_starts=whole_starts)
        found[layer.name] = made[key]
    return found
