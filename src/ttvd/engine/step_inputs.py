"""What a method decides on the host before a step begins: random numbers, and which way the step goes.

A recorded step is repeated to the letter, so that it can neither draw nor decide. It finds what was drawn at the places
where the recording looks, and each way that it can go has a recording of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """Of one step.

    Attributes:
        way: What the step does that its tensors do not tell; there should be few different ones.
        draws: Tensors of the host, in the order in which the step takes them.
    """

    way: Hashable = None
    draws: tuple[Tensor, ...] = ()


class Agenda:
    """The plan of the step at hand, with its draws on the device.

    Example:
        >>> agenda = Agenda()
        >>> with_numbers = Plan("left", (torch.tensor([1, 2]),))
        >>> agenda.begin(with_numbers, send(with_numbers.draws, torch.device("cpu")))
        >>> agenda.way, agenda.draw().tolist()
        ('left', [1, 2])
    """

    def __init__(self) -> None:
        self.begin(Plan(), ())

    def begin(self, plan: Plan, draws: Sequence[Tensor]) -> None:
        """Take over a plan, with its draws where the step is computed."""
        self.way = plan.way
        self._draws: Iterator[Tensor] = iter(draws)

    def draw(self) -> Tensor:
        """The next of the draws."""
        return next(self._draws)

    def __deepcopy__(self, memo: dict[int, Any]) -> Agenda:
        return Agenda()

    def __reduce__(self) -> tuple[type[Agenda], tuple[()]]:
        return Agenda, ()


def send(draws: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Draws on a device; nobody waits until they are there."""
    if device.type != "cuda":
        return tuple(draw.to(device) for draw in draws)
    return tuple(draw.pin_memory().to(device, non_blocking=True) for draw in draws)
