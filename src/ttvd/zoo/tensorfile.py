"""Safetensors files that state their kind, their format and a checksum of their content.

A safetensors file holds arrays and strings only, so reading one never runs code. Files are written atomically and
refused with a reason when they do not fit.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ttvd.files import open_atomic

KIND = "ttvd.kind"
FORMAT = "ttvd.format"
CHECKSUM = "ttvd.checksum"
"""Metadata keys that every file carries."""


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: after a kill it is either the old file or the complete new one."""
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
    """Write named tensors and strings.

    Args:
        path: Path of the file.
        tensors: Tensors by name.
        kind: Kind of the file, such as ``"ttvd.sites"``.
        version: Format number of this kind of file.
        metadata: Further strings to store.
    """
    from safetensors.torch import save

    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    strings = {**(metadata or {}), KIND: kind, FORMAT: str(version)}
    write_bytes(path, save(content, {**strings, CHECKSUM: compute_checksum(content, strings)}))


def read_tensors(
    path: str | os.PathLike[str], *, kind: str, version: int, remedy: str = "write it again"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file that :func:`write_tensors` wrote.

    Args:
        path: Path of the file.
        kind: Kind that the file must have.
        version: Format number that the file must have.
        remedy: What the user can do about a file that cannot be read, for error messages.

    Returns:
        The tensors by name, and the metadata.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, of another kind or of another format.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no {kind} file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            if metadata.get(KIND) != kind:
                found = metadata.get(KIND) or "not given"
                raise ValueError(f"{path} is not a {kind} file: its kind is {found!r}")
            check_format(path, kind, metadata.get(FORMAT), version, remedy)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file or is truncated ({error}); {remedy}") from error
    expected = metadata.pop(CHECKSUM, None)
    if expected != compute_checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged: its content does not match its checksum; {remedy}")
    return tensors, metadata


def check_format(
    path: str | os.PathLike[str], kind: str, found: object, version: int, remedy: str = "write it again"
) -> None:
    """Raise a ValueError unless a file has the expected format number.

    Args:
        path: Path of the file.
        kind: Kind of the file.
        found: Format number that the file states; None if it states none.
        version: Format number that this version of ttvd reads.
        remedy: What the user can do about a file of an older format.
    """
    text = "" if found is None else str(found)
    if not text:
        raise ValueError(
            f"{path} states no format number: ttvd 0.1.0 or older wrote this {kind} file, and this ttvd reads format "
            f"{version} only; {remedy}"
        )
    if not text.isdecimal():
        raise ValueError(f"{path} is not a valid {kind} file: its format number is {text!r}")
    if int(text) > version:
        raise ValueError(
            f"{path} has format {text} of {kind} files, this ttvd reads format {version}; upgrade ttvd"
        )
    if int(text) < version:
        raise ValueError(f"{path} has format {text} of {kind} files, this ttvd reads {version}; {remedy}")


def compute_checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Hash the names, shapes, dtypes and bytes of tensors, and the metadata.

    Example:
        >>> one = compute_checksum({"a": torch.zeros(2)}, {})
        >>> one == compute_checksum({"a": torch.zeros(2)}, {}), one == compute_checksum({"a": torch.ones(2)}, {})
        (True, False)
    """
    digest = hashlib.sha256()
    for key in sorted(metadata):
        digest.update(f"{key}={metadata[key]}\n".encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
