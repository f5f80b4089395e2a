"""Tent: entropy minimisation by the affine parameters of the norms."""

import torch
from torch import Tensor, nn

from ttvd.methods.adapter import Timing
from ttvd.methods.gradient import GradientAdapter, Step
from ttvd.methods.registry import register
from ttvd.methods.shared.losses import entropy
from ttvd.nn.norms import Statistics


@register(
    "tent",
    summary="Minimises the entropy of the predictions by the norms' affine parameters.",
    paper="Wang et al., ICLR 2021",
    updates="norm affine",
    forwards=1,
    backwards=1,
)
class Tent(GradientAdapter):
    """Minimises the mean entropy of softmax(logits) over each batch.

    Works with batch, group and layer norm. Batch norms use the statistics of the batch. Deviation from the authors'
    code: the model runs in evaluation mode, so that dropout and stochastic depth stay off.

    Args:
        model: The classifier.
        lr: Learning rate; the paper uses Adam with 1e-3 on CIFAR and SGD with 2.5e-4 on ImageNet.
        optimizer: ``"adam"`` or ``"sgd"``.
        momentum: Momentum of SGD, first beta of Adam.
        steps: Gradient steps for each batch.
        statistics: Where batch norms take their statistics from.
        prediction: The paper predicts before the update; its authors saw no difference.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> tent = Tent(net, lr=1e-3)
        >>> tent(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        optimizer: str = "adam",
        momentum: float = 0.9,
        steps: int = 1,
        statistics: Statistics | None = None,
        prediction: Timing = "before",
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            steps=steps,
            statistics=statistics,
            prediction=prediction,
        )

    def loss(self, x: Tensor) -> Step:
        """Mean entropy of the batch."""
        logits = self.output(x)
        return Step(logits, entropy(logits).mean(), torch.ones_like(self.kept))
