"""What a recorded step depends on besides its tensors: if that has changed, the recording is worth nothing."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sized
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GROWING = (list, dict, OrderedDict, set, deque)
_OWN = set(vars(nn.Module())) - set(_HOOKS)


class Traits:
    """The attributes of a module and all below it, the places of their tensors, and torch's switches.

    Attributes are compared by identity, and held, so that nothing else can take their place in memory. Looking at them
    again is part of every step, so it must take no longer than a fraction of a millisecond.

    Args:
        module: What is watched.
        device_type: Whose autocast matters.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> traits = Traits(layer, "cpu")
        >>> traits.hold()
        True
        >>> layer.scale = 0.5
        >>> traits.hold()
        False
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self._device_type = device_type
        self._switches = _read_switches(device_type)
        parts = list(module.modules())
        self._tables = [table for part in parts for table in _tables(part)]
        self._values = list(self._read_tables())
        self._containers = [*self._tables, *(value for part in parts for value in _containers(part))]
        self._sizes = list(map(len, self._containers))
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._places = self._find_places()

    def hold(self) -> bool:
        """Whether everything is as it was."""
        return (
            _read_switches(self._device_type) == self._switches
            and list(map(len, self._containers)) == self._sizes
            and all(map(is_, self._read_tables(), self._values))
            and self._find_places() == self._places
        )

    def _read_tables(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self._tables))

    def _find_places(self) -> list[object]:
        return [*map(Tensor.data_ptr, self._tensors), *map(attrgetter("requires_grad"), self._tensors)]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module, or one below it, runs a hook."""
    return any(getattr(part, kind) for part in module.modules() for kind in _HOOKS)


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps what it has."""
    return vars(module), module._modules, module._parameters, module._buffers


def _containers(module: nn.Module) -> Iterator[Sized]:
    """What can grow: hooks, and what the module has beyond torch's own attributes."""
    yield from (value for name, value in vars(module).items() if name not in _OWN and type(value) in _GROWING)


def _read_switches(device_type: str) -> tuple[object, ...]:
    """What decides, all over torch, how a step is computed."""
    cudnn = torch.backends.cudnn
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.backends.cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
