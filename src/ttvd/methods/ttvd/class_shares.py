"""The shares of the classes among the last images of a stream, as predicted."""

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast
from ttvd.methods.shared.losses import all_finite
from ttvd.nn.norms import TracksStream

WINDOW = 64
"""Images that the shares are taken from; a larger batch fills the window alone."""
ALIKE = 1.0
"""Share of the variance of a norm's input that images of one class have in common."""
MARGIN = 3.0
"""Factor on the way that a mixture of classes explains: its classes may resemble each other."""
MIXED, SORTED = 0.1, 0.3
"""Steps are full up to the first concentration, and 0 from the second one on."""


class ClassShares(TracksStream):
    """Tracks the mean prediction of the last images.

    Its concentration is 0 if all classes have the same share and 1 if one class has all. Where it is high, either the
    images come sorted by class, or the model has collapsed. Nothing can be learnt from such a window: the loss would
    move all images into one cell.

    Args:
        classes: Number of classes, k.
        like: A tensor with the device and the data type of the state.

    Example:
        >>> from ttvd.nn.norms import following_stream
        >>> shares = ClassShares(4, torch.zeros(()))
        >>> before = shares.step_factor().item()
        >>> with following_stream(shares):
        ...     shares.update(20.0 * torch.eye(4)[[0]].expand(64, 4))
        >>> before, shares.step_factor().item()
        (1.0, 0.0)
    """

    shares: Tensor
    squares: Tensor
    images: Tensor

    def __init__(self, classes: int, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("shares", torch.full((classes,), 1 / classes, dtype=dtype, device=like.device))
        self.register_buffer("squares", torch.full((), 1 / classes, dtype=dtype, device=like.device))
        self.register_buffer("images", torch.zeros((), dtype=dtype, device=like.device))

    @torch.no_grad()
    def update(self, scores: Tensor) -> None:
        """Take a batch of scores (b, k) into account, inside ``following_stream`` and not inside ``settled_stream``.

        Values that are not finite change nothing.
        """
        if not self.following or self.settled:
            return
        size = len(scores)
        probs = upcast(scores).softmax(1).to(self.shares.dtype)
        kept = self.images.clamp_max(max(0, WINDOW - size))
        part = size / (kept + size)
        shares = torch.lerp(self.shares, probs.mean(0), part)
        squares = torch.lerp(self.squares, probs.square().sum(1).mean(), part)
        fine = all_finite(shares)
        torch.where(fine, shares, self.shares, out=self.shares)
        torch.where(fine, squares, self.squares, out=self.squares)
        torch.where(fine, kept + size, self.images, out=self.images)

    def concentration(self) -> Tensor:
        """A scalar from 0, all classes alike, to 1, a single class.

        It is made from the rate at which two images of the window share a class. An image is not paired with itself, so
        that few images do not look like few classes.
        """
        least = 1 / len(self.shares)
        alone, own = self.shares.square().sum(), self.squares
        pairs = (self.images * alone - own) / (self.images - 1.0).clamp_min(1.0)
        rate = torch.where(self.images > 1, pairs, alone)
        return ((rate - least) / max(1.0 - least, 1e-6)).clamp(0.0, 1.0)

    def class_scale(self, accuracy: float) -> Tensor:
        """How far the mean of the images may lie from that of all classes, as a share of what one class may.

        The mean of m classes lies about 1 / sqrt(m) as far away as those of single classes do. Shares of one class that
        is predicted with this accuracy give 1, and so does a stream of which nothing has been seen yet.

        Args:
            accuracy: Accuracy on source images.
        """
        rate = torch.maximum(self.shares.square().sum(), self.images.clamp_min(1.0).reciprocal())
        scale = (MARGIN * rate.sqrt() / max(accuracy, 1e-3)).clamp_max(1.0)
        return torch.where(self.images > 0, scale, 1.0)

    def weight(self) -> Tensor:
        """What an image counts, between 1 and 0: images of one class tell little about the stream as a whole."""
        return 1.0 / (1.0 + self.concentration() * (WINDOW - 1) * ALIKE)

    def step_factor(self) -> Tensor:
        """The factor on steps, a scalar from 0 to 1."""
        return ((SORTED - self.concentration()) / (SORTED - MIXED)).clamp(0.0, 1.0)
