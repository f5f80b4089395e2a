"""Noise: gaussian, shot, impulse and speckle. Values are clipped to [0, 1] by the caller."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ttvd.data.corruptions.constants import Row
from ttvd.data.corruptions.filters import SLACK, to_levels
from ttvd.data.corruptions.random import RandomFields


def gaussian_noise(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Add independent normal noise."""
    (scale,) = row
    return random.normal(0, *x.shape[1:]).mul_(scale).add_(x)


def speckle_noise(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Add normal noise in proportion to the value."""
    (scale,) = row
    return random.normal(0, *x.shape[1:]).mul_(scale).add_(1).mul_(x)


def impulse_noise(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Set a share of the values to black or white with equal probability, each channel independently."""
    (amount,) = row
    u = random.uniform(0, *x.shape[1:])
    return x.mul(u >= amount).add_(u < amount / 2)


def shot_noise(x: Tensor, row: Row, random: RandomFields) -> Tensor:
    """Replace a value by a Poisson count whose mean is the value in photons.

    The distribution is exact: counts of the 256 levels are drawn by inverting their tabulated distributions. The part
    of a value above its level (zero for 8-bit images) gives a second, small Poisson count, because Poisson counts add.
    """
    (photons,) = row
    level = to_levels(x)
    counts = _invert_table(level.int(), random.uniform(0, *x.shape[1:]), photons)
    rest = x.mul(255).sub_(level)
    rest = rest.masked_fill_(rest < 2 * SLACK, 0.0).mul_(photons / 255)
    if rest.any():
        counts += _invert_small(rest, random.uniform(1, *x.shape[1:]))
    return counts.div_(photons)


def _invert_table(level: Tensor, u: Tensor, photons: float) -> Tensor:
    """Return the smallest count whose distribution function reaches u, by bisection in the table of the level."""
    table = _poisson_table(photons).to(u.device)
    start = level.view(-1) * table.shape[1]
    place, u = start.clone(), u.view(-1)
    step = table.shape[1] // 2
    while step:
        below = table.view(-1).index_select(0, place + (step - 1)) < u
        place.add_(below, alpha=step)
        step //= 2
    return (place - start).float().view(level.shape)


@lru_cache(maxsize=16)
def _poisson_table(photons: float) -> Tensor:
    """Return the distribution functions of the 256 levels, one row each; the number of columns is a power of two."""
    columns = 1 << int(photons + 6 * photons**0.5 + 12).bit_length()
    mean = np.arange(256)[:, None] * (photons / 255)
    count = np.arange(columns)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(count[1:]))])
    with np.errstate(divide="ignore", invalid="ignore"):
        log_mass = np.where(count == 0, 0.0, count * np.log(mean)) - mean - log_factorial
    return torch.from_numpy(np.exp(log_mass).cumsum(axis=1).astype(np.float32))


def _invert_small(mean: Tensor, u: Tensor) -> Tensor:
    """Return Poisson counts for means up to 2 by summing probabilities: 16 terms leave less than 1e-10."""
    term = torch.exp(-mean)
    total, count = term.clone(), torch.zeros_like(mean)
    for k in range(1, 17):
        count += u > total
        total += term.mul_(mean).div_(k)
    return count
