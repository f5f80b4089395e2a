"""Random numbers that belong to an adapter: seeded, saved and reset with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn


class Dice(nn.Module):
    """A random generator whose state is a buffer.

    It lives on the CPU wherever the adapter is, so that a method draws the same numbers on every device; move what was
    drawn.

    Args:
        seed: Where the sequence starts.

    Example:
        >>> dice = Dice(0)
        >>> with dice.roll() as generator:
        ...     first = torch.rand(2, generator=generator)
        >>> saved = {name: value.clone() for name, value in dice.state_dict().items()}
        >>> with dice.roll() as generator:
        ...     second = torch.rand(2, generator=generator)
        >>> _ = dice.load_state_dict(saved)
        >>> with dice.roll() as generator:
        ...     torch.equal(torch.rand(2, generator=generator), second)
        True
    """

    state: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.Generator().manual_seed(seed).get_state())

    @contextmanager
    def roll(self) -> Iterator[torch.Generator]:
        """A generator to draw from; what it has drawn is remembered at the end."""
        generator = torch.Generator()
        generator.set_state(self.state)
        yield generator
        self.state.copy_(generator.get_state())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self
