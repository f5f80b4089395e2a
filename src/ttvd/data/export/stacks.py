"""Export in the layout of CIFAR-10-C: one .npy file for each corruption, severities stacked, and labels.npy."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ttvd.data.export.lock import remove_temporaries
from ttvd.data.export.manifest import MANIFEST, SUMS, Ledger
from ttvd.data.export.plan import Plan
from ttvd.data.export.source import Advance, batches_of
from ttvd.data.sets import LabelledImages
from ttvd.files import open_atomic


def write_stacks(
    source: LabelledImages, out: Path, plan: Plan, ledger: Ledger, advance: Advance, *, workers: int
) -> None:
    """Write every missing file; bytes (n, h, w, c) for each severity, one after the other."""
    made = {MANIFEST, SUMS, "labels.npy", *(f"{name}.npy" for name in ledger.corruptions)}
    remove_temporaries(out, lambda path: path in made)
    labels = np.tile(source.labels.numpy(), len(plan.severities))
    if not ledger.holds("labels.npy"):
        small = labels.astype(np.uint8) if labels.max() < 256 else labels
        ledger.add({"labels.npy": _write_array(out / "labels.npy", small)})
    for name in plan.corruptions:
        if ledger.holds(f"{name}.npy"):
            advance(name, len(labels))
        else:
            digest = _write_corruption(source, out / f"{name}.npy", plan, advance, workers)
            ledger.add({f"{name}.npy": digest})
    ledger.close(plan.corruptions, list_files=True)


def _write_corruption(source: LabelledImages, path: Path, plan: Plan, advance: Advance, workers: int) -> str:
    channels, height, width = source.floats([0]).shape[1:]
    shape = (len(plan.severities) * len(source), height, width, channels)
    with open_atomic(path) as file:
        writer = _Hashing(file)
        writer.write(_make_header(np.dtype(np.uint8), shape))
        for severity in plan.severities:
            for images, index in batches_of(source, workers):
                writer.write(plan.apply(images, path.stem, severity, index).tobytes())
                advance(path.stem, len(index))
    return writer.digest.hexdigest()


def _write_array(path: Path, array: npt.NDArray[np.integer]) -> str:
    with open_atomic(path) as file:
        writer = _Hashing(file)
        writer.write(_make_header(array.dtype, array.shape))
        writer.write(array.tobytes())
    return writer.digest.hexdigest()


def _make_header(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


class _Hashing:
    """Writes, and keeps the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self.digest.update(content)
