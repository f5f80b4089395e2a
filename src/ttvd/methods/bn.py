"""BN adaptation: batch-norm statistics from the test batch."""

from torch import nn

from ttvd.methods.adapter import Adapter
from ttvd.methods.registry import register
from ttvd.nn.norms import Statistics


@register(
    "bn",
    summary="Batch-norm statistics from the test batch, mixed with the source's by a pseudo-count.",
    paper="Schneider et al., NeurIPS 2020",
    updates="norm statistics",
    forwards=1,
    backwards=0,
)
class BatchNormAdapt(Adapter):
    """Every batch norm uses p * source + (1 - p) * batch statistics with p = count / (count + batch size).

    With ``count=0`` (the default, as in the benchmark that the paper uses) the batch stands alone. Group, layer and
    instance norm are not affected: on a model without batch norm this is the source model.

    Deviation from the authors' code: the batch variance is the biased one, as in training, so that ``count=0`` is
    exactly the batch norm of training; theirs is larger by n / (n - 1), n values a channel.

    Args:
        model: The classifier.
        count: Pseudo-count of source samples, N in the paper; a good choice for small batches is 16.
        statistics: Any other statistics, in place of ``count``.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> BatchNormAdapt(net, count=16)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    def __init__(self, model: nn.Module, *, count: float = 0.0, statistics: Statistics | None = None) -> None:
        if count and statistics is not None:
            raise ValueError(
                f"give either count or statistics, got count={count} and statistics={statistics}"
            )
        super().__init__(model, statistics=statistics or Statistics(count=count))
