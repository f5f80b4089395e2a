"""Instance-aware batch norm: batch statistics, corrected for images whose own statistics clearly differ."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InstanceAwareBatchNorm2d(nn.Module):
    """Batch norm that moves towards an image's own statistics as far as chance does not explain the difference.

    Let m and v be the mean and variance of a channel in the batch (in evaluation mode, their running averages), n the
    number of pixels per channel, and m_i and v_i (unbiased) the statistics of image i. The image is normalised by

        mean_i = m + shrink(m_i - m, k * sqrt((v + eps) / n))
        variance_i = max(0, v + shrink(v_i - v, k * (v + eps) * sqrt(2 / (n - 1))))

    where shrink moves its first argument towards 0 by its second (soft thresholding). An image of one pixel per
    channel has no statistics and is normalised by m and v. The layer is from Gong et al., NeurIPS 2022 (NOTE); the
    source model must be trained with it.

    It is deliberately not a subclass of torch's batch norm: code that replaces batch norms (test-time statistics,
    synchronised batch norm) would remove the correction.

    Args:
        channels: Number of channels of the images.
        k: Number of standard errors that count as chance; the authors' code uses 4 with residual networks.
        eps: Constant added to variances.
        momentum: Weight of a batch in the running averages.

    Example:
        >>> norm = InstanceAwareBatchNorm2d(3)
        >>> norm(torch.rand(8, 3, 4, 4)).shape
        torch.Size([8, 3, 4, 4])
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, k: float = 4.0, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        if not k >= 0.0:
            raise ValueError(f"k is a number of standard errors, at least 0; got {k}")
        self.channels, self.k, self.eps, self.momentum = channels, k, eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images (b, c, h, w); in training mode, update the running averages."""
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(f"expected images (b, {self.channels}, h, w), got shape {tuple(x.shape)}")
        values = x if x.dtype.itemsize >= 4 else x.float()
        pixels = values.shape[-2] * values.shape[-1]
        if pixels == 1:
            mean, var = (
                statistic.view(1, -1, 1, 1) for statistic in self._common(values[..., 0, 0], None, 1)
            )
        else:
            var, mean = torch.var_mean(values, (2, 3))
            mean, var = self._correct(mean, var, *self._common(mean, var, pixels), pixels)
        scale = torch.rsqrt(var + self.eps) * self.weight.view(1, -1, 1, 1)
        return ((values - mean) * scale + self.bias.view(1, -1, 1, 1)).to(x.dtype)

    def extra_repr(self) -> str:
        """Describe the layer, for ``repr``."""
        return f"{self.channels}, k={self.k}, eps={self.eps}, momentum={self.momentum}"

    def _common(self, means: Tensor, variances: Tensor | None, pixels: int) -> tuple[Tensor, Tensor]:
        """Return mean and unbiased variance (c,) of the batch in training mode, else the running averages.

        They are computed from the statistics (b, c) of the images, so the pixels are read once.
        """
        count = len(means) * pixels
        if not self.training or count == 1:  # one value has no variance
            return self.running_mean, self.running_var
        mean = means.mean(0)
        between = (means - mean).square().sum(0) * pixels
        within = 0.0 if variances is None else variances.sum(0) * (pixels - 1)
        var = (between + within) / (count - 1)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(var.to(self.running_var.dtype), self.momentum)
        return mean, var

    def _correct(
        self, own_mean: Tensor, own_var: Tensor, mean: Tensor, var: Tensor, pixels: int
    ) -> tuple[Tensor, Tensor]:
        """Move the common statistics (c,) towards those of each image (b, c); return them as (b, c, 1, 1)."""
        spread = var + self.eps
        mean = mean + _shrink(own_mean - mean, self.k * (spread / pixels).sqrt())
        var = F.relu(var + _shrink(own_var - var, self.k * spread * math.sqrt(2.0 / (pixels - 1))))
        return mean[..., None, None], var[..., None, None]


def _shrink(x: Tensor, by: Tensor) -> Tensor:
    return F.relu(x - by) - F.relu(-x - by)
