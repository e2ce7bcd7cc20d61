"""The paper's plan for networks of inverted residuals: MobileNetV2, and EfficientNet with squeeze-excitation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from epitorch.cost.planning import BACK, FRONT
from epitorch.errors import ConversionError, check_is_model, explain
from epitorch.plans import LayerPlan, Plan, Reason, planned_params

Index = Literal["learner", "direct", "fixed"]
Policy = Literal["uniform", "front_heavy"]
POLICIES: tuple[Policy, ...] = ("uniform", "front_heavy")

_BLOCKS = ("InvertedResidual", "DepthwiseSeparableConv", "MBConv")
_SQUEEZES = ("SqueezeExcite", "SqueezeExcitation")
_WANTED = (
    "MobileNetV2 or EfficientNet (timm or torchvision): inverted residuals between a stem and one last convolution"
)


def scaled(c: float, channels: int, multiple: int = 1) -> int:
    """`int(c * channels)`, rounded down to a multiple and never below it; safe against 0.29 * 100 = 28.999..."""
    return max(multiple, int(c * channels + 1e-9) // multiple * multiple)


@dataclass(frozen=True)
class Compression:
    """What the paper's plan leaves open.

    Args:
        c: Share of the hidden channels that the epitomes keep, `0 < c <= 1`.
        last_conv: Compress the last convolution along its filters by c too (the paper on CIFAR-10).
        classifier: Compress the classifier along its inputs by this share.
        policy: `uniform` keeps the share c everywhere. `front_heavy` keeps `c**1.5` of the first 1x1 convolution,
            `c**0.5` of the last one and evenly rising powers between, as `epitorch.plan` does (the paper's "-A", which
            it describes in one phrase).
        index: How starts come about.
        group_length: Super-index length; epitome sizes become multiples of it.
        momentum: mu of the routing map.
    """

    c: float
    last_conv: bool = False
    classifier: float | None = None
    policy: Policy = "uniform"
    index: Index = "learner"
    group_length: int | None = None
    momentum: float = 0.97

    def __post_init__(self) -> None:
        for name, share in (("c", self.c), ("classifier", self.classifier)):
            if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
                raise ConversionError(explain(f"{name} is out of range", expected="0 < share <= 1", got=repr(share)))
        if self.policy not in POLICIES:
            raise ConversionError(
                explain("this policy is unknown", expected=" | ".join(POLICIES), got=repr(self.policy))
            )

    def layer(self, dense: Any, axis: int, share: float) -> LayerPlan:
        """Plan one layer whose epitome keeps a share of one axis."""
        shape = list(dense.weight.shape)
        shape[axis] = scaled(share, shape[axis], self.group_length or 1)
        return LayerPlan(tuple(shape), index=self.index, group_length=self.group_length, momentum=self.momentum)

    def shares(self, layers: int) -> list[float]:
        """Share that each of the blocks' 1x1 convolutions keeps, in the order of use."""
        first, last = (FRONT, BACK) if self.policy == "front_heavy" else (1.0, 1.0)
        return [self.c ** (first + (last - first) * i / max(1, layers - 1)) for i in range(layers)]


@dataclass(frozen=True)
class _Block:
    """The convolutions of one block by qualified name and in order, those of squeeze-excitation apart."""

    name: str
    convs: dict[str, nn.Conv2d]
    squeeze: tuple[str, ...]

    @property
    def expands(self) -> bool:
        return len(self.convs) == 3

    def check(self) -> None:
        """A depthwise convolution between two 1x1, the first of which a block without expansion lacks."""
        shapes = [(conv.kernel_size == (1, 1), conv.groups == 1) for conv in self.convs.values()]
        depthwise = [conv.groups == conv.in_channels for conv in self.convs.values()]
        one_by_one = (True, True)
        if len(shapes) not in (2, 3) or not depthwise[-2] or any(s != one_by_one for s in (*shapes[:-2], shapes[-1])):
            got = ", ".join(f"{n.rpartition('.')[2]} {tuple(conv.weight.shape)}" for n, conv in self.convs.items())
            raise ConversionError(
                explain(
                    "this block has no form that the paper's plan is for",
                    expected="1x1, depthwise, 1x1; or depthwise, 1x1",
                    got=got or "no convolutions",
                    where=self.name,
                    fix="epitorch.plan makes a plan for any network",
                )
            )


