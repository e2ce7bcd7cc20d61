"""A checkpoint measured on images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epitorch.checkpoint import Checkpoint, ModelInput, load_checkpoint
from epitorch.errors import DataError, explain
from epitorch.progress import progress as show_progress
from epitorch.training.data import ImageArrays
from epitorch.training.data_images import same_classes
from epitorch.training.data_kinds import AnyImages, kind_in, load_split, make_loader, normalization
from epitorch.training.devices import choose_device
from epitorch.training.module import evaluate
from epitorch.training.options import workers_for

_BATCH = 128  # where the checkpoint does not say how it was trained


@dataclass(frozen=True)
class EvaluationReport:
    """Accuracies (fractions) of a checkpoint. `str(report)` is what the command prints.

    Args:
        checkpoint: The folder.
        model: The model's name.
        data: Where the images come from.
        images: How many.
        accuracy: With the routing map.
        accuracy_learner: With the index learner on the same batches; None where none is in use.
        gap: `accuracy_learner - accuracy`.
        loss: Cross-entropy with the routing map.
        device: Where it ran.
    """

    checkpoint: str
    model: str
    data: str
    images: int
    accuracy: float
    accuracy_learner: float | None
    gap: float | None
    loss: float
    device: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.images:,} images ({self.data}), {self.device}",
            f"accuracy          {100 * self.accuracy:.2f}%",
        ]
        if self.accuracy_learner is not None and self.gap is not None:
            lines.append(f"with the learner  {100 * self.accuracy_learner:.2f}% (gap {100 * self.gap:+.2f})")
        return "\n".join([*lines, f"loss              {self.loss:.4f}"])


def evaluate_checkpoint(
    folder: str | Path,
    data_path: str | Path,
    *,
    split: str = "test",
    accelerator: str = "auto",
    allow_factory: bool = False,
    workers: int | None = None,
    progress: bool = True,
) -> EvaluationReport:
    """Measure a checkpoint in float32, with the batch size it was trained with.

    Args:
        folder: Of the checkpoint, or of its run.
        data_path: As for `epitorch.training.run.train`.
        split: Which images; of large images `test` is the validation split, and `heldout` those that were held out.
        accelerator: `auto`, `cpu` or `cuda`.
        allow_factory: As for `load_checkpoint`.
        workers: Processes that read large images; None chooses by the cores.
        progress: Say on standard error how many images are done, once two seconds have passed.

    Raises:
        CheckpointError: If the checkpoint cannot be loaded.
        DataError: If the images are missing, damaged, or not of the shape and classes of the checkpoint.
    """
    device = choose_device(accelerator)
    checkpoint = load_checkpoint(folder, allow_factory=allow_factory)
    config = checkpoint.config
    model_input, batch_size = _trained_on(checkpoint, str(folder))
    kind = kind_in(config.recipe)
    readers = workers_for(kind.images, workers, 1, str(folder))
    images = load_split(data_path, split, kind)
    check_images(images, model_input)
    loader = make_loader(images, batch_size, device, workers=readers)
    normalize = normalization(model_input).to(device)
    channels_last = _channels_last(checkpoint)
    model = checkpoint.model.to(device)
    with show_progress("eval", progress) as say:
        result = evaluate(model, loader, normalize, channels_last=channels_last, say=say)
    learner = result.accuracy_learner
    return EvaluationReport(
        str(folder),
        config.model,
        images.source,
        result.images,
        result.accuracy,
        learner,
        None if learner is None else learner - result.accuracy,
        result.loss,
        device.type,
    )


def _trained_on(checkpoint: Checkpoint, folder: str) -> tuple[ModelInput, int]:
    config = checkpoint.config
    if config.input is None:
        raise DataError(
            explain(
                "this checkpoint was never trained",
                expected="one that `epitorch train` wrote: it knows its images",
                got="a converted model",
                where=folder,
                fix="train it first",
            )
        )
    return config.input, config.batch_size or _BATCH


def _channels_last(checkpoint: Checkpoint) -> bool:
    training = checkpoint.config.recipe.get("training")
    return bool(training.get("channels_last", False)) if isinstance(training, dict) else False


def check_images(images: AnyImages, wanted: ModelInput) -> None:
    """Raise DataError unless shape and classes are those that the model was trained on."""
    if isinstance(images, ImageArrays):
        same = wanted.classes == images.classes
    else:  # layouts differ in whether they name the classes, or how many of them
        same = same_classes(wanted.classes, images)
    for fits, what, expected, got in (
        (wanted.shape == images.image_shape, "shape", wanted.shape, images.image_shape),
        (same, "classes", wanted.classes, images.classes),
    ):
        if not fits:
            raise DataError(
                explain(
                    f"the images do not fit the model: other {what}",
                    expected=f"{what} {_shortened(expected)}",
                    got=f"{what} {_shortened(got)}",
                    where=images.source,
                )
            )


def _shortened(values: tuple[object, ...]) -> str:
    return str(values) if len(values) <= 20 else f"{', '.join(map(str, values[:5]))} and {len(values) - 5} more"
