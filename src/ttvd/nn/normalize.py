"""Normalisation of images as a layer, so that all functions of the library take images in [0, 1]."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Channel statistics of TTAB's data loaders."""


class Normalize(nn.Module):
    """Standardise images in [0, 1], channel by channel.

    Args:
        channels: Number of channels of the images.
        mean: Mean of each channel, or a single value for all channels.
        std: Standard deviation of each channel, or a single value for all channels; positive.
        persistent: Whether mean and standard deviation are part of ``state_dict()``.

    Example:
        >>> Normalize(1, (0.5,), (0.25,))(torch.ones(1, 1, 1, 1)).item()
        2.0
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, channels: int, mean: Sequence[float], std: Sequence[float], *, persistent: bool = True
    ) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ValueError(
                    f"{name} must have 1 or {channels} values, one per channel, got {len(values)}"
                )
            row = torch.tensor(list(values), dtype=torch.float32).expand(channels).clone()
            self.register_buffer(name, row.view(1, channels, 1, 1), persistent=persistent)
        if min(std) <= 0:
            raise ValueError(f"std must be positive, got {tuple(std)}")

    def forward(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std."""
        return (x - self.mean) / self.std
