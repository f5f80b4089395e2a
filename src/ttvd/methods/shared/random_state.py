"""A random generator that belongs to an adapter: seeded, saved and reset with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn


class RandomState(nn.Module):
    """A random generator whose state is a buffer.

    It lives on the CPU wherever the adapter is, so a method draws the same numbers on every device.

    Args:
        seed: Seed of the sequence.

    Example:
        >>> random_state = RandomState(0)
        >>> with random_state.generator() as generator:
        ...     first = torch.rand(2, generator=generator)
        >>> saved = {name: value.clone() for name, value in random_state.state_dict().items()}
        >>> with random_state.generator() as generator:
        ...     second = torch.rand(2, generator=generator)
        >>> _ = random_state.load_state_dict(saved)
        >>> with random_state.generator() as generator:
        ...     torch.equal(torch.rand(2, generator=generator), second)
        True
    """

    on_host = True
    state: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.Generator().manual_seed(seed).get_state())

    @contextmanager
    def generator(self) -> Iterator[torch.Generator]:
        """A generator to draw from; its state is stored at the end."""
        generator = torch.Generator()
        generator.set_state(self.state)
        yield generator
        self.state.copy_(generator.get_state())

    def check_values(self, state: dict[str, Tensor]) -> None:
        """Refuse what is no state of a generator."""
        try:
            torch.Generator().set_state(state["state"].cpu())
        except RuntimeError as error:
            raise ValueError(
                f"this state holds no random generator: {str(error).splitlines()[0]}; it cannot be continued"
            ) from error

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self
