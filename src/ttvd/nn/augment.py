"""Random crop and mirror of images, for a whole batch at once, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor


def draw_crops(count: int, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Draw the offsets of random crops and whether to mirror each image.

    The numbers are drawn separately from their use, so they depend neither on the device nor on the number of
    processes.

    Args:
        count: Number of images.
        padding: Zero padding in pixels that :func:`crop_and_flip` will add on each side.
        flip: Whether to mirror half of the images.
        generator: Random generator on the CPU.

    Returns:
        Draws (count, 3), int64, on the CPU: row offset and column offset from 0 to 2 * padding, and 1 for an image
        that is mirrored.

    Example:
        >>> draw_crops(5, 2, True, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3])
    """
    offsets = torch.randint(0, 2 * padding + 1, (count, 2), generator=generator)
    mirror = torch.randint(0, 2, (count, 1), generator=generator)
    return torch.cat([offsets, mirror * int(flip)], dim=1)


def crop_and_flip(images: Tensor, draws: Tensor, padding: int) -> Tensor:
    """Pad images with zeros, crop them to their original size at the drawn offsets, and mirror the drawn ones.

    Args:
        images: Images (b, c, h, w).
        draws: Draws (b, 3) of :func:`draw_crops`, on the device of the images.
        padding: Zero padding in pixels that the offsets were drawn for.

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
