"""Digital corruptions: contrast, elastic transform, pixelate, JPEG compression and saturate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from io import BytesIO
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ttvd.data.corruptions.constants import Row
from ttvd.data.corruptions.filters import gaussian_filter, to_levels
from ttvd.data.corruptions.random import RandomFields

Bytes = npt.NDArray[np.uint8]

# For small images most of the time is spent in Python: several threads would be slower than one.
_SMALL = 1 << 14
_ONE_AT_A_TIME = Lock()


def contrast(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Pull every channel towards its mean."""
    (factor,) = row
    # float64, because the order of a float32 sum depends on the size of the batch.
    mean = x.mean(dim=(2, 3), keepdim=True, dtype=torch.float64).float()
    return torch.lerp(mean, x, factor)


def saturate(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Scale and shift the saturation (of hue, saturation, value); grey images have none and stay unchanged.

    Grey pixels of colour images have hue 0: a shift of their saturation tints them red, as in the released sets.
    """
    factor, shift = row
    if x.shape[1] == 1:
        return x.clone()
    value, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    chroma = value - low
    saturation = torch.where(value > 0, chroma / value, 0.0)
    new = (saturation * factor + shift).clamp_(0, 1)
    depth = torch.where(chroma > 0, (value - x) / chroma, _tint(x))
    return value - depth * new * value


def _tint(x: Tensor) -> Tensor:
    """Return how far below the value each channel lies for hue 0 and full saturation."""
    return x.new_tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1)


def pixelate(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Shrink by box averages, enlarge by repetition; equal to Pillow's BOX and NEAREST filters on bytes."""
    (factor,) = row
    height, width = x.shape[-2:]
    rows, columns = _boxes(height, int(height * factor)), _boxes(width, int(width * factor))
    levels = to_levels(x)
    small = _average(_average(levels, columns.to(x.device)).mT, rows.to(x.device)).mT
    down, along = (
        torch.from_numpy(((np.arange(size) + 0.5) * (len(boxes) / size)).astype(np.int64)).to(x.device)
        for size, boxes in ((height, rows), (width, columns))
    )
    return small.index_select(2, down).index_select(3, along).div_(255)


def _average(levels: Tensor, boxes: Tensor) -> Tensor:
    # Sums of levels are exact in float32; ties are rounded up, as Pillow's fixed-point arithmetic does.
    return (levels @ boxes.T).div_(boxes.sum(1)).add_(0.5 + 1e-4).floor_()


@lru_cache(maxsize=32)
def _boxes(size: int, small: int) -> Tensor:
    """Return which of `size` pixels belong to each of `small` boxes, (small, size) of 0 and 1."""
    scale = size / small
    centre = (np.arange(small) + 0.5)[:, None] * scale
    distance = (np.arange(size) - centre + 0.5) / scale
    return torch.from_numpy(((distance > -0.5) & (distance <= 0.5)).astype(np.float32))


def elastic_transform(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Warp by a random affine map, then by a smooth random displacement of every pixel."""
    height, width = x.shape[-2:]
    side = min(height, width)
    amplitude, sigma, affine = (side * value for value in row)
    y, x_axis = (torch.arange(size, device=x.device, dtype=torch.float32) for size in (height, width))
    grid = torch.stack(torch.broadcast_tensors(x_axis, y.unsqueeze(1)), dim=2)
    warped = _sample(x, _map_affine(grid, affine, random), repeat_edge=False)
    if amplitude == 0:
        return warped
    field = random.uniform(1, 2, height, width).mul_(2).sub_(1)
    field = gaussian_filter(field, sigma, truncate=3.0, border="reflect").mul_(amplitude)
    return _sample(warped, grid + field.permute(0, 2, 3, 1), repeat_edge=True)


def _map_affine(grid: Tensor, reach: float, random: RandomFields) -> Tensor:
    """Return source positions (b, h, w, 2) of an affine map that moves three points by up to `reach` pixels."""
    height, width, _ = grid.shape
    square = min(height, width) // 3
    signs = torch.tensor([[1, 1], [1, -1], [-1, -1]], dtype=torch.float64, device=grid.device)
    points = torch.tensor([width // 2, height // 2], device=grid.device) + square * signs
    moved = points + (random.uniform(0, 3, 2).double() * 2 - 1) * reach
    one = torch.ones(len(random), 3, 1, dtype=torch.float64, device=grid.device)
    inverse: Tensor = torch.linalg.solve(torch.cat([moved, one], dim=2), points.expand(len(random), 3, 2))
    column, line, shift = inverse.float().view(-1, 3, 1, 1, 2).unbind(1)
    return grid[..., :1] * column + grid[..., 1:] * line + shift


def _sample(x: Tensor, position: Tensor, repeat_edge: bool) -> Tensor:
    """Return bilinear values at pixel positions (b, h, w, 2); borders mirror, with or without a repeated edge."""
    size = position.new_tensor([x.shape[3], x.shape[2]])
    scaled = (2 * position + 1) / size - 1 if repeat_edge else 2 * position / (size - 1) - 1
    return F.grid_sample(x, scaled, padding_mode="reflection", align_corners=not repeat_edge)


def jpeg_compression(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Write and read each image as JPEG with Pillow, on the CPU."""
    (quality,) = row
    images = to_levels(x).byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()
    recode = partial(_recode, quality=int(quality))
    if images[0].size < _SMALL:
        with _ONE_AT_A_TIME:
            images = recode(images)
    elif x.is_cuda:
        with ThreadPoolExecutor(4) as pool:
            images = np.concatenate(list(pool.map(recode, np.array_split(images, 16))))
    else:
        # The caller already spreads parts of the batch over threads.
        images = recode(images)
    return torch.from_numpy(images).to(x.device).permute(0, 3, 1, 2).float().div_(255)


def _recode(images: Bytes, quality: int) -> Bytes:
    from PIL import Image

    decoded = np.empty_like(images)
    for image, out in zip(images, decoded, strict=True):
        buffer = BytesIO()
        Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).save(
            buffer, "JPEG", quality=quality
        )
        with Image.open(buffer, formats=("JPEG",)) as picture:
            out[:] = np.asarray(picture).reshape(out.shape)
    return decoded
