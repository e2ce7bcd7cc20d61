"""The section of a recipe for large images, read file by file or streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from epitorch._rules import Place, choice, number, optional, ruled, text, whole
from epitorch.errors import RecipeError, explain

if TYPE_CHECKING:
    from epitorch.training.recipe import Recipe


@dataclass(frozen=True)
class ImagesSection:
    """The data are images of any size, read while training, cropped and augmented by timm's transforms.

    Args:
        size: Height and width of the network's input.
        crop_pct: Share of the resized image that evaluation's centre crop keeps.
        interpolation: Of resizing.
        min_scale: Smallest share of the image's area that a random crop of training takes.
        hflip: Probability of a horizontal flip.
        color_jitter: Strength of timm's colour jitter; 0 is none. `auto_augment` takes its place.
        auto_augment: timm's policy, such as `rand-m9-mstd0.5-inc1`.
        random_erasing: Probability of timm's random erasing.
        shuffle_buffer: Images among which streamed data are shuffled.
    """

    size: int = ruled(whole(1), 224)
    crop_pct: float = ruled(number(0, 1, above=True), 0.875)
    interpolation: str = ruled(choice("bilinear", "bicubic", "random"), "bicubic")
    min_scale: float = ruled(number(0, 1, above=True), 0.08)
    hflip: float = ruled(number(0, 1), 0.5)
    color_jitter: float = ruled(number(0), 0.0)
    auto_augment: str | None = ruled(optional(text()), None)
    random_erasing: float = ruled(number(0, 1), 0.0)
    shuffle_buffer: int = ruled(whole(1), 5000)


def check_images_section(recipe: Recipe, place: Place) -> None:
    """Raise RecipeError if the section does not go together with itself, with `sound` or with `data`."""
    images = recipe.images
    if images is None:
        return
    if recipe.sound is not None:
        raise RecipeError(
            explain(
                "the data are either images or sounds",
                expected="one of the sections 'images' and 'sound'",
                got="both",
                where=str(place.below("sound")),
            )
        )
    if images.auto_augment is not None and images.color_jitter:
        raise RecipeError(
            explain(
                "'images.color_jitter' has no effect beside 'images.auto_augment'",
                expected="one of the two",
                got=images.color_jitter,
                where=str(place.below("images").below("color_jitter")),
            )
        )
    defaults = type(recipe.data)()
    unused = [key for key in ("crop_padding", "flip") if getattr(recipe.data, key) != getattr(defaults, key)]
    if unused:
        raise RecipeError(
            explain(
                f"'data.{unused[0]}' has no effect beside the section 'images'",
                expected="min_scale and hflip in the section 'images'",
                got=repr(getattr(recipe.data, unused[0])),
                where=str(place.below("data").below(unused[0])),
            )
        )
