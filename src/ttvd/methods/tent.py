"""Tent: entropy minimisation by the affine parameters of the norms."""

from typing import ClassVar

import torch
from torch import Tensor

from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.shared.losses import entropy


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

    Works with batch, group and layer norm. The paper uses Adam with a learning rate of 1e-3 on CIFAR, SGD with 2.5e-4
    on ImageNet, and predicts before the update. Deviation from the authors' code: the model runs in evaluation mode,
    so dropout and stochastic depth stay off.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> Tent(net, lr=1e-3)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    defaults: ClassVar[StepOptions] = {**GradientAdapter.defaults, "optimizer": "adam"}

    def loss(self, x: Tensor) -> Step:
        """Mean entropy of the batch."""
        logits = self.output(x)
        return Step(logits, self.uncertainty(logits).mean(), torch.ones_like(self.kept))

    def uncertainty(self, logits: Tensor) -> Tensor:
        """What is minimised, for each sample (b,): the entropy."""
        return entropy(logits)
