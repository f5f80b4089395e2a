"""Which source images are kept from training, so that temperatures can be fitted on something new."""

import torch
from torch import Tensor

EVERY = 10


def is_held_out(count: int) -> Tensor:
    """A mask (count,) of every tenth image, the first one included.

    Example:
        >>> is_held_out(50_000).sum()
        tensor(5000)
    """
    return torch.arange(count) % EVERY == 0
