"""The classifier as it was trained: the line that every method has to beat."""

from torch import nn

from ttvd.methods.adapter import Adapter
from ttvd.methods.registry import register
from ttvd.nn.norms import Statistics


@register(
    "source",
    summary="No adaptation: the model with the statistics of its training data.",
    paper="-",
    updates="nothing",
    forwards=1,
    backwards=0,
)
class Source(Adapter):
    """No adaptation at all.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> x = torch.rand(3, 1, 2, 2)
        >>> torch.equal(Source(net)(x), net(x))
        True
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, statistics=Statistics.source())
