"""Checks of what a caller passes in; each error says what was expected and what came."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def check_images(images: Tensor) -> None:
    """Raise unless `images` are floats (b, c, h, w) of 8 x 8 or more with 1 or 3 channels."""
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be a floating point tensor in [0, 1], got {kind}; divide bytes by 255")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 8:
        shape = tuple(images.shape)
        raise ValueError(f"images must have shape (b, 1 or 3, h, w) with h and w of 8 or more, got {shape}")


def check_range(images: Tensor) -> None:
    """Raise unless all values of `images` lie in [0, 1]."""
    low, high = (float(bound) for bound in torch.aminmax(images))
    # A NaN fails every comparison, so it is caught here too.
    if not (low >= 0 and high <= 1):
        raise ValueError(f"images must be finite and lie in [0, 1], got values from {low:g} to {high:g}")


def check_choice(value: str, choices: Sequence[str], what: str) -> None:
    """Raise, with the nearest name, unless `value` is one of `choices`."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
    raise ValueError(f"unknown {what} {value!r}; did you mean {near[0]!r}? Known: {', '.join(choices)}")


def check_severity(severity: int) -> None:
    """Raise unless `severity` is an integer from 1 to 5."""
    if isinstance(severity, bool) or not isinstance(severity, int) or not 1 <= severity <= 5:
        raise ValueError(f"severity must be an integer from 1 to 5, got {severity!r}")


def check_index(index: Sequence[int] | Tensor | None, length: int) -> npt.NDArray[np.int64]:
    """Return the image numbers as int64, 0..length-1 when None; raise unless there are `length` of them."""
    if index is None:
        return np.arange(length, dtype=np.int64)
    numbers = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
    if numbers.shape != (length,):
        raise ValueError(
            f"index must hold one number for each of the {length} images, got shape {numbers.shape}"
        )
    if length and (not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < 0):
        raise ValueError(f"index must hold integers of 0 or more, got {numbers[:3].tolist()}...")
    return numbers.astype(np.int64)
