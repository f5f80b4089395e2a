"""How confident answers should be, measured along the stream on labels that are known: the rotations of the views."""

import torch
from torch import Tensor

from ttvd.engine.flat import all_finite
from ttvd.geometry.precision import upcast
from ttvd.nn.norms import TracksStream

START = 64.0
"""Information that the opinion at hand is worth before anything was seen, and that is never forgotten.

An image of moderate doubt has about 0.5: so one wrong view among thousands that are sure and right moves little.
"""
MEMORY = 512
"""Images of a memory that fades from the first on: a batch of n forgets n / MEMORY of what was before."""
POWER = 0.7
"""What the temperature of rotations is raised to for answers; see :class:`OnlineTemperature`."""


class OnlineTemperature(TracksStream):
    """Follows the temperature at which the head would be right about rotations as often as it says.

    Nobody knows the classes of a stream, but every view was turned by a known angle. With l the logarithms of the
    probabilities of the rotations, softmax(s l) is the head's opinion at the temperature 1 / s; the s of the largest
    likelihood is found by steps of Fisher scoring, s <- s - n g / I, where g is the mean slope of the cross-entropy
    over the n images of a batch and I the information so far.

    A head that is too sure of rotations is too sure of classes. Answers sum over the views and are fitted already on
    source data; which power of the temperature of the rotations suits them is an observation.

    Args:
        like: A tensor of the device and the type of the state.

    Example:
        >>> from ttvd.nn.norms import following_stream
        >>> online_temperature = OnlineTemperature(torch.zeros(()))
        >>> sure = torch.tensor([[3.0, 0.0], [0.0, 3.0]]).log_softmax(1)  # sure of the rotations 0 and 1
        >>> with following_stream(online_temperature):
        ...     for _ in range(20):
        ...         online_temperature.follow(sure.repeat(2, 32, 1))  # which is right in half of the cases
        >>> bool(online_temperature.factor() > 1.5)
        True
    """

    sharpness: Tensor
    information: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("sharpness", torch.ones((), dtype=dtype, device=like.device))
        self.register_buffer("information", torch.full((), START, dtype=dtype, device=like.device))

    @torch.no_grad()
    def follow(self, rotations: Tensor) -> None:
        """Take a batch into account, inside ``following_stream`` and not inside ``settled_stream``.

        What is not finite changes nothing.

        Args:
            rotations: (v, b, r) logarithms of probabilities; view a has the a-th of r rotations.
        """
        if not self.following or self.settled:
            return
        logs, size = upcast(rotations.detach()), rotations.shape[1]
        weights = (self.sharpness * logs).softmax(-1)
        expected = (weights * logs).sum(-1)
        slope = (expected - logs.diagonal(dim1=0, dim2=2).T).mean()
        spread = (weights * (logs - expected[..., None]).square()).sum(-1).mean()
        information = START + (self.information - START) * max(0.0, 1.0 - size / MEMORY) + size * spread
        sharpness = (self.sharpness - size * slope / information).clamp(0.25, 2.0)
        fine = all_finite(sharpness + information)
        torch.where(fine, sharpness, self.sharpness, out=self.sharpness)
        torch.where(fine, information, self.information, out=self.information)

    def factor(self) -> Tensor:
        """By how much to multiply the temperature of answers: a scalar from 0.62 to 2.64."""
        return self.sharpness.pow(-POWER)
