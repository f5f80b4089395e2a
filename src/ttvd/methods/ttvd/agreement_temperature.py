"""A temperature for the answers, measured along the stream without labels: on the agreement of two views."""

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast
from ttvd.methods.shared.losses import all_finite
from ttvd.nn.norms import TracksStream

START = 64
"""Images that the initial value 1 counts as."""
MEMORY = 512
"""Images that the estimate counts as at most; older ones fade."""
FACTORS = tuple(0.5 * 2 ** (i / 4) for i in range(21))
"""Factors on the temperature at which the confidence is tracked, from 0.5 to 16."""
_SLOPE = 0.1
"""Confidence that an initial estimate loses when the temperature grows by the factor e."""


class AgreementTemperature(TracksStream):
    """Tracks the temperature at which the mean confidence equals the accuracy that two views suggest.

    The upright and the mirrored image of one photograph make the model err in different ways. How often they get
    different classes grows with how often the answer from both is wrong (generalisation disagreement, Jiang et al.,
    ICLR 2022). On source images both are known, and so is the exponent r of accuracy = agreement^r. So the stream shows
    how confident the answers should be on average.

    The mean confidence minus the suggested accuracy is tracked at each of ``FACTORS``. It falls as the factor grows,
    and the factor in use is where it is 0.

    With many classes, views that disagree often choose two similar classes, and the answer from both is right more
    often than this suggests. There the accuracy is at least proportional to the agreement.

    A network whose norms cannot follow a shift gives both views the same wrong class: under low contrast, a small ViT
    had 22 % right and an agreement of 94 %. There agreement is no reason to be surer than on source images (``least``).

    Args:
        exponent: r, from source images.
        like: A tensor with the device and the data type of the state.
        ratio: Smallest accuracy divided by agreement, as on source images; 0 for none.
        least: Smallest factor.

    Example:
        >>> from ttvd.nn.norms import following_stream
        >>> temperature = AgreementTemperature(1.0, torch.zeros(()))
        >>> sure = 5.0 * torch.eye(3)[torch.tensor([[0, 0], [0, 1]])]  # two views of two images: one pair agrees
        >>> with following_stream(temperature):
        ...     for _ in range(20):
        ...         temperature.update(sure.repeat(1, 32, 1), sure.mean(0).repeat(32, 1))
        >>> bool(temperature.factor() > 2.0)
        True
    """

    gaps: Tensor
    images: Tensor
    logs: Tensor

    def __init__(self, exponent: float, like: Tensor, ratio: float = 0.0, least: float = FACTORS[0]) -> None:
        super().__init__()
        self.exponent, self.ratio, self.least = exponent, ratio, least
        dtype = torch.promote_types(like.dtype, torch.float32)
        logs = torch.tensor(FACTORS, dtype=torch.float64).log().to(like.device, dtype)
        self.register_buffer("logs", logs, persistent=False)
        self.register_buffer("gaps", -_SLOPE * logs)
        self.register_buffer("images", torch.zeros((), dtype=dtype, device=like.device))

    @torch.no_grad()
    def update(self, views: Tensor, scores: Tensor) -> None:
        """Take a batch into account, inside ``following_stream`` and not inside ``settled_stream``.

        Values that are not finite change nothing.

        Args:
            views: Class scores of the two views, (2, b, k).
            scores: Class scores from both, (b, k); the confidence is that of their softmax at each temperature.
        """
        if not self.following or self.settled:
            return
        size, scores = len(scores), upcast(scores)
        one, other = views.argmax(2)
        agreement = (one == other).to(self.gaps.dtype).mean()
        accuracy = torch.maximum(agreement.pow(self.exponent), self.ratio * agreement)
        scaled = scores * (-self.logs).exp()[:, None, None]
        found = (scaled.amax(2) - scaled.logsumexp(2)).exp().mean(1)
        kept = self.images.clamp_max(MEMORY)
        gaps = torch.lerp(self.gaps, found.to(self.gaps.dtype) - accuracy, size / (kept + (START + size)))
        fine = all_finite(gaps)
        torch.where(fine, gaps, self.gaps, out=self.gaps)
        torch.where(fine, kept + size, self.images, out=self.images)

    def factor(self) -> Tensor:
        """The factor on the temperature of the answers, a scalar from the least one to 16."""
        high = (self.gaps > 0).sum().clamp(1, len(FACTORS) - 1)
        low = high - 1
        here, there = self.gaps.gather(0, low[None]), self.gaps.gather(0, high[None])
        share = (here / (here - there).clamp_min(1e-6)).clamp(0.0, 1.0)
        logs = torch.lerp(self.logs.gather(0, low[None]), self.logs.gather(0, high[None]), share)
        return logs.exp().squeeze(0).clamp_min(self.least)
