"""Networks of timm as architectures of checkpoints, with normalisation and resizing as their first layers."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.nn.normalize import Normalize

_FAILURES = (
    TypeError,
    ValueError,
    AssertionError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
)
"""What networks of timm raise when they are given strange options."""


class Resize(nn.Module):
    """Resizes images bilinearly.

    Args:
        size: Height and width of the result.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return images (b, c, size, size)."""
        return F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)


def timm_network(
    model: str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    num_classes: int,
    in_channels: int = 3,
    size: int | None = None,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """Build a network of timm with fresh weights. Nothing is downloaded.

    Args:
        model: Name of the network in timm.
        mean: Mean of the input channels, one value or one per channel.
        std: Standard deviation of the input channels, one value or one per channel.
        num_classes: Number of outputs.
        in_channels: Number of channels of the images.
        size: Height and width to which images are resized; unless given, they stay as they are.
        options: Further arguments of the network, such as ``{"img_size": 32, "patch_size": 4}``.

    Raises:
        ValueError: timm is not installed, has no such network, or does not take the options.

    Example:
        >>> net = timm_network("resnet10t", mean=(0.5,), std=(0.25,), num_classes=4, size=32)  # doctest: +SKIP
    """
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit torch raises RuntimeError
        raise ValueError(f"this network needs timm, which cannot be imported here: {error}") from error
    if not isinstance(model, str) or not timm.is_model(model):
        raise ValueError(f"timm {timm.__version__} has no network {model!r}; timm.list_models() lists all")
    given = dict(options or {})
    if forbidden := [name for name in given if name.startswith(("pretrained", "checkpoint", "cache"))]:
        raise ValueError(f"{forbidden[0]!r} would load other weights; options describe the network alone")
    try:
        network = timm.create_model(model, num_classes=num_classes, in_chans=in_channels, **given)
    except _FAILURES as error:
        raise ValueError(f"timm's {model!r} does not take these options: {error}") from error
    first = [] if size is None else [Resize(size)]
    return nn.Sequential(*first, Normalize(in_channels, mean, std), network)
