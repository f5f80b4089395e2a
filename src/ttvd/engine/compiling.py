"""``torch.compile`` for steps: functions that it fuses, and networks in a form that it handles well."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ttvd.engine.temporary import Temporarily

GRAPHS = 128
"""How many variants of one function a process may compile: one for each setting and batch shape."""
P = ParamSpec("P")
R = TypeVar("R")


class _Fusing(threading.local):
    """The type of the device whose steps are compiled at present; None outside of compiled steps."""

    device_type: str | None = None


_FUSING = _Fusing()


@functools.cache
def compile_once(function: Callable[P, R]) -> Callable[P, R]:
    """The compiled form of a function, shared by all adapters of the process."""
    raise_recompile_limit()
    return torch.compile(function, dynamic=False)


def fusible(*, writes_scalars: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of many small operations. Compiled steps fuse these into few kernels.

    Outside of compiled steps the function runs as it is written.

    Args:
        writes_scalars: The function writes to tensors of one element in place. Code compiled for a CPU loses such
            writes, so the function is fused on GPUs only.

    Example:
        >>> @fusible()
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x + x
        >>> double(torch.ones(1))
        tensor([2.])
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            device_type = _FUSING.device_type
            fuse = device_type is not None and not (writes_scalars and device_type == "cpu")
            return (compile_once(function) if fuse else function)(*args, **kwargs)

        return call

    return decorate


def fusing(device_type: str | None) -> Temporarily[object]:
    """Fuse the functions marked :func:`fusible` that are called inside of the block; None turns this off."""
    return Temporarily([_FUSING], "device_type", device_type)


def get_fusing() -> str | None:
    """The type of the device for which this thread fuses functions; None if it fuses none."""
    return _FUSING.device_type


def set_fusing(device_type: str | None) -> None:
    """Fuse functions in this thread, or not, from now on."""
    _FUSING.device_type = device_type


def raise_recompile_limit() -> None:
    """Allow as many variants of a function as a table has settings; torch silently stops compiling after eight."""
    from torch._dynamo import config

    # Before torch 2.7 the limit has another name.
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(getattr(config, name), GRAPHS))


def is_fusing() -> bool:
    """Whether this thread is inside of a compiled step. Outside of one, networks run as they are written.

    Compiling for a batch shape that comes once does not pay. ``torch.compiler.set_stance`` is not used for this, since
    it holds for all threads.
    """
    return get_fusing() is not None


def is_compiler_error(error: BaseException) -> bool:
    """Whether ``torch.compile`` itself failed, and not the code that it compiles."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
