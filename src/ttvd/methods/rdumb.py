"""RDumb: ETA that starts again from the source every thousand batches."""

from typing import ClassVar, Unpack

from torch import nn

from ttvd.methods.eata import ETA
from ttvd.methods.gradient import StepOptions
from ttvd.methods.policies import ResetEvery
from ttvd.methods.registry import register


@register(
    "rdumb",
    summary="ETA that starts again from the source every 1000 batches.",
    paper="Press et al., NeurIPS 2023",
    updates="norm affine",
    forwards=1,
    backwards=1,
)
class RDumb(ResetEvery):
    """ETA inside of :class:`~ttvd.methods.policies.ResetEvery`: a baseline that does not decay on long streams.

    The restart is complete: weights, optimizer and ETA's moving mean. Works where ETA works.

    Args:
        model: The classifier.
        batches: Batches between two restarts; 1000 in the paper.
        margin, similarity, lr, momentum, steps, statistics, prediction: As in :class:`~ttvd.methods.eata.ETA`;
            the paper has a margin of 0.4, a similarity of 0.05 (for ImageNet) and a learning rate of 2.5e-4.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> RDumb(net, batches=10)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    defaults: ClassVar[StepOptions] = ETA.defaults

    def __init__(
        self,
        model: nn.Module,
        *,
        batches: int = 1000,
        margin: float = 0.4,
        similarity: float | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(ETA(model, margin=margin, similarity=similarity, **options), batches)