def inverted_residual_plan(model: nn.Module, options: Compression) -> Plan:
    """The paper's plan: in each inverted residual the first 1x1 along the filters, the second along its inputs.

    Epitomes are `(int(c*t*k), k)` and `(k', int(c*t*k))`; depthwise convolutions, squeeze-excitation and blocks without
    an expansion stay.

    Args:
        model: MobileNetV2 or EfficientNet from timm, torchvision or `epitorch.models`.
        options: What to compress and by how much.

    Returns:
        A plan that names every layer with a weight: converted, or left with the reason.

    Raises:
        ConversionError: If the model is another one.
    """
    check_is_model(model)
    blocks = list(_blocks(model))
    outside = _outside(model, blocks)
    layers = _expansions(blocks, options)
    left: dict[str, Reason] = {}
    for block in blocks:
        left.update(_reasons(block))
    (stem, _), (last, head) = outside
    left[stem] = "stem"
    left[last] = "last_conv"
    if options.last_conv:
        layers[last] = options.layer(head, 0, options.c)
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            left[name] = "classifier"
            if options.classifier is not None:
                layers[name] = options.layer(linear, 1, options.classifier)
    return Plan(layers, {name: reason for name, reason in left.items() if name not in layers})


def fit_inverted_residual_plan(model: nn.Module, params: int, options: Compression) -> tuple[Plan, float]:
    """The plan with the largest c whose total parameters do not exceed `params`, found by bisection.

    Args:
        model: As for `inverted_residual_plan`.
        params: Largest total.
        options: All else; their c is not used.

    Returns:
        The plan and its c.

    Raises:
        ConversionError: If even the smallest epitomes are too large, or the model is another one.
    """

    def plan_for(c: float) -> Plan:
        return inverted_residual_plan(model, replace(options, c=c))

    low, high = 1e-4, 1.0
    least = planned_params(model, plan_for(low))
    if least > params:
        raise ConversionError(
            explain("the budget cannot be met", expected=f"at least {least:,} parameters", got=f"{params:,}")
        )
    if planned_params(model, plan_for(high)) <= params:
        return plan_for(high), high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if planned_params(model, plan_for(middle)) <= params else (low, middle)
    return plan_for(low), low


def _expansions(blocks: list[_Block], options: Compression) -> dict[str, LayerPlan]:
    chosen = [
        (name, conv, axis)
        for block in blocks
        if block.expands
        for (name, conv), axis in ((next(iter(block.convs.items())), 0), (list(block.convs.items())[-1], 1))
    ]
    shares = options.shares(len(chosen))
    return {name: options.layer(conv, axis, share) for (name, conv, axis), share in zip(chosen, shares, strict=True)}


def _reasons(block: _Block) -> dict[str, Reason]:
    """Why the layers of a block stay, those that are converted included."""
    reasons: dict[str, Reason] = dict.fromkeys(block.convs, "no_expansion")
    reasons.update({name: "depthwise" for name, conv in block.convs.items() if conv.groups > 1})
    reasons.update(dict.fromkeys(block.squeeze, "squeeze_excitation"))
    return reasons


def _blocks(model: nn.Module) -> Iterator[_Block]:
    found = [(name, module) for name, module in model.named_modules() if _is_a(module, _BLOCKS)]
    if not found:
        raise _another_model(type(model).__name__)
    for name, module in found:
        convs = {n: m for n, m in module.named_modules(prefix=name) if isinstance(m, nn.Conv2d)}
        squeezes = tuple(f"{n}." for n, m in module.named_modules(prefix=name) if _is_a(m, _SQUEEZES))
        inside = tuple(n for n in convs if n.startswith(squeezes)) if squeezes else ()
        block = _Block(name, {n: conv for n, conv in convs.items() if n not in inside}, inside)
        block.check()
        yield block


def _outside(model: nn.Module, blocks: list[_Block]) -> list[tuple[str, nn.Conv2d]]:
    """Stem and last convolution."""
    inside = {name for block in blocks for name in (*block.convs, *block.squeeze)}
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and n not in inside]
    if len(found) != 2:
        names = [name for name, _ in found]
        shown = ", ".join(names if len(names) <= 6 else [*names[:5], "..."])
        raise _another_model(f"{type(model).__name__} with these convolutions outside of its blocks: {shown}")
    return found


def _is_a(module: nn.Module, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _another_model(got: str) -> ConversionError:
    return ConversionError(
        explain(
            "this plan is for MobileNetV2 and EfficientNet",
            expected=_WANTED,
            got=got,
            fix="epitorch.plan makes a plan for any network; a recipe asks for one by epitome.budget",
        )
    )
