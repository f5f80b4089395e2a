"""Weather: snow, fog, brightness and spatter (`frost.py` has the frost)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ttvd.data.corruptions.constants import Row
from ttvd.data.corruptions.filters import (
    SLACK,
    correlate,
    gaussian_filter,
    motion_filter,
    round_down,
    to_gray,
    to_levels,
    zoom,
)
from ttvd.data.corruptions.random import RandomFields

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)
_RELIEF = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))
_FARTHEST = 20


def brightness(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Raise the value (of hue, saturation, value): all channels grow in proportion until the largest is white."""
    (shift,) = row
    value = x.amax(1, keepdim=True)
    new = (value + shift).clamp_(max=1)
    return torch.where(value > 0, x * (new / value), new)


def fog(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Add a plasma fractal, then scale back to the brightest value of the image."""
    amount, decay = row
    height, width = x.shape[-2:]
    peak = x.amax(dim=(1, 2, 3), keepdim=True)
    haze = _grow_plasma(random, 1 << (max(height, width) - 1).bit_length(), decay)
    return (haze[:, None, :height, :width] * amount + x) * (peak / (peak + amount))


def _grow_plasma(random: RandomFields, size: int, decay: float) -> Tensor:
    """Return diamond-square height maps (b, size, size) on a torus, scaled to [0, 1]; `size` is a power of two.

    Every point is the mean of four neighbours plus a uniform number whose range shrinks by `decay` squared per octave.
    """
    noise = random.uniform(0, size, size).mul_(2).sub_(1)
    plane = torch.zeros_like(noise)
    step, wibble = size, 100.0
    while step >= 2:
        half = step // 2
        corner = plane[:, ::step, ::step]
        pair = corner + corner.roll(-1, 1)
        centre = (pair + pair.roll(-1, 2)) / 4 + wibble**2 * noise[:, half::step, half::step]
        plane[:, half::step, half::step] = centre
        for axis, target in (
            (1, (slice(0, None, step), slice(half, None, step))),
            (2, (slice(half, None, step), slice(0, None, step))),
        ):
            mean = (centre + centre.roll(1, axis) + corner + corner.roll(-1, 3 - axis)) / 4
            plane[:, *target] = mean + wibble**2 * noise[:, *target]
        step, wibble = half, wibble / decay
    low, high = torch.aminmax(plane.view(len(plane), -1), dim=1)
    return (plane - low[:, None, None]) / (high - low)[:, None, None]


def snow(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Whiten the image and add flakes: enlarged, thresholded and motion-blurred noise, once upright, once rotated."""
    mean, scale, factor, threshold, radius, sigma, whitening = row
    flakes = zoom(random.normal(0, 1, *x.shape[-2:]).mul_(scale).add_(mean), factor)
    flakes = round_down(flakes.masked_fill(flakes < threshold, 0.0))
    angle = random.uniform(1, 1).view(-1) * 90 - 135
    flakes = motion_filter(flakes, int(radius), sigma, angle).mul_(255).round_().div_(255)
    white = torch.maximum(x, to_gray(x) * 1.5 + 0.5)
    return torch.lerp(white, x, whitening) + flakes + flakes.rot90(2, (2, 3))


def spatter(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Splash water (severities 1 to 3) or mud (4 and 5) on the image; grey images get the luma of the colour."""
    mean, scale, sigma, threshold, strength, mud = row
    liquid = gaussian_filter(random.normal(0, 1, *x.shape[-2:]).mul_(scale).add_(mean), sigma)
    liquid = liquid.masked_fill(liquid < threshold, 0.0)
    if mud:
        cover = gaussian_filter((liquid > threshold).float(), strength)
        cover = cover.masked_fill(cover < 0.8, 0.0)
        return x * (1 - cover) + cover * _colour(_MUD, x)
    return x + (_light_drops(liquid) * strength).clamp(max=1) * _colour(_WATER, x)


def _colour(rgb: tuple[float, float, float], x: Tensor) -> Tensor:
    colour = x.new_tensor(rgb).view(1, 3, 1, 1)
    return to_gray(colour) if x.shape[1] == 1 else colour


def _light_drops(liquid: Tensor) -> Tensor:
    """Return the brightness of each pixel of a drop, in [0, 1]: a relief of the distance to the rims of the drops."""
    levels = to_levels(liquid)
    distance = _average(_measure_distance(_find_edges(levels))).add_(SLACK).floor_()
    relief = correlate(_equalize(distance), torch.tensor(_RELIEF)).clamp_(0, 255)
    light = levels * _average(relief).round()
    peak = light.amax(dim=(1, 2, 3), keepdim=True)
    return torch.where(peak > 0, light / peak, 0.0)


def _average(x: Tensor) -> Tensor:
    return correlate(x, torch.full((3, 3), 1 / 9))


def _find_edges(levels: Tensor, low: float = 50, high: float = 150) -> Tensor:
    """Return Canny edges: thin ridges of the Sobel gradient above `low` that are connected to one above `high`."""
    padded = F.pad(levels, (1, 1, 1, 1), mode="replicate")
    sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
    dx, dy = (correlate(padded, kernel)[..., 1:-1, 1:-1].round() for kernel in (sobel, sobel.T))
    size = dx.abs() + dy.abs()
    around = F.pad(size, (1, 1, 1, 1))
    height, width = levels.shape[-2:]

    def shifted(y: int, x: int) -> Tensor:
        return around[..., 1 + y : 1 + y + height, 1 + x : 1 + x + width]

    def is_ridge(y: int, x: int) -> Tensor:
        return (size > shifted(-y, -x)) & (size >= shifted(y, x))

    steep, flat = (
        dy.abs() > math.tan(math.radians(67.5)) * dx.abs(),
        dy.abs() < math.tan(math.pi / 8) * dx.abs(),
    )
    diagonal = torch.where(dx * dy < 0, is_ridge(1, -1), is_ridge(1, 1))
    ridge = torch.where(flat, is_ridge(0, 1), torch.where(steep, is_ridge(1, 0), diagonal))
    return _connect(ridge & (size > high), ridge & (size > low))


def _connect(strong: Tensor, weak: Tensor) -> Tensor:
    """Grow `strong` through its eight neighbours within `weak` until nothing changes."""
    while True:
        grown = (F.max_pool2d(strong.float(), 3, stride=1, padding=1) > 0) & weak
        if torch.equal(grown, strong):
            return strong
        strong = grown


def _measure_distance(edges: Tensor) -> Tensor:
    """Return the Euclidean distance to the nearest edge, at most 20; first along columns, then along rows."""
    far = float(_FARTHEST**2)
    square = torch.where(edges, 0.0, far)
    for axis in (2, 3):
        pad = (0, 0, _FARTHEST, _FARTHEST) if axis == 2 else (_FARTHEST, _FARTHEST)
        padded = F.pad(square, pad, value=far)
        length = square.shape[axis]
        shifts = range(2 * _FARTHEST + 1)
        for shift in shifts:
            square = torch.minimum(square, padded.narrow(axis, shift, length) + (shift - _FARTHEST) ** 2)
    return square.sqrt()


def _equalize(levels: Tensor) -> Tensor:
    """Equalise the histogram of each image over 0..255."""
    flat = levels.view(len(levels), -1).long()
    counts = torch.zeros(len(flat), 256, device=levels.device).scatter_add_(
        1, flat, torch.ones_like(flat).float()
    )
    total = counts.cumsum(1)
    first = counts.gather(1, flat.amin(1, keepdim=True))
    rest = flat.shape[1] - first
    table = torch.where(rest > 0, (total - first) * (255 / rest), flat.amin(1, keepdim=True).float())
    return table.round_().gather(1, flat).view(levels.shape)
