"""SHOT, online: information maximisation and self-training under a frozen head."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.shared.losses import entropy, mean_over
from ttvd.nn.split import SplitModel, split

_EPS = 1e-5  # inside the logarithm of the mean prediction, as in TTAB


@register(
    "shot",
    summary="Certain on each sample, diverse over the batch, under a frozen head; trains all features.",
    paper="Liang et al., ICML 2020",
    updates="features",
    forwards=1,
    backwards=1,
)
class SHOT(GradientAdapter):
    """Fits the features to a head that stays: predictions become certain one by one and diverse together.

    With p the prediction of a sample and m their mean over the batch, the loss is

    mean H(p) + sum_k m_k log(m_k + 1e-5) + weight * mean over {max p > confidence} of -log max p.

    Works with batch, group and layer norm. Of a single sample the first two terms all but cancel, so that a batch of
    one learns from its pseudo-label alone.

    This is the online form of the benchmark that the paper compares in (TTAB, after the T3A authors' port); the
    original is offline: fifteen epochs over the whole target set, with pseudo-labels from class centroids after each.

    Deviations from TTAB: the model runs in evaluation mode with batch statistics, so that dropout stays off (the
    running averages that its training mode keeps are never read), and without a confident sample the last term is 0,
    where theirs is NaN.

    Args:
        model: The classifier; its last linear layer stays as it is.
        weight: Weight of the pseudo-labels: 0.3 in SHOT and TTAB, 0.1 in the T3A authors' port.
        confidence: Samples above this probability have a pseudo-label; 0.9 in TTAB.
        lr: Learning rate; TTAB searches 5e-3, 1e-3 and 5e-4.
        optimizer: ``"sgd"`` (Nesterov, as in TTAB) or ``"adam"`` (as in the T3A authors' port).

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> shot = SHOT(net)
        >>> shot(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
        >>> [name for name, p in shot.model.named_parameters() if p.requires_grad]
        ['model.1.weight', 'model.1.bias']
    """

    model: SplitModel

    def __init__(
        self,
        model: nn.Module,
        *,
        weight: float = 0.3,
        confidence: float = 0.9,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(split(model), parameters="features", **options)
        if not weight >= 0.0:
            raise ValueError(f"weight must be at least 0, got {weight}")
        if not 0.0 <= confidence <= 1.0:
            raise ValueError(f"confidence is a probability, between 0 and 1; got {confidence}")
        self.weight, self.confidence = weight, confidence

    def output(self, x: Tensor) -> Tensor:
        """Logits; at the first use it is checked that the layer which stays is the head."""
        return self.model.features_and_logits(x)[1]

    def loss(self, x: Tensor) -> Step:
        """Information maximisation over the batch, cross-entropy of the confident samples."""
        logits = self.output(x)
        mean = logits.softmax(1).mean(0)
        diversity = (mean * (mean + _EPS).log()).sum()
        best, labels = logits.detach().softmax(1).max(1)
        own = F.cross_entropy(logits, labels, reduction="none")
        loss = entropy(logits).mean() + diversity + self.weight * mean_over(own, best > self.confidence)
        return Step(logits, loss, torch.ones_like(self.kept))
