"""Descriptors of images: a few numbers that corruptions and cameras change, and that a network does not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast

_FLOOR = 1e-4
"""Energy that counts as none, for images in [0, 1]."""
_GRID = 8
"""Width of the blocks of JPEG."""
LEAST_RADIUS = 0.2
"""Smallest radius, in standard deviations of images."""
_CLASSES = 2.0
"""Standard deviations of the classes that make a radius."""


@dataclass(frozen=True, eq=False)
class InputMoments:
    """Moments of the descriptors of source images.

    Attributes:
        means: Means (f,), float64.
        deviations: Standard deviations over images (f,), float64, positive.
        radii: How far the mean of a single class may lie from the mean of all, (f,), float64, positive.
        classes: Means of each class (k, f), float64, drawn to the mean of all as far as chance may explain the
            difference. None where they are not known.
    """

    means: Tensor
    deviations: Tensor
    radii: Tensor
    classes: Tensor | None = None

    def __post_init__(self) -> None:
        for name, values in (("means", self.means), ("deviations", self.deviations), ("radii", self.radii)):
            if values.ndim != 1 or values.shape != self.means.shape or values.dtype != torch.float64:
                raise ValueError(
                    f"{name} of inputs must be float64 (f,), got {values.dtype} {tuple(values.shape)}"
                )
            if not bool(values.isfinite().all()) or (name != "means" and not bool((values > 0).all())):
                raise ValueError(f"{name} of inputs must be finite, and positive unless they are means")
        known = self.classes
        if known is None:
            return
        if known.ndim != 2 or known.shape[1:] != self.means.shape or known.dtype != torch.float64:
            raise ValueError(
                f"classes of inputs must be float64 (k, {len(self.means)}), got {known.dtype} {tuple(known.shape)}"
            )
        if not bool(known.isfinite().all()):
            raise ValueError("classes of inputs must be finite")


def describe(x: Tensor) -> Tensor:
    """Return the descriptors (b, f) of a batch, float32.

    Images (b, c, h, w) have the mean of each channel, the contrast, the energy of colours where there are several
    channels, and, above 8 x 8 pixels, ratios of the energies of differences: over 1, 2 and 4 pixels, of second
    differences, and across the borders of 8 x 8 blocks. Other inputs have their mean and variance. Energies are
    logarithms of mean squares.

    Example:
        >>> describe(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """
    x = upcast(x)
    if x.ndim != 4:
        flat = x.flatten(1)
        return torch.stack([flat.mean(1), _log(flat.var(1, correction=0))], 1).float()
    level = x.mean((2, 3))
    contrast = _log((x - level[..., None, None]).square().mean((1, 2, 3)))
    parts = [*level.unbind(1), contrast]
    if x.shape[1] > 1:
        parts.append(_log((x - x.mean(1, keepdim=True)).square().mean((1, 2, 3))))
    if min(x.shape[2:]) > _GRID:
        one, two, four = (_energy(_difference(x, lag, 2), _difference(x, lag, 3)) for lag in (1, 2, 4))
        bend = _energy(_difference(_difference(x, 1, 2), 1, 2), _difference(_difference(x, 1, 3), 1, 3))
        grid = _energy(
            _difference(x, 1, 2)[:, :, _GRID - 1 :: _GRID], _difference(x, 1, 3)[..., _GRID - 1 :: _GRID]
        )
        parts += [one - contrast, two - one, four - two, bend - one, grid - one]
    return torch.stack(parts, 1).float()


def _difference(x: Tensor, lag: int, axis: int) -> Tensor:
    size = x.shape[axis] - lag
    return x.narrow(axis, lag, size) - x.narrow(axis, 0, size)


def _energy(down: Tensor, right: Tensor) -> Tensor:
    return _log((down.square().mean((1, 2, 3)) + right.square().mean((1, 2, 3))) / 2)


def _log(energy: Tensor) -> Tensor:
    return (energy + _FLOOR).log()


def measure_inputs(descriptors: Tensor, labels: Tensor, num_classes: int | None = None) -> InputMoments:
    """Moments of descriptors (n, f) of labelled source images.

    The radius is twice the standard deviation of the means of the classes, by the analysis of variance: what chance
    adds to the means of few images is subtracted.

    Args:
        descriptors: Descriptors (n, f).
        labels: Labels (n,).
        num_classes: Number of classes k of the model; None for the largest label and 1. A class without images gets
            the mean of all.
    """
    values = descriptors.double()
    mean, std = values.mean(0), values.std(0).clamp_min(1e-6)
    classes, rows = labels.unique(return_inverse=True)
    k, n = len(classes), len(values)
    counts = torch.zeros(k, dtype=torch.float64, device=values.device).index_add_(
        0, rows, torch.ones_like(values[:, 0])
    )
    sums = torch.zeros(k, values.shape[1], dtype=torch.float64, device=values.device).index_add_(
        0, rows, values
    )
    means = sums / counts[:, None]
    own = None
    if n > k > 1:
        within = (values - means[rows]).square().sum(0) / (n - k)
        between = (counts[:, None] * (means - mean).square()).sum(0) / (k - 1)
        size = (n - counts.square().sum() / n) / (k - 1)
        variance = ((between - within) / size).clamp_min(0.0)
        spread = _CLASSES * variance.sqrt()
        chance = _CLASSES * (within / counts[:, None]).sqrt()
        radius = torch.maximum(spread, ((means - mean).abs() - chance).amax(0))
        known = variance / (variance + within / counts[:, None]).clamp_min(1e-12)
        own = mean.repeat(int(labels.max()) + 1 if num_classes is None else num_classes, 1)
        own[classes] = mean + known * (means - mean)
    else:
        radius = torch.zeros_like(std)
    own = None if own is None else own.cpu()
    return InputMoments(mean.cpu(), std.cpu(), torch.maximum(radius, LEAST_RADIUS * std).cpu(), own)
