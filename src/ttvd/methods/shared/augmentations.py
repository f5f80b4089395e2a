"""Random augmentations of [0, 1] images, every image of a batch with draws of its own.

All numbers come from the generator that is passed in. It lives on the CPU, so that strengths and angles are the same on
every device; noise, of which there is as much as of images, is drawn where the images are.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ttvd.geometry.precision import full_precision

_BLUR = 2  # radius: the kernel has five taps
_GRAY = (0.2989, 0.5870, 0.1140)  # luma of ITU-R BT.601, as torchvision has it


@full_precision
def augment(
    x: Tensor,
    generator: torch.Generator,
    *,
    padding: Literal["border", "reflection"] = "border",
    degrade: bool = True,
) -> Tensor:
    """The strong augmentation of CoTTA (Wang et al., CVPR 2022), also used by RoTTA and ROID.

    Jitter of brightness (0.6 to 1.4), contrast (0.7 to 1.3), saturation (0.5 to 1.5), hue (-0.06 to 0.06) and gamma
    (0.7 to 1.3), in an order drawn anew for each batch; then rotation by up to 15 degrees, translation by up to an
    eighth of the image (1/16 of the padded one, which is twice as large), scaling by 0.9 to 1.1 and a mirror image
    for every second one; then blur (five taps, sigma 0.001 to 0.5) and noise (0.005). Saturation and hue need three
    channels.

    Unlike the authors' code, which draws once for a whole batch, each image has its own draws.

    Args:
        x: Images (b, c, h, w) in [0, 1].
        generator: Source of the draws, on the CPU.
        padding: What lies beyond the border: the ``"border"`` pixel, or the ``"reflection"`` of the image (ROID).
        degrade: Whether to blur and to add noise (ROID does not).

    Example:
        >>> x = torch.rand(4, 3, 8, 8)
        >>> augment(x, torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 8, 8])
    """
    check_images(x)
    x = jitter(x.clamp(0.0, 1.0), generator)
    margin = _BLUR if degrade else 0
    x = _move(x, generator, padding, margin)
    if degrade:
        x = blur(x, uniform(generator, len(x), 0.001, 0.5, x))
        x = x + 0.005 * draw_noise(x, generator)
    return x.clamp(0.0, 1.0)


def check_images(x: Tensor) -> None:
    """Refuse what cannot be augmented."""
    if x.ndim != 4:
        raise ValueError(f"augmentations need images (b, c, h, w), got a tensor of shape {tuple(x.shape)}")


def uniform(generator: torch.Generator, count: int, low: float, high: float, like: Tensor) -> Tensor:
    """One number for each image, of shape (b, 1, 1, 1)."""
    draws = torch.rand(count, 1, 1, 1, generator=generator) * (high - low) + low
    return draws.to(like.device, like.dtype, non_blocking=True)


def generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """A generator on a device, seeded by this one; on the CPU this one itself."""
    if device.type == "cpu":
        return generator
    seed = int(torch.randint(2**62, (), generator=generator))
    return torch.Generator(device).manual_seed(seed)


def draw_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, one for each pixel."""
    return torch.randn(x.shape, generator=generator_on(x.device, generator), device=x.device).to(x.dtype)


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Change brightness, contrast, gamma and, of three channels, saturation and hue; in random order."""
    for step in torch.randperm(5, generator=generator).tolist():
        if step == 0:
            x = x * uniform(generator, len(x), 0.6, 1.4, x)
        elif step == 1:
            grey = to_gray(x).mean((-3, -2, -1), keepdim=True)
            x = torch.lerp(grey, x, uniform(generator, len(x), 0.7, 1.3, x))
        elif step == 2:
            x = x ** uniform(generator, len(x), 0.7, 1.3, x)
        elif x.shape[1] == 3 and step == 3:
            x = torch.lerp(to_gray(x).expand_as(x), x, uniform(generator, len(x), 0.5, 1.5, x))
        elif x.shape[1] == 3:
            x = shift_hue(x, uniform(generator, len(x), -0.06, 0.06, x))
        x = x.clamp(0.0, 1.0)
    return x


def to_gray(x: Tensor) -> Tensor:
    """Luma (b, 1, h, w) of three channels; the mean of any other number."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.unbind(1)
    return (_GRAY[0] * red + _GRAY[1] * green + _GRAY[2] * blue)[:, None]


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of images (b, 3, h, w) by ``shift`` (b, 1, 1, 1), a share of the colour circle.

    Example:
        >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
        >>> shift_hue(red, torch.full((1, 1, 1, 1), 1 / 3)).flatten().round(decimals=3).tolist()  # green
        [0.0, 1.0, 0.0]
    """
    red, green, blue = x.split(1, 1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    safe = torch.where(chroma == 0, torch.ones_like(chroma), chroma)
    hue = torch.where(value == green, (blue - red) / safe + 2.0, (red - green) / safe + 4.0)
    hue = torch.where(value == red, (green - blue) / safe, hue) + 6.0 * shift
    sector = (torch.arange(5, 0, -2, device=x.device).view(1, 3, 1, 1) + hue) % 6.0
    return value - chroma * torch.minimum(sector, 4.0 - sector).clamp(0.0, 1.0)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of five taps with a sigma (b, 1, 1, 1) for each image; two pixels are lost on each side."""
    height, width = x.shape[-2] - 2 * _BLUR, x.shape[-1] - 2 * _BLUR
    offsets = torch.arange(-_BLUR, _BLUR + 1, device=x.device, dtype=x.dtype).view(-1, 1, 1, 1, 1)
    taps = torch.exp(-0.5 * (offsets / sigma) ** 2)
    taps = taps / taps.sum(0)
    x = sum((tap * x[..., i : i + height, :] for i, tap in enumerate(taps)), start=x.new_zeros(()))
    return sum((tap * x[..., i : i + width] for i, tap in enumerate(taps)), start=x.new_zeros(()))


