"""Safetensors files that say what they are: written atomically, refused with a reason when they do not fit.

Safetensors hold arrays and strings only, so that reading a file can never run code.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ttvd.files import open_atomic

KIND = "ttvd.kind"
VERSION = "ttvd.version"


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that it is either the old one or the complete new one, even after a kill."""
    with open_atomic(path) as file:
        file.write(content)


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    kind: str,
    version: int,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors and strings, marked with the kind of file and the version of its layout."""
    from safetensors.torch import save

    marks = {KIND: kind, VERSION: str(version)}
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(content, {**(metadata or {}), **marks}))


def read_tensors(
    path: str | os.PathLike[str], *, kind: str, version: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`write_tensors` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, of another kind, or of a newer version than this one can read.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no {kind} file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            _check_marks(path, metadata, kind, version)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file or is truncated ({error}); write it again"
        ) from error
    return tensors, metadata


def _check_marks(path: str | os.PathLike[str], metadata: dict[str, str], kind: str, version: int) -> None:
    found = metadata.get(KIND)
    if found != kind:
        raise ValueError(f"{path} is not a {kind} file: its kind is {found or 'not given'!r}")
    text = metadata.get(VERSION, "")
    if not text.isdecimal():
        raise ValueError(f"{path} is not a valid {kind} file: its version is {text!r}")
    if int(text) > version:
        raise ValueError(
            f"{path} has version {text} of the {kind} layout, this ttvd reads up to {version}; upgrade ttvd"
        )
