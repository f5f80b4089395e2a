"""Watches how sure the source is of the images: shifts that the images themselves do not show."""

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast
from ttvd.methods.shared.guard import rank_entropies
from ttvd.methods.shared.losses import all_finite, entropy
from ttvd.nn.norms import TracksStream

MEMORY = 128
"""Images that the mean rank counts as at most; older ones fade."""
CHANCE = 2.5 / 12**0.5
"""Two and a half standard deviations of a rank, which is uniform on images of the source."""
TOLERANCE, REMAINING = 0.2, 0.1
"""Difference between the mean rank and 1/2 that is no evidence, since some classes are harder than others; and the one
at which evidence that was there goes, so that it does not come and go by chance."""


class AnswerDrift(TracksStream):
    """Compares the entropies of the source's answers with those on source images.

    Descriptors of images miss some shifts, such as small distortions. Where the network is much less sure than on
    images of the source, it says so itself: the mean rank of its entropies among those of source images rises from 1/2
    towards 1. Only answers of the source are counted. As long as an adapter has not left the source, its answers are
    those of the source, and cost nothing. Later the looks of a guard show some more; without them the evidence stays
    until the stream changes.

    Args:
        quantiles: Sorted quantiles (q,) of the entropies on held-out source images.
        like: A tensor with the device of the state.

    Example:
        >>> drift = AnswerDrift(torch.linspace(0, 1.386, 65), torch.zeros(()))
        >>> drift.observe(torch.zeros(64, 4), torch.tensor(1.0))  # four classes, and nothing is known of any image
        >>> drift.evidence().item()
        1.0
    """

    quantiles: Tensor
    rank: Tensor
    images: Tensor
    shifted: Tensor

    def __init__(self, quantiles: Tensor, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("quantiles", quantiles.detach().to(like.device, torch.float32), persistent=False)
        self.register_buffer("rank", torch.full((), 0.5, device=like.device))
        self.register_buffer("images", torch.zeros((), device=like.device))
        self.register_buffer("shifted", torch.zeros((), dtype=torch.bool, device=like.device))

    def update(self, scores: Tensor, weight: Tensor) -> None:
        """Take a batch into account, inside ``following_stream`` and not inside ``settled_stream``.

        Args:
            scores: Scores (b, k) at the temperature of the quantiles.
            weight: What the images count, a scalar: 0 where the adapter has left the source.
        """
        if self.following and not self.settled:
            self.observe(scores, weight)

    @torch.no_grad()
    def observe(self, scores: Tensor, weight: Tensor) -> None:
        """Take answers of the source into account. Values that are not finite change nothing.

        Args:
            scores: Scores (b, k) at the temperature of the quantiles.
            weight: What the images count, a scalar.
        """
        entropies = entropy(upcast(scores))
        ranks = rank_entropies(self.quantiles, entropies)
        size = len(scores) * weight.to(self.rank.dtype)
        kept = self.images.clamp_max(MEMORY)
        found = torch.lerp(self.rank, ranks.mean(), size / (kept + size).clamp_min(1.0))
        fine = all_finite(entropies)  # what is not finite has a rank, too
        torch.where(fine, found, self.rank, out=self.rank)
        torch.where(fine, kept + size, self.images, out=self.images)

    def turned(self) -> Tensor:
        """Return whether the evidence has changed since the last batch began, a scalar."""
        return (self.evidence() > 0) != self.shifted

    @torch.no_grad()
    def begin(self, changed: Tensor) -> None:
        """Begin a batch.

        Args:
            changed: Whether the images have changed. What was seen before belongs to another stream then, unless the
                answers have turned by themselves.
        """
        turned = self.turned()
        forget = changed & ~turned
        self.shifted.copy_((self.evidence() > 0) & ~forget)
        self.images.mul_(~forget)
        self.rank.copy_(torch.where(forget, 0.5, self.rank))

    def evidence(self) -> Tensor:
        """The evidence of a shift, a scalar: 0 or 1."""
        chance = CHANCE * self.images.clamp_min(1.0).rsqrt()
        least = torch.where(self.shifted, REMAINING, chance + TOLERANCE)
        return (self.rank - 0.5 > least).to(self.rank.dtype)
