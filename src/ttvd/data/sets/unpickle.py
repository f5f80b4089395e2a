"""A safe unpickler for CIFAR's Python batches: it can build only plain values and byte arrays.

A pickle is a program that names functions and calls them. Here every name except a few is refused, and these few lead
to harmless substitutes: even numpy's own reconstruction code is not reached.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt

_DTYPES = ("u1", "|u1", "uint8")
_PLAIN_BYTES = tuple((3, order, None, None, None) for order in ("|", b"|"))
_FAILURES = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError),
    *(OverflowError, RecursionError),
)


class _Bytes8:
    """Substitute for numpy's dtype of bytes while a pickle is read."""

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or state[:5] not in _PLAIN_BYTES:
            raise pickle.UnpicklingError(
                f"an array of bytes was expected, its dtype has the state {state!r:.60}"
            )


class _Array:
    """Substitute for an array while a pickle is read; the state that follows in the pickle fills it."""

    value: npt.NDArray[np.uint8] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("the state of an array has five parts")
        _, shape, dtype, fortran, raw = state
        whole = isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
        if (
            not whole
            or not isinstance(dtype, _Bytes8)
            or not isinstance(raw, bytes)
            or len(raw) != math.prod(shape)
        ):
            raise pickle.UnpicklingError(
                "an array of bytes was expected, with as many bytes as its shape says"
            )
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Substitute:
    """A function that a pickle may call; the pickle can neither change it nor make instances of it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> object:
        return self._function(*arguments)

    def __setstate__(self, state: object) -> NoReturn:
        raise pickle.UnpicklingError("a pickle must not change the functions that it calls")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise pickle.PicklingError("substitutes are not saved")


def _make_dtype(name: object, *_: object) -> _Bytes8:
    text = name.decode("latin1") if isinstance(name, bytes) else name
    if text not in _DTYPES:
        raise pickle.UnpicklingError(f"only arrays of bytes are accepted, got the dtype {name!r:.40}")
    return _Bytes8()


def _make_array(*_: object) -> _Array:
    return _Array()


def _frombuffer(raw: object, dtype: object, shape: object, order: object, *_: object) -> _Array:
    array = _Array()
    array.__setstate__(
        (1, shape, dtype, order == "F", bytes(raw) if isinstance(raw, bytes | bytearray) else raw)
    )
    return array


def _encode(text: object, codec: object) -> bytes:
    """Undo the way in which Python 3 writes bytes in protocols that have no bytes."""
    if not isinstance(text, str) or codec != "latin1":
        raise pickle.UnpicklingError("only latin-1 text is turned into bytes")
    return text.encode("latin1")


def _refuse_call(*_: object) -> NoReturn:
    raise pickle.UnpicklingError("numpy.ndarray must not be called")


_ARRAY = _Substitute(_make_array)
_FROMBUFFER = _Substitute(_frombuffer)
_ACCEPTED = {
    ("numpy", "ndarray"): _Substitute(_refuse_call),
    ("numpy", "dtype"): _Substitute(_make_dtype),
    ("numpy.core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy.core.numeric", "_frombuffer"): _FROMBUFFER,
    ("numpy._core.numeric", "_frombuffer"): _FROMBUFFER,
    ("_codecs", "encode"): _Substitute(_encode),
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the substitute for an accepted name; refuse every other name."""
        if (module, name) not in _ACCEPTED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which a batch of images does not need"
            )
        return _ACCEPTED[module, name]

    def persistent_load(self, identifier: object) -> NoReturn:
        """Refuse references to objects outside the file."""
        raise pickle.UnpicklingError("it refers to objects outside the file")


def read_batch(path: str | Path) -> dict[str, Any]:
    """Read a pickled dictionary of byte arrays, lists, bytes, strings and numbers; refuse everything else.

    Raises:
        ValueError: The file is damaged, or holds anything but those values.
    """
    copyreg.clear_extension_cache()  # objects in that cache are returned without a call of `find_class`
    try:
        content = _PlainUnpickler(io.BytesIO(Path(path).read_bytes()), encoding="bytes").load()
    except _FAILURES as error:
        raise ValueError(f"{path} is refused as a batch of images: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is refused as a batch of images: it holds a {type(content).__name__}")
    return {_to_text(key): _unwrap(value) for key, value in content.items()}


def _to_text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _unwrap(value: object) -> object:
    return value.value if isinstance(value, _Array) else value
