"""Attributes that are set inside of a block. Steps use these classes, and no ``contextlib.contextmanager``.

An interrupt can cut off the end of a block. A generator would then give back what it has set when it is collected,
which may be in the middle of a later step. These objects never do. The transaction of the step that was interrupted
has restored the attributes by then.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Temporarily(Generic[T]):
    """Sets an attribute of some objects inside of a block.

    Args:
        objects: The objects.
        name: Name of the attribute.
        value: What it is inside.

    Example:
        >>> from torch import nn
        >>> layer = nn.Dropout()
        >>> with Temporarily([layer], "p", 0.0):
        ...     layer.p
        0.0
        >>> layer.p
        0.5
    """

    def __init__(self, objects: Sequence[T], name: str, value: Any) -> None:
        self.objects, self._name, self._value = objects, name, value
        self._before: list[Any] = []

    def __enter__(self) -> Sequence[T]:
        self._before = [getattr(one, self._name) for one in self.objects]
        for one in self.objects:
            setattr(one, self._name, self._value)
        return self.objects

    def __exit__(self, *_: object) -> None:
        for one, value in zip(self.objects, self._before, strict=True):
            setattr(one, self._name, value)
