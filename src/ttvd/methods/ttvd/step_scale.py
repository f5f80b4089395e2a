"""The size of steps, measured along the stream on known labels: the rotations of the views."""

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast
from ttvd.methods.shared.losses import all_finite
from ttvd.nn.norms import TracksStream
from ttvd.nn.views import rotation_nll

SCALE = 0.1
"""Steps are full where the loss lies this many nats or more above that on source data."""
MEMORY = 256
"""How many images the running loss counts as at most."""


class StepScale(TracksStream):
    """Tracks how far the loss of the known rotations lies above that on source data.

    A stream like the source needs no adaptation, and steps only add the noise of batches there. The classes of a stream
    are unknown, but every view was turned by a known angle. So its rotation loss can be compared with that of held-out
    source data. Steps are multiplied by the difference in units of ``SCALE``, clipped to [0, 1].

    Args:
        source_loss: The rotation loss on source data, from the sites.
        like: A tensor with the device and the data type of the state.

    Example:
        >>> from ttvd.nn.norms import following_stream
        >>> scale = StepScale(0.1, torch.zeros(()))
        >>> with following_stream(scale):
        ...     scale.update(torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log().expand(2, 64, 2))  # confident and correct
        >>> round(scale.factor().item(), 2)
        0.05
    """

    level: Tensor
    images: Tensor

    def __init__(self, source_loss: float, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.source_loss = source_loss
        self.register_buffer("level", torch.full((), source_loss + SCALE, dtype=dtype, device=like.device))
        self.register_buffer("images", torch.zeros((), dtype=torch.int64, device=like.device))

    @torch.no_grad()
    def update(self, rotations: Tensor) -> None:
        """Take a batch into account, inside ``following_stream`` and not inside ``settled_stream``.

        Values that are not finite change nothing.

        Args:
            rotations: (v, b, r) logarithms of probabilities; view a has the a-th of r rotations.
        """
        if not self.following or self.settled:
            return
        size, dtype = rotations.shape[1], self.level.dtype
        found = rotation_nll(upcast(rotations.detach())).mean().to(dtype)
        share = size / (self.images.to(dtype).clamp_max(MEMORY) + size)
        new = torch.lerp(self.level, found, share)
        fine = all_finite(new)
        torch.where(fine, new, self.level, out=self.level)
        self.images.add_(fine * size)

    def factor(self) -> Tensor:
        """The factor on steps, a scalar from 0 to 1."""
        return ((self.level - self.source_loss) / SCALE).clamp(0.0, 1.0)