def _move(x: Tensor, generator: torch.Generator, padding: str, margin: int) -> Tensor:
    """Rotate, translate, scale and mirror each image at random."""
    count, (height, width) = len(x), x.shape[-2:]
    angle = uniform(generator, count, -math.radians(15), math.radians(15), x).flatten()
    down = uniform(generator, count, -height / 8, height / 8, x).flatten()
    right = uniform(generator, count, -width / 8, width / 8, x).flatten()
    scale = uniform(generator, count, 0.9, 1.1, x).flatten()
    mirror = 1.0 - 2.0 * (uniform(generator, count, 0.0, 1.0, x).flatten() < 0.5).to(x.dtype)
    cos, sin = angle.cos() / scale, angle.sin() / scale
    turn = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    shift = (turn @ torch.stack([-down, -right], 1)[..., None])[..., 0]
    flip = torch.stack([torch.ones_like(mirror), mirror], 1)[:, None]
    return resample(x, turn * flip, shift, padding, margin)


def resample(x: Tensor, matrix: Tensor, shift: Tensor, padding: str, margin: int = 0) -> Tensor:
    """Images whose pixel at (row, column) p is the old one at matrix @ p + shift, p counted from the centre.

    Args:
        x: Images (b, c, h, w).
        matrix: (b, 2, 2).
        shift: (b, 2), in pixels.
        padding: What lies beyond the border, as in ``grid_sample``.
        margin: Extra pixels on each side of the result.

    Example:
        >>> x = torch.tensor([[[[1.0, 2.0, 3.0]]]])
        >>> resample(x, torch.eye(2)[None], torch.tensor([[0.0, 1.0]]), "border").flatten().tolist()
        [2.0, 3.0, 3.0]
    """
    height, width = x.shape[-2:]
    rows = torch.arange(height + 2 * margin, device=x.device, dtype=x.dtype) - margin - (height - 1) / 2
    columns = torch.arange(width + 2 * margin, device=x.device, dtype=x.dtype) - margin - (width - 1) / 2
    points = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
    points = torch.einsum("hwj,bij->bhwi", points, matrix) + shift[:, None, None]
    across, down = max(width - 1, 1) / 2, max(height - 1, 1) / 2
    grid = torch.stack([points[..., 1] / across, points[..., 0] / down], -1)
    return F.grid_sample(x, grid, "bilinear", padding, align_corners=True)
