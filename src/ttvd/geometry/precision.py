"""In which type the arithmetic after a network is done: float32 or better, whatever the network computed in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def upcast(tensor: Tensor) -> Tensor:
    """Returns a floating tensor in float32 or better."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: autocast is off inside, so that matrix products keep the type of what comes in.

    It is for functions of what has left a network, whose tensors are float32 or better already.

    Example:
        >>> product = full_precision(lambda a, b: a @ b)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     product(torch.eye(2), torch.eye(2)).dtype, (torch.eye(2) @ torch.eye(2)).dtype
        (torch.float32, torch.bfloat16)
    """

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.autocast(tensor.device.type, enabled=False):
            return function(*args, **kwargs)

    return inside
