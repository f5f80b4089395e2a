"""Estimates along a stream how much the shares of the classes differ from batch to batch."""

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast
from ttvd.methods.shared.losses import all_finite
from ttvd.nn.norms import TracksStream

START = 64
"""How many images the initial estimate, equal shares in all batches, counts as."""
MEMORY = 1024
"""How many images the estimate counts as at most; older ones fade."""


class LabelShiftEstimator(TracksStream):
    """Tracks how much more often two images of one batch share a class than two images of different batches.

    If the shares of a batch are drawn from a Dirichlet distribution of concentration A around those of the stream, two
    of its images share a class at the rate s = b + (1 - b) / (A + 1), where b is the rate of two images of different
    batches. The mean of p_i . p_j over the pairs of a batch estimates s. The product of its mean posterior with that of
    earlier batches estimates b. So the stream itself shows A: large where batches are alike, near 0 where they come
    sorted by class. With A pseudo-images, :func:`ttvd.geometry.prior.shift_weights` is the empirical Bayes estimate
    of the shares.

    A model that a shift has biased towards some classes predicts these in all batches alike: b grows with s, and the
    bias is not mistaken for unequal shares. Shares that are the same in all batches cannot be told from such a bias;
    they are not corrected.

    Args:
        classes: Number of classes, k, at least 2.
        like: A tensor with the device and the data type of the state.

    Example:
        >>> from ttvd.nn.norms import following_stream
        >>> label_shift = LabelShiftEstimator(4, torch.zeros(()))
        >>> mixed = label_shift.concentration().item()
        >>> with following_stream(label_shift):
        ...     for batch in range(50):  # the first all of class 0, the next all of class 1
        ...         label_shift.update(9.0 * torch.eye(4)[[batch % 4]].expand(64, 4))
        >>> mixed > 1e3, label_shift.concentration().item() < 0.1
        (True, True)
    """

    excess: Tensor
    images: Tensor
    mean: Tensor

    def __init__(self, classes: int, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("excess", torch.zeros((), dtype=dtype, device=like.device))
        self.register_buffer("images", torch.zeros((), dtype=torch.int64, device=like.device))
        self.register_buffer("mean", torch.full((classes,), 1 / classes, dtype=dtype, device=like.device))

    @torch.no_grad()
    def update(self, scores: Tensor) -> None:
        """Take a batch into account, inside ``following_stream`` and not inside ``settled_stream``.

        The first batch cannot be compared with an earlier one, nor a single image with another one of its batch: they
        only enter the mean. Posteriors that are not finite change nothing.

        Args:
            scores: (b, k); their softmax gives the posteriors for equal shares.
        """
        if not self.following or self.settled:
            return
        size, dtype = len(scores), self.excess.dtype
        probs = upcast(scores).softmax(1).to(dtype)
        total, seen = probs.sum(0), self.images.to(dtype)
        mean = total / size
        if size > 1:
            rate = (total.square().sum() - probs.square().sum()) / (size * (size - 1))
            base = (mean * self.mean).sum()  # no matrix product, which autocast would round
            found = (rate - base) / (1 - base).clamp_min(0.05)  # a stream of one class shows nothing
            step = size / (seen.clamp_max(MEMORY - START) + (START + size))
            new = torch.lerp(self.excess, found, step * (seen > 0))
            torch.where(all_finite(new), new, self.excess, out=self.excess)
        merged = torch.lerp(self.mean, mean, size / (seen + size))
        fine = all_finite(merged)
        torch.where(fine, merged, self.mean, out=self.mean)
        self.images.add_(fine * size)

    def concentration(self) -> Tensor:
        """A, a scalar from 0.01 to about 10,000."""
        return 1.0 / self.excess.clamp(1e-4, 1 / 1.01) - 1.0
