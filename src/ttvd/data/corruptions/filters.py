"""Linear filters shared by the corruptions; all work on float tensors (b, c, h, w)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Border = Literal["nearest", "reflect"]
SLACK = 2.0**-12
LUMA = (0.299, 0.587, 0.114)


def round_down(x: Tensor) -> Tensor:
    """Truncate [0, 1] images to 256 levels, as writing floats into unsigned bytes does.

    A fraction (1/4096) of a level is forgiven, so that rounding errors of float32 cannot lower an untouched pixel.
    """
    return x.mul(255).add_(SLACK).floor_().clamp_(0, 255).div_(255)


def to_gray(x: Tensor) -> Tensor:
    """Luma (b, 1, h, w) of colour images; grey images are returned as they are."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]).unsqueeze(1)


def blur(x: Tensor, sigma: float, truncate: float = 4.0, border: Border = "nearest") -> Tensor:
    """Gaussian blur of both image axes; the kernel is cut at `truncate` standard deviations.

    Each axis is one product with a band matrix, so the width of the kernel costs nothing and the border is exact.
    """
    if int(truncate * sigma + 0.5) == 0:
        return x
    # Products of float32 matrices may run in TF32 on CUDA, with errors of a quarter of a level: float64 cannot.
    dtype = torch.float64 if x.is_cuda else x.dtype
    down, along = (
        torch.from_numpy(_blur_matrix(size, sigma, truncate, border)).to(x.device, dtype)
        for size in x.shape[-2:]
    )
    return (down @ (x.to(dtype) @ along.T)).to(x.dtype)


@lru_cache(maxsize=32)
def _blur_matrix(size: int, sigma: float, truncate: float, border: Border) -> npt.NDArray[np.float64]:
    radius = int(truncate * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    rows = np.arange(size)[:, None]
    columns = rows + offsets
    if border == "nearest":
        columns = columns.clip(0, size - 1)
    else:
        columns = columns % (2 * size)
        columns = np.minimum(columns, 2 * size - 1 - columns)
    matrix = np.zeros((size, size))
    np.add.at(matrix, (np.broadcast_to(rows, columns.shape), columns), weights / weights.sum())
    return matrix


def correlate(x: Tensor, kernel: Tensor) -> Tensor:
    """Correlate every channel with one odd-sided kernel; borders mirror without repeating the edge."""
    b, c, h, w = x.shape
    pad_y, pad_x = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = F.pad(x, (pad_x, pad_x, pad_y, pad_y), mode="reflect")
    # One group for each plane is several times faster on CPU than a batch of planes; float64 keeps TF32 away.
    dtype = torch.float64 if x.is_cuda else x.dtype
    planes = padded.to(dtype).view(1, b * c, *padded.shape[-2:])
    stacked = kernel.to(x.device, dtype).expand(b * c, 1, *kernel.shape)
    return F.conv2d(planes, stacked, groups=b * c).view(b, c, h, w).to(x.dtype)


def move(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Motion blur with one angle (in degrees) for each image, as ImageMagick defines it.

    Half a Gaussian of 2 * radius + 1 taps trails along the angle; each tap falls on the nearest pixel, edges repeat.
    """
    height, width = x.shape[-2:]
    reach = 2 * radius
    padded = F.pad(x, (reach, reach, reach, reach), mode="replicate")
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(reach + 1)]
    steps_y, steps_x = (f(angle.double().deg2rad()) for f in (torch.sin, torch.cos))
    image = torch.arange(len(x), device=x.device)
    out = torch.zeros_like(x)
    for i, weight in enumerate(weights):
        dy, dx = (torch.ceil(i * step - 0.5).long() + reach for step in (steps_y, steps_x))
        out.add_(windows[image, :, dy, dx], alpha=weight / sum(weights))
    return out


def zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the centre by `factor` with linear interpolation; the size stays the same."""
    height, width = x.shape[-2:]
    rows, columns = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - rows) // 2, (width - columns) // 2
    centre = x[..., top : top + rows, left : left + columns]
    size = (round(rows * factor), round(columns * factor))
    large = F.interpolate(centre, size=size, mode="bilinear", align_corners=True)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return large[..., top : top + height, left : left + width]
