"""Random crops and mirror images, for a whole batch at once on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor


def draw_crops(count: int, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Draw where to crop and whether to mirror.

    Returns:
        (count, 3) int64 on the CPU: row offset, column offset (0 .. 2 * padding) and 0 or 1 for the mirror. The
        numbers are drawn apart from their use, so that they do not depend on the device or on the number of
        processes.
    """
    offsets = torch.randint(0, 2 * padding + 1, (count, 2), generator=generator)
    mirror = torch.randint(0, 2, (count, 1), generator=generator)
    return torch.cat([offsets, mirror * int(flip)], dim=1)


def crop_and_flip(images: Tensor, draws: Tensor, padding: int) -> Tensor:
    """Pad images with zeros, cut out their original size at the drawn place, mirror the drawn ones.

    Args:
        images: (b, c, h, w).
        draws: (b, 3) of :func:`draw_crops`, on the same device.
        padding: The padding the offsets were drawn for.

    Example:
        >>> x = torch.tensor([[[[1.0, 2.0]]]])
        >>> crop_and_flip(x, torch.tensor([[1, 0, 0]]), 1).flatten().tolist()  # one pixel to the left
        [0.0, 1.0]
        >>> crop_and_flip(x, torch.tensor([[1, 1, 1]]), 1).flatten().tolist()  # in place, mirrored
        [2.0, 1.0]
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) + draws[:, :1]
    columns = torch.arange(width, device=images.device).expand(len(images), width)
    columns = torch.where(draws[:, 2:] > 0, width - 1 - columns, columns) + draws[:, 1:2]
    padded = F.pad(images, (padding,) * 4)
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    return padded[batch, channel, rows[:, None, :, None], columns[:, None, None, :]]
