"""Learning from a trained model as well as from the labels."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epitorch.checkpoint import ModelInput, load_checkpoint
from epitorch.errors import InputError, explain


class Teacher(nn.Module):
    """A trained classifier that takes images normalised for the student, without gradients and always in eval mode.

    Args:
        model: The classifier, shape (N, C, H, W) -> (N, classes).
        own: Normalisation that it was trained with.
        student: Normalisation of the images that come.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, own: ModelInput, student: ModelInput) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (own.mean, own.std))
        student_mean, student_std = (torch.tensor(values).view(-1, 1, 1) for values in (student.mean, student.std))
        self.register_buffer("scale", student_std / std)
        self.register_buffer("shift", (student_mean - mean) / std)
        self.train(False)

    def train(self, mode: bool = True) -> Teacher:
        """Stay in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return logits. shape: (N, C, H, W) -> (N, classes)."""
        return self.model(images * self.scale + self.shift)


def load_teacher(path: str | Path, student: ModelInput) -> Teacher:
    """Load a checkpoint as a teacher.

    Args:
        path: Folder of a checkpoint or of a run.
        student: Images and classes that the student is trained on.

    Raises:
        InputError: If the teacher was trained on other classes, or on images of another shape.
        CheckpointError: If the checkpoint is missing or damaged.
    """
    checkpoint = load_checkpoint(path)
    own = checkpoint.config.input
    if own is None:
        raise InputError(
            explain(
                "this teacher was never trained",
                expected="a checkpoint that `epitorch train` wrote",
                got="a converted model",
                where=str(path),
                fix="train it first",
            )
        )
    for name, given, wanted in (("classes", own.classes, student.classes), ("image shape", own.shape, student.shape)):
        if given != wanted:
            raise InputError(
                explain(
                    f"the teacher was trained for another {name}",
                    expected=str(wanted),
                    got=str(given),
                    where=str(path),
                    fix="choose a checkpoint that was trained on this set",
                )
            )
    return Teacher(checkpoint.model, own, student)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over the batch.

    Args:
        logits: Of the student, shape: (N, classes).
        teacher_logits: shape: (N, classes).
        temperature: T; the factor T^2 keeps the size of the gradient (Hinton et al., 2015).
    """
    student = F.log_softmax(logits.float() / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits.float() / temperature, dim=1)
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
