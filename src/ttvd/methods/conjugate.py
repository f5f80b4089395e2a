"""Conjugate pseudo-labels: the unsupervised loss that belongs to the loss of the source training."""

from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register


def conjugate_loss(logits: Tensor, epsilon: float) -> Tensor:
    """Loss (b,) of the predictions against their own conjugate labels, for a source loss -log p_y + epsilon (1 - p_y).

    The conjugate label y solves (I + epsilon diag(p) - epsilon p p^T) y = p. The matrix is a diagonal one less one of
    rank one, so that by Sherman and Morrison y is p / (1 + epsilon p), divided by its sum: no system is solved.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0, 2.0]])
        >>> p = logits.softmax(1)
        >>> torch.allclose(conjugate_loss(logits, 0.0), -(p * p.log()).sum(1))
        True
    """
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    labels = (log_probs - torch.log1p(epsilon * probs)).softmax(-1)
    return (labels * (epsilon * (1.0 - probs) - log_probs)).sum(-1)


@register(
    "conjugate",
    summary="Minimises the source loss against its conjugate pseudo-labels; for cross-entropy that is Tent's loss.",
    paper="Goyal et al., NeurIPS 2022",
    updates="norm affine",
    forwards=2,
    backwards=1,
)
class ConjugatePL(GradientAdapter):
    """Pseudo-labels that follow from the source loss by convex conjugation, for cross-entropy and poly-1 sources.

    A source loss of the form f(h) - y^T g(h) has at its minimum over h the label y*(h); the loss at test time is the
    source loss against y*, and its gradient flows through y*. For cross-entropy (``epsilon=0``) y* is the softmax
    and the loss its entropy: Tent's. For poly-1, -log p_y + epsilon (1 - p_y), see :func:`conjugate_loss`.

    Works with batch, group and layer norm. Deviations from the authors' code: the labels come from a closed form
    instead of one k x k system for each sample, and dropout stays off.

    Args:
        model: The classifier.
        epsilon: The epsilon that the source was trained with, above -1: 0 for cross-entropy; the paper's poly-1
            sources have 6 on CIFAR and 8 on ImageNet.
        lr: Learning rate; 1e-3 in the authors' code.
        optimizer: ``"sgd"`` (Nesterov, as in the authors' code) or ``"adam"``.
        prediction: The authors predict by a new forward pass after the update; ``"before"`` saves it.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> ConjugatePL(net, epsilon=6.0)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    defaults: ClassVar[StepOptions] = {**GradientAdapter.defaults, "prediction": "after"}

    def __init__(
        self,
        model: nn.Module,
        *,
        epsilon: float = 0.0,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(model, **options)
        if not epsilon > -1.0:
            raise ValueError(
                f"epsilon must be above -1, where the source loss has no conjugate label; got {epsilon}"
            )
        self.epsilon = epsilon

    def loss(self, x: Tensor) -> Step:
        """Mean loss of the batch against its conjugate labels."""
        logits = self.output(x)
        return Step(logits, conjugate_loss(logits, self.epsilon).mean(), torch.ones_like(self.kept))
