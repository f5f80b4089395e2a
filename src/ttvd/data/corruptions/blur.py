"""Blurs: defocus, glass, motion, zoom and gaussian."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ttvd.data.corruptions.constants import Row
from ttvd.data.corruptions.filters import correlate, gaussian_filter, motion_filter, round_down, zoom
from ttvd.data.corruptions.random import RandomFields


def gaussian_blur(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Blur with a Gaussian; edges repeat."""
    (sigma,) = row
    return gaussian_filter(x, sigma)


def defocus_blur(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Blur with a disk whose rim is softened."""
    radius, alias_sigma = row
    return correlate(x, _disk(radius, alias_sigma))


def motion_blur(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Blur along one direction within 45 degrees of the horizontal."""
    radius, sigma = row
    angle = random.uniform(0, 1).view(-1) * 90 - 45
    return motion_filter(x, int(radius), sigma, angle)


def zoom_blur(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Average the image with enlargements of its centre."""
    stop, step = row
    # arange may include the end point by a rounding error; the released sets have it, so it stays.
    factors = np.arange(1, stop, step)
    # Interpolation is twice as fast with the channels innermost.
    x = x.contiguous(memory_format=torch.channels_last)
    out = x * 2
    for factor in factors[1:]:
        out += zoom(x, float(factor))
    return out.div_(len(factors) + 1).contiguous()


def glass_blur(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Blur, copy pixels from random neighbours, blur again.

    The generator of the released sets means to swap two pixels but swaps aliased views, which copies one over the
    other. To agree with the sets, this function copies too, also for grey images.
    """
    sigma, delta, iterations = row
    b, c, height, width = x.shape
    pixels = round_down(gaussian_filter(x, sigma)).view(b, c, height * width)
    for iteration in range(int(iterations)):
        source = _trace_copies(random, iteration, height, width, int(delta))
        pixels = pixels.gather(2, source.unsqueeze(1).expand(-1, c, -1))
    return gaussian_filter(pixels.view(b, c, height, width), sigma)


def _trace_copies(random: RandomFields, iteration: int, height: int, width: int, delta: int) -> Tensor:
    """Return the source of each pixel's value, (b, height * width), after one sweep of copies.

    The sweep visits the inner pixels from the last to the first and overwrites each with a neighbour. A neighbour later
    in the raster has been overwritten before, so its own source counts. These links only lead forwards: doubling them
    finds the end of every chain in a few parallel steps instead of a loop over pixels.
    """
    place = torch.arange(height * width, device=random.device)
    y, x = place // width, place % width
    inner = (y > delta) & (y <= height - delta) & (x > delta) & (x <= width - delta)
    dx, dy = (random.integers(2 * iteration + axis, -delta, delta, height * width) for axis in (0, 1))
    neighbour = torch.where(inner, place + dy * width + dx, place)
    chain = torch.maximum(neighbour, place)
    while not torch.equal(doubled := chain.gather(1, chain), chain):
        chain = doubled
    return neighbour.gather(1, chain)


def _disk(radius: float, alias_sigma: float) -> Tensor:
    """Return a normalised disk of at least 17 x 17, softened by a 3 x 3 or 5 x 5 Gaussian, without its empty margin."""
    side, reach = (8, 1) if radius <= 8 else (int(radius), 2)
    axis = np.arange(-side, side + 1)
    disk = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(np.float64)
    disk /= disk.sum()
    soft = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * alias_sigma**2))
    soft /= soft.sum()
    for _ in range(2):
        padded = np.pad(disk, ((reach, reach), (0, 0)), mode="reflect")
        disk = sum(weight * padded[i : i + 2 * side + 1] for i, weight in enumerate(soft)).T
    margin = side - min(side, math.floor(radius) + reach)
    return torch.from_numpy(
        np.ascontiguousarray(disk[margin : 2 * side + 1 - margin, margin : 2 * side + 1 - margin])
    )
