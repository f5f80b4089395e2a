"""Images as the library wants them: uint8, or floating point in [0, 1]."""

import torch
from torch import Tensor

# Interpolation leaves rounding errors of this size; standardised images are off by whole units.
_SLACK = 1e-4


def check_images(images: Tensor) -> None:
    """Raise a ValueError unless these are images (b, c, h, w), uint8 or finite floats in [0, 1]."""
    if images.ndim != 4 or images.numel() == 0:
        raise ValueError(f"expected images of shape (b, c, h, w), got {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise ValueError(f"images must be uint8 or floating point, got {images.dtype}")
    low, high = (value.item() for value in images.detach().aminmax())
    if not (low >= -_SLACK and high <= 1 + _SLACK):
        raise ValueError(
            f"images must be finite and in [0, 1], got values from {low:g} to {high:g}; "
            "normalisation belongs into the model, as its first layer"
        )


def to_unit(images: Tensor) -> Tensor:
    """Floating point images in [0, 1]: uint8 is divided by 255, floats stay as they are.

    Example:
        >>> to_unit(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist()
        [0.0, 0.20000000298023224, 1.0]
    """
    return images.float() / 255 if images.dtype == torch.uint8 else images


def check_labels(labels: Tensor, num_classes: int | None = None) -> None:
    """Raise a ValueError unless labels are integers (n,) in 0 .. num_classes - 1."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers of shape (b,), got {labels.dtype} {tuple(labels.shape)}")
    if labels.numel() == 0:
        raise ValueError("there are no labels")
    low, high = (int(value.item()) for value in labels.aminmax())
    if low < 0 or (num_classes is not None and high >= num_classes):
        limit = "" if num_classes is None else f" to {num_classes - 1}"
        raise ValueError(f"labels must run from 0{limit}, got values from {low} to {high}")
