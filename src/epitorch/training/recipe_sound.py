"""The section of a recipe for sounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from epitorch._rules import Place, choice, number, ruled, whole
from epitorch.errors import RecipeError, explain

if TYPE_CHECKING:
    from epitorch.training.recipe import Recipe


@dataclass(frozen=True)
class SoundSection:
    """The data are sounds in the layout of ESC-50, cross-validated by fold.

    Args:
        fold: The fold to test on; all others are trained on, less what `data.holdout` takes.
        sample_rate: Samples per second that every clip is resampled to.
        clip_seconds: Length of every clip.
        crop_seconds: Length of the random crops of training; test and held-out clips are taken whole.
        gain_db: Each crop is made louder or softer by up to this many decibels.
        subset: `esc10` takes the clips marked so in the table, `all` every one.
    """

    fold: int = ruled(whole(1), 1)
    sample_rate: int = ruled(whole(1000, 192_000), 22_050)
    clip_seconds: float = ruled(number(0, above=True), 5.0)
    crop_seconds: float = ruled(number(0, above=True), 1.5)
    gain_db: float = ruled(number(0, 60), 6.0)
    subset: str = ruled(choice("all", "esc10"), "all")


def check_sound(recipe: Recipe, place: Place) -> None:
    """Raise RecipeError if the section does not go together with itself or with `data`."""
    sound = recipe.sound
    if sound is None:
        return
    if sound.crop_seconds > sound.clip_seconds:
        raise RecipeError(
            explain(
                "'sound.crop_seconds' is longer than the clips",
                expected=f"at most sound.clip_seconds = {sound.clip_seconds:g}",
                got=sound.crop_seconds,
                where=str(place.below("sound").below("crop_seconds")),
            )
        )
    defaults = type(recipe.data)()
    unused = [key for key in ("crop_padding", "flip") if getattr(recipe.data, key) != getattr(defaults, key)]
    if unused:
        raise RecipeError(
            explain(
                f"'data.{unused[0]}' has no effect on sounds",
                expected="crop_seconds and gain_db in the section 'sound'",
                got=repr(getattr(recipe.data, unused[0])),
                where=str(place.below("data").below(unused[0])),
            )
        )


def with_fold(recipe: Recipe, fold: int | None) -> Recipe:
    """Return the recipe with another fold to test on; itself for None.

    Raises:
        RecipeError: If its data are not sounds, or the fold is below 1.
    """
    if fold is None:
        return recipe
    if recipe.sound is None or fold < 1:
        expected = "a recipe with a section 'sound'" if recipe.sound is None else "a fold from 1"
        raise RecipeError(explain("cannot choose the fold", expected=expected, got=f"fold {fold}", where=recipe.source))
    return replace(recipe, sound=replace(recipe.sound, fold=fold))
