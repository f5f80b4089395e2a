"""CIFAR's python batches without their danger: an unpickler that can build plain values and byte arrays only.

A pickle is a program that names functions and calls them. Here every name but five is refused, and those five lead
to harmless stand-ins: numpy's own reconstruction code is not reached either.
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


class _Bytes8:
    """Stands for numpy's dtype of bytes while a pickle is read."""

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or state[:5] not in _PLAIN_BYTES:
            raise pickle.UnpicklingError(
                f"an array of bytes was expected, its dtype has the state {state!r:.60}"
            )


class _Array:
    """Stands for an array while a pickle is read; filled by the state that follows."""

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


class _StandIn:
    """A function that a pickle may call; a pickle can neither change it nor make instances of it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> object:
        return self._function(*arguments)

    def __setstate__(self, state: object) -> NoReturn:
        raise pickle.UnpicklingError("a pickle must not change what it is read with")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise pickle.PicklingError("stand-ins are not saved")


def _make_dtype(name: object, *_: object) -> _Bytes8:
    text = name.decode("latin1") if isinstance(name, bytes) else name
    if text not in _DTYPES:
        raise pickle.UnpicklingError(f"only arrays of bytes are admitted, got the dtype {name!r:.40}")
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
    """Python 3 writes bytes in this way where the protocol has none of them."""
    if not isinstance(text, str) or codec != "latin1":
        raise pickle.UnpicklingError("only latin-1 text is turned into bytes")
    return text.encode("latin1")


def _refuse_call(*_: object) -> NoReturn:
    raise pickle.UnpicklingError("numpy.ndarray must not be called")


_ARRAY = _StandIn(_make_array)
_FROMBUFFER = _StandIn(_frombuffer)
_ADMITTED = {
    ("numpy", "ndarray"): _StandIn(_refuse_call),
    ("numpy", "dtype"): _StandIn(_make_dtype),
    ("numpy.core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy.core.numeric", "_frombuffer"): _FROMBUFFER,
    ("numpy._core.numeric", "_frombuffer"): _FROMBUFFER,
    ("_codecs", "encode"): _StandIn(_encode),
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for an admitted name; refuse every other."""
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which a batch of images has no use for"
            )
        return _ADMITTED[module, name]

    def persistent_load(self, identifier: object) -> NoReturn:
        """Refuse references to anything outside the file."""
        raise pickle.UnpicklingError("it refers to objects outside the file")


def read_batch(path: str | Path) -> dict[str, Any]:
    """Read a pickled dictionary of byte arrays, lists, bytes, strings and numbers; refuse everything else.

    Raises:
        ValueError: The file is damaged, or asks for anything beyond those values.
    """
    copyreg.clear_extension_cache()  # what is in that cache is handed out without asking `find_class`
    failures = (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        MemoryError,
    )
    try:
        content = _PlainUnpickler(io.BytesIO(Path(path).read_bytes()), encoding="bytes").load()
    except (*failures, OverflowError, RecursionError, UnicodeError) as error:
        raise ValueError(f"{path} is refused as a batch of images: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is refused as a batch of images: it holds a {type(content).__name__}")
    return {_to_text(key): _unwrap(value) for key, value in content.items()}


def _to_text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _unwrap(value: object) -> object:
    return value.value if isinstance(value, _Array) else value
