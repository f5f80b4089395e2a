"""How much there is to adapt to, measured along the stream on labels that are known: the rotations of the views."""

import torch
from torch import Tensor

from ttvd.engine.flat import all_finite
from ttvd.geometry.precision import upcast
from ttvd.nn.norms import TracksStream

SCALE = 0.1
"""Nats above the loss on source data from which on steps are full."""
MEMORY = 256
"""The most images that what is known of the stream is worth."""


class StepScale(TracksStream):
    """Follows how far the loss of known rotations lies above what it is on source data.

    A stream like the source needs no adaptation, and steps do harm there: they follow the noise of batches. Nobody
    knows the classes of a stream, but every view was turned by a known angle, so that its mean of -log p_a(a) can be
    held against that of held-out source data. Steps are multiplied by the difference in units of ``SCALE``, at least
    by 0 and at most by 1.

    Args:
        usual: The loss on source data, of the sites.
        like: A tensor of the device and the type of the state.

    Example:
        >>> from ttvd.nn.norms import following_stream
        >>> need = StepScale(0.1, torch.zeros(()))
        >>> with following_stream(need):
        ...     need.follow(torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log().expand(2, 64, 2))  # sure, and right
        >>> round(need.factor().item(), 2)
        0.05
    """

    level: Tensor
    images: Tensor

    def __init__(self, usual: float, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.usual = usual
        self.register_buffer("level", torch.full((), usual + SCALE, dtype=dtype, device=like.device))
        self.register_buffer("images", torch.zeros((), dtype=torch.int64, device=like.device))

    @torch.no_grad()
    def follow(self, rotations: Tensor) -> None:
        """Take a batch into account, inside ``following_stream`` and not inside ``settled_stream``.

        What is not finite changes nothing.

        Args:
            rotations: (v, b, r) logarithms of probabilities; view a has the a-th of r rotations.
        """
        if not self.following or self.settled:
            return
        size, dtype = rotations.shape[1], self.level.dtype
        found = -upcast(rotations.detach()).diagonal(dim1=0, dim2=2).mean().to(dtype)
        share = size / (self.images.to(dtype).clamp_max(MEMORY) + size)
        new = torch.lerp(self.level, found, share)
        fine = all_finite(new)
        torch.where(fine, new, self.level, out=self.level)
        self.images.add_(fine * size)

    def factor(self) -> Tensor:
        """By how much to multiply steps: a scalar from 0 to 1."""
        return ((self.level - self.usual) / SCALE).clamp(0.0, 1.0)
