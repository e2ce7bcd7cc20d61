"""What it costs to compress one layer, measured; plain data that can be kept."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, log
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epitorch._files import write_atomic
from epitorch.cost._ladder import AXES, FORMS, Axes, Form, Ladder, check_choice, ladder
from epitorch.cost._survey import Candidate, survey
from epitorch.cost._trace import eval_copy, quiet
from epitorch.errors import InputError, explain
from epitorch.folding import folded
from epitorch.functional import sample_weight
from epitorch.init import evenly_spread
from epitorch.plans import Selector
from epitorch.spec import EpitomeSpec
from epitorch.warmstart import fit_epitome

SHARES = (0.125, 0.25, 0.5, 0.75)
Kind = Literal["reconstruction", "loss"]
Starts = Literal["even", "searched", "searched_whole"]
STARTS = ("even", "searched", "searched_whole")
_LEAST_KEPT = 1e-9  # keeps the logarithm of a weight that is lost altogether finite
Point = tuple[float, float]


@dataclass(frozen=True)
class Sensitivity:
    """For each layer what compressing it to a share of its weight costs. `save` and `load` keep it as JSON.

    Args:
        kind: "reconstruction": relative error of the weight (Frobenius norm). "loss": increase of the mean loss when
            this layer alone is replaced by its approximation.
        costs: By layer, pairs (share, cost), shares rising.
    """

    kind: Kind
    costs: Mapping[str, tuple[Point, ...]]

    def save(self, path: str | Path) -> Path:
        """Write JSON and return the path."""
        content = {"kind": self.kind, "costs": self.costs}
        write_atomic(Path(path), (json.dumps(content, indent=1) + "\n").encode())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read what `save` wrote.

        Raises:
            InputError: If the file is missing or something else.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            costs = {str(name): _points(points) for name, points in content["costs"].items()}
            check_choice("kind", content["kind"], ("reconstruction", "loss"))
            return cls(content["kind"], costs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                explain(
                    "this is no file of sensitivities",
                    expected="what Sensitivity.save wrote",
                    got=f"{type(error).__name__}: {error}",
                    where=str(path),
                )
            ) from error

    def cost(self, name: str) -> Callable[[float], float]:
        """Cost of a layer as a convex function of the share, falling to 0 at the whole weight.

        Linear between the points of the lower convex hull. Below the smallest share that was measured it goes on like
        1/share: no layer is crushed on the strength of an extrapolation. A reconstruction error e counts as
        -log(1 - e^2), since the parts of the signal that the layers keep multiply.
        """
        points = self.costs[name]
        if self.kind == "reconstruction":
            points = tuple((share, -log(max(1 - error**2, _LEAST_KEPT))) for share, error in points)
        hull = convex_hull(points)
        shares = [share for share, _ in hull]
        (first, top), (second, below) = hull[0], hull[1]
        slope = (top - below) / (second - first)

        def at(share: float) -> float:
            if share < first:
                return top + slope * first**2 * (1 / share - 1 / first)
            right = min(bisect_right(shares, share), len(hull) - 1)
            (x0, y0), (x1, y1) = hull[right - 1], hull[right]
            return y0 + (y1 - y0) * (share - x0) / (x1 - x0)

        return at


def sensitivity(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...],
    data: Iterable[tuple[Any, Tensor]] | None = None,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    *,
    shares: Sequence[float] = SHARES,
    form: Form = "auto",
    axes: Axes = "auto",
    starts: Starts = "even",
    skip: Collection[Selector] = (),
    only: Collection[Selector] = (),
    depthwise: bool = False,
) -> Sensitivity:
    """Measure for each layer what an epitome of a few sizes costs.

    Args:
        model: Any model, with the weights that matter; it is not changed.
        example_input: As for `plan`.
        data: Batches `(input, target)`; the costs are then increases of the mean loss in eval mode. Without data they
            are the relative reconstruction errors of the weights.
        loss: `loss(output, target)`, a mean over the batch; default cross-entropy.
        shares: Shares of the weight to try, between 0 and 1.
        form: As for `plan`.
        axes: As for `plan`, the same for all layers.
        starts: "even": evenly spread, whole. "searched": those that `convert_(..., init="least_squares")` finds: the
            cost of the warm start; many times slower. "searched_whole": those that it finds where starts are fixed.
        skip: As for `plan`.
        only: As for `plan`.
        depthwise: As for `plan`.

    Returns:
        Costs by layer, for `plan(..., policy="sensitivity", sensitivity=...)`.

    Raises:
        InputError: If a share is out of range, an option is unknown, or there are no batches.
        ConversionError: As for `plan`.
    """
    if isinstance(shares, Real) or not shares or not all(isinstance(share, Real) and 0 < share < 1 for share in shares):
        raise InputError(explain("a share is out of range", expected="0 < share < 1", got=shares or "no shares"))
    for name, choice, known in (("form", form, FORMS), ("axes", axes, AXES), ("starts", starts, STARTS)):
        check_choice(name, choice, known)
    surveyed = survey(model, example_input, skip=skip, only=only, depthwise=depthwise, uncalled=True)
    measure = _Measure(eval_copy(model), None if data is None else list(data), loss or F.cross_entropy, starts)
    costs = {}
    for layer in surveyed.candidates:
        rungs = ladder(layer, "params", form, axes, 1)
        if len(rungs) > 1:
            costs[layer.name] = measure.points(layer, rungs, sorted(shares))
    return Sensitivity("reconstruction" if data is None else "loss", costs)


class _Measure:
    """Tries one layer at a time on a copy of the model."""

    def __init__(
        self, probe: nn.Module, batches: list[Any] | None, loss: Callable[[Any, Tensor], Tensor], starts: Starts
    ) -> None:
        if batches is not None and not batches:
            raise InputError(explain("there are no data", expected="at least one batch (input, target)", got="none"))
        self.probe, self.batches, self.loss = probe, batches, loss
        self.approximate = _APPROXIMATIONS[starts]
        self.modules = dict(probe.named_modules())
        self.before = 0.0 if batches is None else self._mean_loss()

    @torch.no_grad()
    def points(self, layer: Candidate, rungs: Ladder, shares: Sequence[float]) -> tuple[Point, ...]:
        """Measured (share, cost) of the largest rung up to each share."""
        module: Any = self.modules[layer.name]
        transposed = bool(getattr(module, "transposed", False))
        stored = folded(module)[0]._parameters["weight"]
        assert stored is not None
        weight = stored.transpose(0, 1) if transposed else stored
        found: dict[float, float] = {}
        for share in shares:
            rung = [rung for rung in rungs[:-1] if rung.share <= share or rung is rungs[0]][-1]
            spec = rung.spec(layer.shape)
            if spec is None or rung.share in found:
                continue
            made = self.approximate(weight, spec)
            found[rung.share] = self._cost(layer.name, weight, made, transposed)
        return tuple(sorted(found.items()))

    def _cost(self, name: str, weight: Tensor, made: Tensor, transposed: bool) -> float:
        if self.batches is None:
            size = torch.linalg.vector_norm(weight.double())
            return float(torch.linalg.vector_norm((weight - made).double()) / size) if size > 0 else 0.0
        plain: Any = folded(self.modules[name])[0]
        parameter = plain._parameters["weight"]
        original = parameter.detach().clone()
        parameter.copy_(made.transpose(0, 1) if transposed else made)
        try:
            return self._mean_loss() - self.before
        finally:
            parameter.copy_(original)

    @torch.no_grad()
    def _mean_loss(self) -> float:
        total, samples = 0.0, 0
        for batch in self.batches or ():
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                got = f"{type(batch).__name__}: {batch!r:.80}"
                raise InputError(explain("this is no batch", expected="a pair (input, target)", got=got))
            given, target = batch
            arguments = given if isinstance(given, tuple) else (given,)
            with quiet(self.probe):
                value = float(self.loss(self.probe(*arguments), target))
            total, samples = total + value * len(target), samples + len(target)
        if not samples or not isfinite(total):
            raise InputError(
                explain(
                    "the loss is no measure",
                    expected="batches with samples whose mean loss is finite",
                    got=f"a sum of {total} over {samples} samples",
                )
            )
        return total / samples


def approximate(weight: Tensor, spec: EpitomeSpec) -> Tensor:
    """The best weight that evenly spread whole starts can generate.

    With whole starts every element of the weight is one element of the epitome, so least squares is the mean over the
    places where an element is used.

    Args:
        weight: Semantic order, shape `spec.weight_shape`.
        spec: The shapes.

    Returns:
        The approximation, of the weight's shape and dtype.
    """
    starts = evenly_spread(spec, whole=True, device=weight.device)
    exact = torch.float64 if spec.num_epitome >= 2**24 else torch.float32  # float32 counts to 2^24
    numbers = torch.arange(spec.num_epitome, device=weight.device, dtype=exact).reshape(spec.epitome_shape)
    owner = sample_weight(numbers, starts, spec).reshape(-1).long()
    total = torch.bincount(owner, weight.reshape(-1).double(), minlength=spec.num_epitome)
    uses = torch.bincount(owner, minlength=spec.num_epitome)
    return (total / uses.clamp(min=1))[owner].reshape(spec.weight_shape).to(weight.dtype)


def nearest(weight: Tensor, spec: EpitomeSpec, *, fractional: bool = True) -> Tensor:
    """The weight of the warm start: starts are searched too. Shapes and dtype as for `approximate`."""
    fit = fit_epitome(weight, spec, fractional=fractional)
    return sample_weight(fit.epitome, fit.starts, spec)


_APPROXIMATIONS: Mapping[str, Callable[[Tensor, EpitomeSpec], Tensor]] = {
    "even": approximate,
    "searched": nearest,
    "searched_whole": partial(nearest, fractional=False),
}


def convex_hull(points: Sequence[Point]) -> list[Point]:
    """Lower convex hull of the points and (1, 0), made to fall with the share."""
    falling: list[Point] = [(1.0, 0.0)]
    for share, cost in sorted(points, reverse=True):
        falling.append((share, max(cost, falling[-1][1])))
    hull: list[Point] = []
    for point in reversed(falling):
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(a: Point, b: Point, c: Point) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _points(points: Any) -> tuple[Point, ...]:
    pairs = tuple(sorted((float(share), float(cost)) for share, cost in points))
    if not pairs or not all(0 < share < 1 and isfinite(cost) for share, cost in pairs):
        raise ValueError(f"pairs (share, cost) with 0 < share < 1 are needed, not {points!r}")
    return pairs
