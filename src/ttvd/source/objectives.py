"""What a source model learns: loss and accuracy of a batch, for each objective of a recipe."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.nn.views import join_labels, rotate

VIEWS = 4
"""SLA and the rotation head learn the four quarter turns, as the paper and TTAB do."""

Objective = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the class."""
    return _cross_entropy(model(x), y)


def sla_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of class x rotation over the four turns of every image."""
    return _cross_entropy(model(rotate(x, VIEWS)), join_labels(y, VIEWS))


def rotation_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the class plus, with the second head, of the rotation (weight 1, as in TTAB)."""
    loss, accuracy = _cross_entropy(model(x), y)
    forward_rotation: Callable[[Tensor], Tensor] = getattr(model, "forward_rotation")  # noqa: B009 (mypy)
    turns = torch.arange(VIEWS, device=x.device).repeat_interleave(len(x))
    return loss + F.cross_entropy(forward_rotation(rotate(x, VIEWS)).float(), turns), accuracy


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    accuracy = (logits.detach().argmax(1) == labels).float().mean()
    return F.cross_entropy(logits.float(), labels), accuracy


LOSSES: dict[str, Objective] = {"plain": plain_loss, "sla": sla_loss, "rotation": rotation_loss}


@torch.no_grad()
def check_model(model: nn.Module, objective: str, example: Tensor, num_classes: int) -> None:
    """Refuse a model whose outputs do not fit the objective; the model must be in evaluation mode."""
    if objective == "rotation" and not callable(getattr(model, "forward_rotation", None)):
        raise ValueError(
            "objective 'rotation' needs a second head: train ttvd.nn.rotation.RotationNet(model)"
        )
    outputs = model(example).shape[1]
    views = VIEWS if objective == "sla" else 1
    if outputs % views or outputs < num_classes * views:
        raise ValueError(
            f"objective {objective!r} with {num_classes} classes needs at least {num_classes * views} outputs "
            f"(classes x {views}), the model has {outputs}"
        )
