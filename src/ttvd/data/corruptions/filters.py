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

Border = Literal["nearest", "reflect", "mirror"]
SLACK = 2.0**-12
LUMA = (0.299, 0.587, 0.114)


def to_levels(x: Tensor) -> Tensor:
    """Return the levels 0..255 (as floats) of [0, 1] images, truncated as in a conversion to unsigned bytes.

    A small fraction of a level is tolerated, so that rounding errors of float32 cannot lower an unchanged pixel.
    """
    return x.mul(255).add_(SLACK).floor_().clamp_(0, 255)


def round_down(x: Tensor) -> Tensor:
    """Truncate [0, 1] images to 256 levels."""
    return to_levels(x).div_(255)


def to_gray(x: Tensor) -> Tensor:
    """Return the luma (b, 1, h, w) of colour images; grey images are returned unchanged."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]).unsqueeze(1)


def gaussian_filter(x: Tensor, sigma: float, truncate: float = 4.0, border: Border = "nearest") -> Tensor:
    """Blur both image axes with a Gaussian; the kernel is cut at `truncate` standard deviations."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return x
    for axis in (2, 3):
        # A sum of shifted images costs by the tap, a product with a band matrix by the side of the image.
        blur_axis = _blur_by_shifts if 10 * (2 * radius + 1) < x.shape[axis] else _blur_by_matrix
        x = blur_axis(x, axis, sigma, radius, border)
    return x


def _blur_by_shifts(x: Tensor, axis: int, sigma: float, radius: int, border: Border) -> Tensor:
    padded = _pad(x, axis, radius, border)
    out = torch.zeros_like(x)
    for shift, weight in enumerate(_gaussian_weights(sigma, radius)):
        out.add_(padded.narrow(axis, shift, x.shape[axis]), alpha=float(weight))
    return out


def _blur_by_matrix(x: Tensor, axis: int, sigma: float, radius: int, border: Border) -> Tensor:
    # Products of float32 matrices may run in TF32 on CUDA, with errors of a quarter of a level: float64 cannot.
    dtype = torch.float64 if x.is_cuda else x.dtype
    matrix = torch.from_numpy(_blur_matrix(x.shape[axis], sigma, radius, border)).to(x.device, dtype)
    return (matrix @ x.to(dtype) if axis == 2 else x.to(dtype) @ matrix.T).to(x.dtype)


@lru_cache(maxsize=32)
def _blur_matrix(size: int, sigma: float, radius: int, border: Border) -> npt.NDArray[np.float64]:
    rows = np.broadcast_to(np.arange(size)[:, None], (size, 2 * radius + 1))
    columns = _fold(rows + np.arange(-radius, radius + 1), size, border)
    matrix = np.zeros((size, size))
    np.add.at(matrix, (rows, columns), _gaussian_weights(sigma, radius))
    return matrix


def _gaussian_weights(sigma: float, radius: int) -> npt.NDArray[np.float64]:
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    normalised: npt.NDArray[np.float64] = weights / weights.sum()
    return normalised


def _pad(x: Tensor, axis: int, width: int, border: Border) -> Tensor:
    size = x.shape[axis]
    outside = np.concatenate([np.arange(-width, 0), np.arange(size, size + width)])
    frame = x.index_select(axis, torch.from_numpy(_fold(outside, size, border)).to(x.device))
    before, after = frame.split(width, dim=axis)
    return torch.cat([before, x, after], dim=axis)


def _fold(place: npt.NDArray[np.int64], size: int, border: Border) -> npt.NDArray[np.int64]:
    """Map places beyond the border to the edge, or mirror them with the edge twice (reflect) or once (mirror)."""
    if border == "nearest":
        return place.clip(0, size - 1)
    turn = 2 * size - 1 if border == "reflect" else 2 * size - 2
    place = place % (turn + 1 if border == "reflect" else turn)
    return np.minimum(place, turn - place)


def correlate(x: Tensor, kernel: Tensor) -> Tensor:
    """Correlate every channel with one odd-sided square kernel; borders mirror without repeating the edge."""
    b, c, h, w = x.shape
    width = kernel.shape[0] // 2
    padded = _pad(_pad(x, 2, width, "mirror"), 3, width, "mirror")
    # One group for each plane is several times faster on CPU than a batch of planes; float64 keeps TF32 away.
    dtype = torch.float64 if x.is_cuda else x.dtype
    planes = padded.to(dtype).view(1, b * c, *padded.shape[-2:])
    stacked = kernel.to(x.device, dtype).expand(b * c, 1, *kernel.shape)
    return F.conv2d(planes, stacked, groups=b * c).view(b, c, h, w).to(x.dtype)


def motion_filter(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Apply motion blur with one angle (in degrees) for each image, as ImageMagick defines it.

    Half a Gaussian of 2 * radius + 1 taps trails along the angle; each tap falls on the nearest pixel, edges repeat.
    """
    height, width = x.shape[-2:]
    reach = 2 * radius
    tap = torch.arange(reach + 1, dtype=torch.float64, device=x.device)
    trail = torch.exp(-(tap**2) / (2 * sigma**2))
    weights = (trail / trail.sum()).tolist()
    turn = angle.double().deg2rad()
    tops, lefts = (torch.ceil(torch.outer(f(turn), tap) - 0.5).long() + reach for f in (torch.sin, torch.cos))
    padded = F.pad(x, (reach, reach, reach, reach), mode="replicate")
    out = torch.zeros_like(x)
    if x.is_cuda or height * width < 1 << 13:
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        image = torch.arange(len(x), device=x.device)
        for i, weight in enumerate(weights):
            out.add_(windows[image, :, tops[:, i], lefts[:, i]], alpha=weight)
        return out
    # Large images on CPU: shifted views of one image are several times faster than one indexed copy for the batch.
    for target, source, path in zip(out, padded, torch.stack([tops, lefts], dim=2).tolist(), strict=True):
        for (top, left), weight in zip(path, weights, strict=True):
            target.add_(source[:, top : top + height, left : left + width], alpha=weight)
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
