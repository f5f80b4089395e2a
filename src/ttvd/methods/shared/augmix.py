"""AugMix views of an image: three chains of light augmentations, mixed with the image itself."""

import math

import torch
from torch import Tensor

from ttvd.geometry.precision import full_precision
from ttvd.methods.shared.augmentations import check_images, resample, uniform

_CHAINS = 3
_DEPTH = 3
_OPERATIONS = 9
_SEVERITY = 10.0  # MEMO's code divides levels between 0.1 and 1 by ten


@full_precision
def augmix(x: Tensor, views: int, generator: torch.Generator) -> Tensor:
    """AugMix views (Hendrycks et al., ICLR 2020) as MEMO makes them, of each image.

    A random crop (padding of an eighth of the side) and mirror image is taken; three chains of one to three operations
    run on it; their Dirichlet(1, 1, 1) mixture and the crop itself are mixed by a uniform weight. Operations:
    autocontrast, equalize, solarize, posterize to four bits, rotation, shear and translation along either axis.

    Deviations from MEMO's code: rotations and translations are not rounded to whole degrees and pixels, and what
    they uncover repeats the border instead of showing a fixed colour; large images are cropped like small ones.

    Args:
        x: Images (b, c, h, w) in [0, 1].
        views: Number of views of each image.
        generator: Source of the draws, on the CPU.

    Returns:
        (b * views, c, h, w) in [0, 1], the views of an image next to each other.

    Example:
        >>> augmix(torch.rand(2, 3, 8, 8), 5, torch.Generator().manual_seed(0)).shape
        torch.Size([10, 3, 8, 8])
    """
    check_images(x)
    base = _crop(x.clamp(0.0, 1.0).repeat_interleave(views, 0), generator)
    count = len(base)
    weights = torch.empty(_CHAINS, count, 1, 1, 1).exponential_(generator=generator)
    weights = (weights / weights.sum(0)).to(x.device, x.dtype)
    chains = _run_chains(base.repeat(_CHAINS, 1, 1, 1), generator).unflatten(0, (_CHAINS, count))
    mixed = torch.lerp((weights * chains).sum(0), base, uniform(generator, count, 0.0, 1.0, x))
    return mixed.clamp(0.0, 1.0)


def _crop(x: Tensor, generator: torch.Generator) -> Tensor:
    """Whole-pixel crops of the zero-padded images, every second one mirrored."""
    reach = torch.tensor(x.shape[-2:]) // 8
    shift = torch.floor(torch.rand(len(x), 2, generator=generator) * (2 * reach + 1)) - reach
    mirror = (torch.rand(len(x), generator=generator) < 0.5) * -2.0 + 1.0
    matrix = torch.diag_embed(torch.stack([torch.ones(len(x)), mirror], 1))
    return resample(x, matrix.to(x), shift.to(x), "zeros")


def _run_chains(x: Tensor, generator: torch.Generator) -> Tensor:
    """One to three random operations, one after the other, on each image."""
    depth = torch.randint(1, _DEPTH + 1, (len(x),), generator=generator)
    for step in range(_DEPTH):
        choice = torch.randint(_OPERATIONS, (len(x),), generator=generator)
        level = (torch.rand(len(x), generator=generator) * 0.9 + 0.1) / _SEVERITY
        sign = (torch.rand(len(x), generator=generator) < 0.5) * -2.0 + 1.0
        choice = torch.where(step < depth, choice, -1)
        x = _operate(x, choice, level, sign)
    return x


def _operate(x: Tensor, choice: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Apply to each image the operation of its number; the numbers are on the CPU, so grouping waits for nothing."""
    out = x.clone()
    for number, operation in enumerate((autocontrast, equalize, posterize)):
        chosen = (choice == number).nonzero().flatten().to(x.device)
        out[chosen] = operation(x[chosen])
    chosen = (choice == 3).nonzero().flatten()
    part = x[chosen.to(x.device)]
    bright = part >= 1.0 - level[chosen].view(-1, 1, 1, 1).to(part)
    out[chosen.to(x.device)] = torch.where(bright, 1.0 - part, part)
    chosen = (choice >= 4).nonzero().flatten()
    matrix, shift = _geometry(choice[chosen], (level * sign)[chosen], x.shape[-2], x.shape[-1])
    part = resample(x[chosen.to(x.device)], matrix.to(x), shift.to(x), "border")
    out[chosen.to(x.device)] = part
    return out


def _geometry(choice: Tensor, level: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Matrices and shifts of rotations (4), shears (5, 6) and translations (7, 8) along columns and rows."""
    angle = math.radians(30) * level * (choice == 4)
    matrix = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)
    matrix[:, 1, 0] += 0.3 * level * (choice == 5)
    matrix[:, 0, 1] += 0.3 * level * (choice == 6)
    shift = torch.stack([level * (choice == 8) * height / 3, level * (choice == 7) * width / 3], 1)
    return matrix, shift


def autocontrast(x: Tensor) -> Tensor:
    """Stretch each channel to [0, 1]; a constant one stays.

    Example:
        >>> autocontrast(torch.tensor([[[[0.2, 0.4, 0.6]]]])).flatten().round(decimals=3).tolist()
        [0.0, 0.5, 1.0]
    """
    low, high = x.amin((-2, -1), keepdim=True), x.amax((-2, -1), keepdim=True)
    stretched = (x - low) / torch.where(high > low, high - low, torch.ones_like(low))
    return torch.where(high > low, stretched, x)


def equalize(x: Tensor) -> Tensor:
    """Flatten the histogram of each channel over 256 levels, as the Python Imaging Library does."""
    levels = (x * 255.0).round().long().flatten(2)
    counts = torch.zeros(*x.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    last = counts.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - last) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp_min(1)
    flat = table.clamp(0, 255).gather(2, levels).view_as(x).to(x.dtype) / 255.0
    return torch.where(step[..., None] > 0, flat, x)


def posterize(x: Tensor) -> Tensor:
    """Keep the four highest of eight bits."""
    return ((x * 255.0).round() / 16.0).floor() * 16.0 / 255.0
