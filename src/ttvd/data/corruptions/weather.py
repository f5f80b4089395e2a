"""Weather: snow, fog and brightness (frost and spatter have files of their own)."""

from __future__ import annotations

import torch
from torch import Tensor

from ttvd.data.corruptions.constants import Row
from ttvd.data.corruptions.filters import move, round_down, to_gray, zoom
from ttvd.data.corruptions.random import Draws


def brightness(x: Tensor, row: Row, draws: Draws) -> Tensor:
    """Raise the value (of hue, saturation, value): all channels grow in proportion until the largest is white."""
    (shift,) = row
    value = x.amax(1, keepdim=True)
    new = (value + shift).clamp_(max=1)
    return torch.where(value > 0, x * (new / value), new)


def fog(x: Tensor, row: Row, draws: Draws) -> Tensor:
    """Add a plasma fractal, then scale back to the brightest value of the image."""
    amount, decay = row
    height, width = x.shape[-2:]
    peak = x.amax(dim=(1, 2, 3), keepdim=True)
    haze = _grow_plasma(draws, 1 << (max(height, width) - 1).bit_length(), decay)
    return (haze[:, None, :height, :width] * amount + x) * (peak / (peak + amount))


def _grow_plasma(draws: Draws, size: int, decay: float) -> Tensor:
    """Diamond-square height maps (b, size, size) on a torus, scaled to [0, 1]; `size` is a power of two.

    Every point is the mean of four neighbours plus a uniform number whose range shrinks by `decay` squared per octave.
    """
    noise = draws.uniform(0, size, size).mul_(2).sub_(1)
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


def snow(x: Tensor, row: Row, draws: Draws) -> Tensor:
    """Whiten the image and add flakes: enlarged, thresholded and motion-blurred noise, once upright, once rotated."""
    mean, scale, factor, threshold, radius, sigma, whitening = row
    flakes = zoom(draws.normal(0, 1, *x.shape[-2:]).mul_(scale).add_(mean), factor)
    flakes = round_down(flakes.masked_fill(flakes < threshold, 0.0))
    angle = draws.uniform(1, 1).view(-1) * 90 - 135
    flakes = move(flakes, int(radius), sigma, angle).mul_(255).round_().div_(255)
    white = torch.maximum(x, to_gray(x) * 1.5 + 0.5)
    return torch.lerp(white, x, whitening) + flakes + flakes.rot90(2, (2, 3))
