"""Cross-validated results: mean and spread over folds and seeds, and differences paired by both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from epitorch.errors import InputError, explain
from epitorch.results import RunResult


@dataclass(frozen=True)
class CrossValidation:
    """Test accuracies (fractions) of one recipe over folds and seeds.

    Args:
        name: Of the recipe.
        folds: That have a result, ascending.
        seeds: Likewise.
        n: Number of runs.
        mean: Over all runs.
        sd: Standard deviation over all runs; None for one run.
        by_fold: Mean over the seeds, in the order of `folds`.
        by_seed: Mean over the folds, in the order of `seeds`.
        sd_seeds: Standard deviation of `by_seed`; None for one seed.
    """

    name: str
    folds: tuple[int, ...]
    seeds: tuple[int, ...]
    n: int
    mean: float
    sd: float | None
    by_fold: tuple[float, ...]
    by_seed: tuple[float, ...]
    sd_seeds: float | None


@dataclass(frozen=True)
class PairedDifference:
    """How much better one recipe is than another on the same folds with the same seeds.

    Args:
        first: Name of the one.
        second: Name of the other.
        n: Number of pairs.
        mean: Mean of `first - second`.
        standard_error: Of the mean, as if pairs were independent; None for one pair.
        folds: Number of folds.
        standard_error_folds: The same from one difference per fold, the mean over its seeds: runs of one fold share
            their test clips. None for one fold.
    """

    first: str
    second: str
    n: int
    mean: float
    standard_error: float | None
    folds: int
    standard_error_folds: float | None


def cross_validation(results: Sequence[RunResult]) -> CrossValidation:
    """Sum up the runs of one recipe.

    Raises:
        InputError: If there are none, they are of several recipes, one is not of sounds, or a fold and seed come twice.
    """
    table = _by_fold_and_seed(results)
    folds, seeds = (tuple(sorted({key[i] for key in table})) for i in (0, 1))
    by_fold = tuple(mean(value for key, value in table.items() if key[0] == fold) for fold in folds)
    by_seed = tuple(mean(value for key, value in table.items() if key[1] == seed) for seed in seeds)
    values = list(table.values())
    return CrossValidation(
        results[0].name, folds, seeds, len(values), mean(values), _sd(values), by_fold, by_seed, _sd(by_seed)
    )


def paired_difference(first: Sequence[RunResult], second: Sequence[RunResult]) -> PairedDifference:
    """Compare two recipes on the folds and seeds that both have.

    Raises:
        InputError: As `cross_validation`, and if they have no fold and seed in common.
    """
    one, other = _by_fold_and_seed(first), _by_fold_and_seed(second)
    common = sorted(set(one) & set(other))
    if not common:
        raise InputError(
            explain(
                "these runs cannot be paired",
                expected="a fold and seed that both recipes have",
                got=f"{first[0].name}: {sorted(one)}; {second[0].name}: {sorted(other)}",
            )
        )
    differences = {key: one[key] - other[key] for key in common}
    folds = sorted({fold for fold, _ in common})
    per_fold = [mean(value for key, value in differences.items() if key[0] == fold) for fold in folds]
    values = list(differences.values())
    return PairedDifference(
        first[0].name,
        second[0].name,
        len(values),
        mean(values),
        _standard_error(values),
        len(folds),
        _standard_error(per_fold),
    )


def _by_fold_and_seed(results: Sequence[RunResult]) -> dict[tuple[int, int], float]:
    names = {result.name for result in results}
    if len(names) != 1:
        raise InputError(
            explain("cannot sum up these runs", expected="runs of one recipe", got=sorted(names) or "no runs")
        )
    table: dict[tuple[int, int], float] = {}
    for result in results:
        sound = result.recipe.get("sound")
        if not isinstance(sound, dict):
            raise InputError(explain("a run has no fold", expected="runs on sounds", got=result.name))
        key = (sound["fold"], result.seed)
        if key in table:
            got = f"fold {key[0]}, seed {key[1]} twice"
            raise InputError(explain("a run is given twice", expected="each once", got=got, where=result.name))
        if result.accuracy.test is None:
            raise InputError(explain("a run has no test", expected="a test accuracy", got="none", where=result.name))
        table[key] = result.accuracy.test
    return table


def _sd(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def _standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None
