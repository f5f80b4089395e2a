"""Distortions that make images which a model was trained on about as hard as new ones.

A temperature that is fitted on training images is too sharp: the model knows them by heart. Slightly turned, shifted
and resized, they are no longer the images that it knows, and the temperature that fits them is close to that of images
which it has never seen (docs/using.md has the figures). How strong "slightly" is depends on the augmentation in
training, so the strength is found: the one at which the model loses one right answer in eight.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

KEPT_RIGHT = 7 / 8
"""Share of the right answers that is left after the distortion."""
_DEGREES = 20.0
_ZOOM = 0.25  # of the logarithm
_SHIFT = 0.1  # of the image's side
_STEPS = 6


def distort(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Turn, resize and shift each image by a random amount; reflected pixels fill the border.

    Args:
        images: Floating-point images (b, c, h, w).
        strength: From 0, nothing, to 1: up to 20 degrees, 28 per cent of the size and a tenth of the side.
        generator: Random generator on the CPU.

    Example:
        >>> images = torch.rand(2, 3, 8, 8)
        >>> same = distort(images, 0.0, torch.Generator().manual_seed(0))
        >>> torch.allclose(same, images, atol=1e-5)
        True
    """
    height, width = images.shape[-2:]
    draws = (2 * torch.rand(len(images), 4, generator=generator) - 1) * strength
    angle, zoom = draws[:, 0] * math.radians(_DEGREES), (draws[:, 1] * _ZOOM).exp()
    maps = torch.zeros(len(images), 2, 3)
    maps[:, 0, 0] = maps[:, 1, 1] = angle.cos() * zoom
    maps[:, 0, 1] = (
        -angle.sin() * zoom * height / width
    )  # the coordinates run from -1 to 1 in both directions
    maps[:, 1, 0] = angle.sin() * zoom * width / height
    maps[:, :, 2] = draws[:, 2:] * 2 * _SHIFT
    grid = F.affine_grid(maps.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False).clamp(0.0, 1.0)


def find_strength(accuracy: Callable[[float], float]) -> float:
    """Return the strength at which the accuracy falls to :data:`KEPT_RIGHT` of what it is; 1 if it does not.

    Args:
        accuracy: Accuracy of images that are distorted with a strength.

    Example:
        >>> round(find_strength(lambda strength: 1 - strength / 2), 1)
        0.2
    """
    goal = KEPT_RIGHT * accuracy(0.0)
    low, high = 0.0, 1.0
    if accuracy(high) >= goal:
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if accuracy(middle) > goal else (low, middle)
    return high


class ImageSample:
    """A random sample of a stream of batches, of at most ``limit`` images, in memory.

    Args:
        limit: Largest number of images.

    Example:
        >>> sample = ImageSample(10)
        >>> for _ in range(9):
        ...     sample.update(torch.rand(4, 1, 2, 2), torch.zeros(4).long())
        >>> 0 < len(sample.labels) <= 10
        True
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._share = limit, 1.0
        self._generator = torch.Generator().manual_seed(0)
        self.images, self.labels, self._draws = torch.zeros(0), torch.zeros(0), torch.zeros(0)

    def update(self, images: Tensor, labels: Tensor) -> None:
        """Add images (b, c, h, w) with labels (b,)."""
        draws = torch.rand(len(labels), generator=self._generator)
        self._keep(images.cpu(), labels.cpu(), draws, before=len(self._draws) > 0)
        while len(self.labels) > self._limit:
            self._share /= 2
            self._keep(self.images, self.labels, self._draws, before=False)

    def _keep(self, images: Tensor, labels: Tensor, draws: Tensor, *, before: bool) -> None:
        kept = draws < self._share
        found = images[kept], labels[kept], draws[kept]
        old = (self.images, self.labels, self._draws)
        pairs = zip(old, found, strict=True)
        self.images, self.labels, self._draws = [torch.cat(pair) for pair in pairs] if before else list(found)
