"""The `training` section of a recipe: loss, optimiser, schedule and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epitorch._rules import Place, choice, flag, mapping, number, optional, ruled, text, whole
from epitorch.errors import RecipeError, explain

MAX_SEED = 2**63 - 1
SCHEDULES = ("one_cycle", "cosine", "step", "poly", "tanh")


@dataclass(frozen=True)
class TrainingSection:
    """Optimiser, schedule and arithmetic.

    Args:
        peak_lr: Largest learning rate of the schedule, for the weights.
        start_lr: The same for starts and learners; null takes the default of `epitorch.param_groups`.
        batch_size: Images of a batch over all processes.
        accumulate: Batches whose gradients make one optimiser step.
        optimizer: `sgd` is torch's; any other name is timm's.
        optimizer_arguments: More arguments of a timm optimiser.
        norm_decay: Decay biases and the weights of normalisation too.
        clip_norm: Largest norm of all gradients together.
        schedule: `one_cycle` is torch's; the others are timm's, stepped after every optimiser step.
        warmup: one_cycle: part of the steps in which the learning rate rises.
        warmup_epochs: The others: epochs in which it rises from `warmup_lr`.
        decay_rate: step: factor every `decay_epochs`. poly: the power.
        ema_decay: Of the moving average of the weights that is evaluated and kept; null keeps the weights themselves.
        mixup: Alpha of mixup; 0 is off.
        cutmix: Alpha of cutmix; 0 is off.
        mix_switch: Part of the batches that cutmix gets where both are on.
        teacher: Checkpoint of a trained model to learn from as well.
        teacher_weight: Its share w of the loss: `(1 - w) cross-entropy + w T^2 KL(teacher || student)`.
        temperature: T of that.
        compile: Run the training passes through `torch.compile`.
        sync_batchnorm: Batch statistics over all processes (GPUs only).
    """

    epochs: int = ruled(whole(1))
    peak_lr: float = ruled(number(0, above=True))
    batch_size: int = ruled(whole(1), 128)
    accumulate: int = ruled(whole(1), 1)
    optimizer: str = ruled(text(), "sgd")
    optimizer_arguments: dict[str, Any] = field(default_factory=dict, hash=False, metadata={"rule": mapping()})
    momentum: float = ruled(number(0, 1), 0.9)
    nesterov: bool = ruled(flag(), False)
    weight_decay: float = ruled(number(0), 5e-4)
    norm_decay: bool = ruled(flag(), True)
    clip_norm: float | None = ruled(optional(number(0, above=True)), None)
    schedule: str = ruled(choice(*SCHEDULES), "one_cycle")
    warmup: float = ruled(number(0, 1), 0.3)
    warmup_epochs: float = ruled(number(0), 0.0)
    warmup_lr: float = ruled(number(0), 1e-6)
    decay_epochs: float = ruled(number(0, above=True), 2.4)
    decay_rate: float = ruled(number(0, above=True), 0.97)
    min_lr: float = ruled(number(0), 0.0)
    start_lr: float | None = ruled(optional(number(0, above=True)), None)
    ema_decay: float | None = ruled(optional(number(0, 0.9999999)), None)
    label_smoothing: float = ruled(number(0, 1), 0.0)
    mixup: float = ruled(number(0), 0.0)
    cutmix: float = ruled(number(0), 0.0)
    mix_prob: float = ruled(number(0, 1), 1.0)
    mix_switch: float = ruled(number(0, 1), 0.5)
    mix_mode: str = ruled(choice("batch", "pair", "elem"), "batch")
    teacher: str | None = ruled(optional(text()), None)
    teacher_weight: float = ruled(number(0, 1), 0.5)
    temperature: float = ruled(number(0, above=True), 4.0)
    precision: str = ruled(choice("fp32", "bf16", "fp16"), "fp32")
    compile: bool = ruled(flag(), False)
    sync_batchnorm: bool = ruled(flag(), False)
    channels_last: bool = ruled(flag(), True)
    seed: int = ruled(whole(0, MAX_SEED), 0)


# Keys that do something in one case only: they are refused in the others, where they would be ignored.
_TIMM_SCHEDULE = ("warmup_epochs", "warmup_lr", "min_lr")
_MIXING = ("mix_prob", "mix_switch", "mix_mode")


def check_training(section: TrainingSection, place: Place) -> None:
    """Refuse values that do not go together.

    Raises:
        RecipeError: If momentum is missing for Nesterov's, warm-up is longer than training, or a key has no effect.
    """
    if section.nesterov and not section.momentum:
        raise RecipeError(
            explain(
                "'training.nesterov' is on without momentum",
                expected="a momentum above 0",
                got=section.momentum,
                where=str(place.below("nesterov")),
                fix="set training.momentum, or nesterov: false",
            )
        )
    if section.schedule != "one_cycle" and section.warmup_epochs >= section.epochs:
        raise RecipeError(
            explain(
                "'training.warmup_epochs' leaves no time to train",
                expected=f"fewer than training.epochs = {section.epochs}",
                got=section.warmup_epochs,
                where=str(place.below("warmup_epochs")),
            )
        )
    for key, beside in _ignored(section):
        if getattr(section, key) != _default(key):
            raise RecipeError(
                explain(
                    f"'training.{key}' has no effect here",
                    expected=f"this key with {beside} only",
                    got=repr(getattr(section, key)),
                    where=str(place.below(key)),
                    fix=f"leave out {key}",
                )
            )


def _ignored(section: TrainingSection) -> list[tuple[str, str]]:
    """Keys that this section does not use, and beside what they would be."""
    ignored: list[tuple[str, str]] = []
    if section.schedule == "one_cycle":
        ignored += [(key, "a schedule of timm") for key in _TIMM_SCHEDULE]
    else:
        ignored += [("warmup", "schedule: one_cycle")]
    if section.schedule != "step":
        ignored += [("decay_epochs", "schedule: step")]
    if section.schedule not in ("step", "poly"):
        ignored += [("decay_rate", "schedule: step or poly")]
    if section.schedule == "step":
        ignored += [("min_lr", "another schedule")]
    if section.optimizer == "sgd":
        ignored += [("optimizer_arguments", "an optimiser of timm")]
    else:
        ignored += [("nesterov", "optimizer: sgd")]
    if not section.mixup and not section.cutmix:
        ignored += [(key, "mixup or cutmix") for key in _MIXING]
    return ignored


def _default(key: str) -> Any:
    spec = TrainingSection.__dataclass_fields__[key]
    return {} if key == "optimizer_arguments" else spec.default
