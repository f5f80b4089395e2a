"""Where several diagrams agree: the filter that keeps reliable samples."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def agreement(*labels: Tensor) -> Tensor:
    """Returns where all label vectors name the same class.

    Args:
        *labels: one (b,) vector per diagram, on one device; a single one agrees with itself everywhere.

    Returns:
        (b,) bool mask.

    Example:
        >>> agreement(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2]))
        tensor([ True, False, False])
    """
    if not labels:
        raise ValueError("agreement needs at least one vector of labels, got none")
    first = labels[0]
    for other in labels:
        if other.ndim != 1 or other.shape != first.shape or other.device != first.device:
            described = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in labels)
            raise ValueError(f"labels must be vectors (b,) of one length on one device, got {described}")
    same = [other == first for other in labels[1:]] or [torch.ones_like(first, dtype=torch.bool)]
    return reduce(torch.logical_and, same)


def kept_fraction(mask: Tensor) -> Tensor:
    """Returns the share of samples that a mask keeps, as a float32 scalar tensor (0 for an empty batch).

    Example:
        >>> kept_fraction(torch.tensor([True, False, True, True]))
        tensor(0.7500)
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}")
    return mask.sum(dtype=torch.float32) / max(mask.numel(), 1)
