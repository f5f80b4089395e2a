"""Sets in the layout of CIFAR-10-C: one .npy file for each corruption, the severities stacked, and labels.npy.

The released CIFAR-10-C (https://zenodo.org/record/2535967) and CIFAR-100-C (https://zenodo.org/record/3555552) hold
the severities 1 to 5; sets that `ttvd corrupt` wrote name theirs in the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ttvd.data.sets.arrays import from_arrays, read_npy
from ttvd.data.sets.imageset import ImageSet

SEVERITIES = (1, 2, 3, 4, 5)


def load_stack(
    folder: str | Path,
    corruption: str,
    severity: int = 5,
    *,
    classes: Sequence[str] | None = None,
    name: str | None = None,
) -> ImageSet:
    """Load one corruption at one severity; only that part of the file is read.

    Args:
        folder: Holds the .npy files.
        corruption: Name of a file, without its suffix.
        severity: One of those in the file, 1 to 5 in the released sets.
        classes: Names of the classes.
        name: For records; the name of the folder unless given.
    """
    folder = Path(folder)
    severities = read_severities(folder)
    if severity not in severities:
        raise ValueError(f"{folder} has the severities {list(severities)}, got {severity!r}")
    path = folder / f"{corruption}.npy"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.npy") if file.stem != "labels")
        raise FileNotFoundError(f"no {path}; the corruptions there are: {', '.join(known) or 'none'}")
    images, labels = read_npy(path), read_npy(folder / "labels.npy")
    if labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(
            f"{path} has {len(images)} images but labels.npy has shape {labels.shape}; "
            "they do not belong together or one is truncated"
        )
    count, rest = divmod(len(images), len(severities))
    if rest:
        raise ValueError(
            f"{path} has {len(images)} images, which {len(severities)} severities cannot share equally"
        )
    start = severities.index(severity) * count
    rows = slice(start, start + count)
    return from_arrays(images[rows], labels[rows], classes=classes, name=name or folder.name)


def read_severities(folder: Path) -> tuple[int, ...]:
    """Return the stacked severities: those of the manifest, 1 to 5 where there is none."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return SEVERITIES
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))["severities"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest} is no manifest of `ttvd corrupt`: {error}") from error
    if not isinstance(found, list) or not found or any(type(number) is not int for number in found):
        raise ValueError(f"{manifest}: severities must be a list of integers, got {found!r}")
    return tuple(found)
