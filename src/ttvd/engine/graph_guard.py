"""What a recorded step depends on besides the values of its tensors. A change makes the recording invalid."""

import weakref
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
# Of torch's own attributes, those that a step can see; the last three are the tables of a module.
_SEEN = ("training", "_parameters", "_buffers", "_modules")
_get_tables = itemgetter(*_SEEN[1:])


class GraphGuard:
    """Remembers the attributes of a module and its submodules, the addresses of their tensors, and torch's switches.

    Attributes are compared by identity. The guard holds them, so that no other object can take their address; it does
    not hold the module itself, so that a guard may be an attribute of the module that it watches. The check is part
    of every step and takes a fraction of a millisecond.

    Args:
        module: The module to watch.
        device_type: The type of the device whose autocast mode matters.
        ignore: Names of attributes of ``module`` that do not matter.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> guard = GraphGuard(layer, "cpu")
        >>> guard.is_valid()
        True
        >>> layer.scale = 0.5
        >>> guard.is_valid()
        False
    """

    def __init__(self, module: nn.Module, device_type: str, ignore: tuple[str, ...] = ()) -> None:
        self._device_type = device_type
        self._switches = _read_switches(device_type)
        root, *parts = module.modules()
        self._root = weakref.ref(root)
        self._parts = [vars(part) for part in parts]
        attributes = [vars(root), *self._parts]
        skipped = _OWN.union(ignore)
        self._readers = [itemgetter(*_SEEN, *(own.keys() - skipped)) for own in attributes]
        tables = [table for own in attributes for table in _get_tables(own)]
        self._filled = [table for table in tables if table]
        self._values = list(self._read_values(vars(root)))
        growing = (value for own in attributes for value in _find_growing(own, skipped))
        self._containers = [*self._parts, *tables, *growing]
        self._sizes = self._measure(vars(root))
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._places = self._find_places()

    def is_valid(self) -> bool:
        """Whether everything is as it was."""
        root = self._root()
        if root is None:
            return False
        try:
            return (
                _read_switches(self._device_type) == self._switches
                and self._measure(vars(root)) == self._sizes
                and all(map(is_, self._read_values(vars(root)), self._values))
                and self._find_places() == self._places
            )
        except KeyError:  # an attribute has another name now
            return False

    def _measure(self, root: dict[str, Any]) -> list[int]:
        return [len(root), *map(len, self._containers)]

    def _read_values(self, root: dict[str, Any]) -> Iterator[object]:
        of_modules = chain.from_iterable(map(call, self._readers, chain([root], self._parts)))
        return chain(of_modules, chain.from_iterable(map(dict.values, self._filled)))

    def _find_places(self) -> list[object]:
        return [*map(Tensor.data_ptr, self._tensors), *map(attrgetter("requires_grad"), self._tensors)]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module or one of its submodules runs a hook."""
    return any(getattr(part, kind) for part in module.modules() for kind in _HOOKS)


def _find_growing(own: dict[str, Any], skipped: frozenset[str]) -> Iterator[Sized]:
    """Containers that may grow: hooks, and those among the attributes that torch does not define."""
    yield from (own[name] for name in _HOOKS)
    yield from (value for name, value in own.items() if name not in skipped and type(value) in _GROWING)


def _read_switches(device_type: str) -> tuple[object, ...]:
    """Global settings of torch that decide how a step is computed."""
    cudnn = torch.backends.cudnn
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        *_read_float32_precision(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def _read_float32_precision() -> tuple[object, object]:
    """Precision of float32 products and convolutions, by the switches that this version of torch has."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        return matmul.fp32_precision, cudnn.conv.fp32_precision
    return matmul.allow_tf32, cudnn.allow_tf32  # before torch 2.9
