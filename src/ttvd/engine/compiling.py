"""What ``torch.compile`` needs to be told."""

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

GRAPHS = 128
"""Settings and sizes of batches for which one function is compiled in a process."""
P = ParamSpec("P")
R = TypeVar("R")


@cache
def compile_once(function: Callable[P, R]) -> Callable[P, R]:
    """What ``torch.compile`` makes of a function that is not a network's, for all who use it."""
    allow_graphs()
    return torch.compile(function, dynamic=False)


def allow_graphs() -> None:
    """Let one function have as many graphs as a table has settings; beyond eight, torch would not compile, silently."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, GRAPHS)
