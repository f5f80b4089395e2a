"""How alike the images of a batch are, along a stream: it tells how far the shares of classes in a batch can be off."""

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast
from ttvd.models.norms import Follower

START = 64
"""Images that the state at the start, equal shares in all batches, is worth."""
MEMORY = 1024
"""The most images that the state is worth; older ones count less and less."""


class Sameness(Follower):
    """Follows how often two images of a batch are of one class, and says how unequal the shares of batches are.

    If the shares of a batch are drawn from a Dirichlet distribution around equal ones, of concentration A, two of its
    images are of one class at the rate s = (A / k + 1) / (A + 1), and (s - 1 / k) / (1 - 1 / k) = 1 / (A + 1). The mean
    of p_i . p_j over the pairs of a batch estimates s, so that the stream itself says what A is: large where batches
    are well mixed, near 0 where they come sorted by class. With A imagined images the estimate of
    :func:`ttvd.geometry.prior.shift_weights` is what Bayes' rule makes of the batch (empirical Bayes).

    Args:
        like: A tensor of the device and the type of the state.

    Example:
        >>> from ttvd.models.norms import following_stream
        >>> sameness = Sameness(torch.zeros(()))
        >>> mixed = sameness.concentration().item()
        >>> with following_stream(sameness):
        ...     for _ in range(50):
        ...         sameness.follow(torch.tensor([[9.0, 0.0, 0.0, 0.0]]).expand(64, 4))
        >>> mixed > 1e3, sameness.concentration().item() < 0.1
        (True, True)
    """

    excess: Tensor
    images: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("excess", torch.zeros((), dtype=dtype, device=like.device))
        self.register_buffer("images", torch.zeros((), dtype=torch.int64, device=like.device))

    @torch.no_grad()
    def follow(self, scores: Tensor) -> None:
        """Take a batch into account, inside ``following_stream`` and not inside ``settled_stream``.

        A batch of one image has no pair and says nothing, and neither do posteriors that are not finite.

        Args:
            scores: (b, k), k at least 2; their softmax are the posteriors for equal shares.
        """
        size, classes = scores.shape
        if size < 2 or not self.following or self.settled:
            return
        probs = upcast(scores).softmax(1)
        rate = (probs.sum(0).square().sum() - probs.square().sum()) / (size * (size - 1))
        found = (rate - 1 / classes) / (1 - 1 / classes)
        worth = (self.images + START).clamp_max(MEMORY).to(self.excess.dtype)
        new = self.excess + (found - self.excess) * (size / (worth + size))
        fine = new.isfinite()
        self.excess.copy_(torch.where(fine, new, self.excess))
        self.images.add_(fine * size)

    def concentration(self) -> Tensor:
        """A, a scalar from 0.01 to about 10,000."""
        return 1.0 / self.excess.clamp(1e-4, 1 / 1.01) - 1.0
