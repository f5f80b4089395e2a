"""Precision of the arithmetic after a network: float32 or better, whatever dtype the network computes in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def upcast(tensor: Tensor) -> Tensor:
    """Return a floating tensor in float32 or better.

    Example:
        >>> upcast(torch.zeros(1, dtype=torch.bfloat16)).dtype, upcast(torch.zeros(1).double()).dtype
        (torch.float32, torch.float64)
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that autocast is off inside, and matrix products keep the dtype of their inputs.

    It serves functions of the outputs of a network, which are float32 or better already.

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
