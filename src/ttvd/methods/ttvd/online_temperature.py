"""A temperature for the answers, measured along the stream on known labels: the rotations of the views."""

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast
from ttvd.methods.shared.losses import all_finite
from ttvd.nn.norms import TracksStream

START = 64.0
"""Fisher information that the initial value 1 counts as; it never fades.

An image with a moderately uncertain prediction adds about 0.5, so one wrong view among thousands of confident, correct
ones changes little.
"""
MEMORY = 512
"""Length of the fading memory in images: a batch of n images removes the share n / MEMORY of earlier information."""
POWER = 0.7
"""Exponent that turns the temperature of the rotations into that of the answers; see :class:`OnlineTemperature`."""


class OnlineTemperature(TracksStream):
    """Tracks the temperature at which the head is calibrated for rotations.

    The classes of a stream are unknown, but every view was turned by a known angle. With l the logarithms of the
    probabilities of the rotations, softmax(s l) is the prediction at the temperature 1 / s. The s of largest likelihood
    is found by Fisher scoring, s <- s - n g / I, where g is the mean slope of the cross-entropy over the n images of a
    batch and I the information so far.

    A head that is overconfident about rotations is overconfident about classes. Answers sum over the views and have
    a temperature fitted on source data already; the exponent that turns one temperature into the other is empirical.

    Args:
        like: A tensor with the device and the data type of the state.

    Example:
        >>> from ttvd.nn.norms import following_stream
        >>> online_temperature = OnlineTemperature(torch.zeros(()))
        >>> sure = torch.tensor([[3.0, 0.0], [0.0, 3.0]]).log_softmax(1)  # confident in the rotations 0 and 1
        >>> with following_stream(online_temperature):
        ...     for _ in range(20):
        ...         online_temperature.update(sure.repeat(2, 32, 1))  # correct in half of the cases
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
    def update(self, rotations: Tensor) -> None:
        """Take a batch into account, inside ``following_stream`` and not inside ``settled_stream``.

        Values that are not finite change nothing.

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
        """The factor on the temperature of the answers, a scalar from 0.62 to 2.64."""
        return self.sharpness.pow(-POWER)
