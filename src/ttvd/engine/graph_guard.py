"""What a recorded step depends on besides its tensors: if that has changed, the recording is worth nothing."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sized
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GROWING = (list, dict, OrderedDict, set, deque)
_OWN = frozenset(vars(nn.Module()))
# Of torch's own attributes, those that a step can see; the last three are tables of what a module has.
_SEEN = ("training", "_parameters", "_buffers", "_modules")
_get_tables = itemgetter(*_SEEN[1:])


class GraphGuard:
    """The attributes of a module and all below it, the places of their tensors, and torch's switches.

    Attributes are compared by identity, and held, so that nothing else can take their place in memory. Looking at them
    again is part of every step, so it must take no longer than a fraction of a millisecond.

    Args:
        module: What is watched.
        device_type: Whose autocast matters.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> guard = GraphGuard(layer, "cpu")
        >>> guard.is_valid()
        True
        >>> layer.scale = 0.5
        >>> guard.is_valid()
        False
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self._device_type = device_type
        self._switches = _read_switches(device_type)
        parts = list(module.modules())
        self._own = [vars(part) for part in parts]
        self._readers = [itemgetter(*_SEEN, *(own.keys() - _OWN)) for own in self._own]
        tables = [table for own in self._own for table in _get_tables(own)]
        self._filled = [table for table in tables if table]
        self._values = list(self._read_values())
        growing = (value for own in self._own for value in _find_growing(own))
        self._containers = [*self._own, *tables, *growing]
        self._sizes = list(map(len, self._containers))
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._places = self._find_places()

    def is_valid(self) -> bool:
        """Whether everything is as it was."""
        try:
            return (
                _read_switches(self._device_type) == self._switches
                and list(map(len, self._containers)) == self._sizes
                and all(map(is_, self._read_values(), self._values))
                and self._find_places() == self._places
            )
        except KeyError:  # an attribute has another name now
            return False

    def _read_values(self) -> Iterator[object]:
        of_modules = chain.from_iterable(map(call, self._readers, self._own))
        return chain(of_modules, chain.from_iterable(map(dict.values, self._filled)))

    def _find_places(self) -> list[object]:
        return [*map(Tensor.data_ptr, self._tensors), *map(attrgetter("requires_grad"), self._tensors)]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module, or one below it, runs a hook."""
    return any(getattr(part, kind) for part in module.modules() for kind in _HOOKS)


def _find_growing(own: dict[str, Any]) -> Iterator[Sized]:
    """What can grow: hooks, and what a module has beyond torch's own attributes."""
    yield from (own[name] for name in _HOOKS)
    yield from (value for name, value in own.items() if name not in _OWN and type(value) in _GROWING)


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
