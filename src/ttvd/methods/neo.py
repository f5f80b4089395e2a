"""NEO: the head sees features without their running mean."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry.precision import full_precision, upcast
from ttvd.methods.adapter import Adapter
from ttvd.methods.registry import register
from ttvd.nn.norms import Statistics
from ttvd.nn.split import SplitModel, split


@register(
    "neo",
    summary="Subtracts the running mean of the features before the head; nothing is learnt.",
    paper="Murphy et al., ICLR 2026",
    updates="mean of features",
    forwards=1,
    backwards=0,
)
class NEO(Adapter):
    """No-optimisation adaptation: logits W (z - mu) + b, with mu the running mean of the features z of the stream.

    A shift of the images moves all features of a well-trained classifier by about the same vector, and the features of
    balanced classes lie around the origin. So the mean of the features is what the shift has added. The mean takes the
    batch in before the batch is predicted:

    - ``continual``: mu <- (1 - momentum) mu + momentum * (mean of the batch), from mu = 0;
    - else mu is the mean over all samples so far, each with the same weight.

    In the continual form the first batches are corrected in part only: by 1 - 0.9^t of the mean at batch t. In the
    other form a single image at the start has z = mu, and its logits are b.

    Works with every model that has a linear head and with batches of any size. Norms keep the statistics of the source.
    The idea needs features around the origin; the paper measures ViTs. Features behind a ReLU have a mean far from 0 on
    source images too, and answers change there where W mu is not the same for all classes.

    That mu starts at 0 in the continual form is what the authors' code does; the text of the paper was not at hand.
    There are no other deviations.

    Args:
        model: The classifier.
        momentum: Share of the mean of the batch in mu, in the continual form; 0.1 in the authors' code.
        continual: Whether mu follows the stream; False for the plain mean over all samples, for streams of one shift.

    Attributes:
        mean: mu (d,); zeros before the first batch.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> NEO(net)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    prediction = "after"
    model: SplitModel
    mean: Tensor
    seen: Tensor

    def __init__(self, model: nn.Module, *, momentum: float = 0.1, continual: bool = True) -> None:
        super().__init__(split(model), statistics=Statistics.source())
        if not 0.0 < momentum <= 1.0:
            raise ValueError(f"momentum is the share of the batch in the mean, in (0, 1]; got {momentum}")
        self.momentum, self.continual = momentum, continual
        weight = self.model.linear.weight.detach()
        self.register_buffer("mean", upcast(weight).new_zeros(weight.shape[1]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=weight.device))

    def output(self, x: Tensor) -> Tensor:
        """Logits with the present mean."""
        return self._score(self.model.features(x))

    def adapt(self, x: Tensor) -> Tensor:
        """Update the running mean with the features of the batch, then predict the batch."""
        with torch.no_grad():
            z = self.model.features(x)
            self.seen.add_(len(x))
            share = self.momentum if self.continual else len(x) / self.seen.to(self.mean.dtype)
            self.mean.lerp_(z.mean(0).to(self.mean.dtype), share)
            return self._score(z)

    @full_precision
    def _score(self, z: Tensor) -> Tensor:
        head = self.model.linear
        bias = None if head.bias is None else head.bias.to(z.dtype)
        return F.linear(z - self.mean.to(z.dtype), head.weight.to(z.dtype), bias)
