"""Whether a set is there and whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ttvd.data.fetch.catalog import Download
from ttvd.data.fetch.contents import COUNTS, SIZES
from ttvd.data.fetch.download import describe_mismatch
from ttvd.files import open_atomic

MARKER: Final = ".ttvd-complete.json"
_MOST_LISTED = 1000


def is_complete(item: Download, home: Path) -> bool:
    """Whether everything that a download makes is there and whole."""
    return not any(find_fault(item, product, home) for product in item.products)


def find_fault(item: Download, product: str, home: Path) -> str:
    """Say what is wrong with one product of a download; nothing when it is whole.

    A file is known by its checksum. A folder is known by the marker of our own fetch, or, when it came another way,
    by the files that the official one has.
    """
    place = home / product
    if not item.members:
        return describe_mismatch(place, item.md5) if place.is_file() else f"there is no {place}"
    if not place.is_dir():
        return f"there is no folder {place}"
    sizes = _read_marker(item, place)
    if sizes is not None:
        return _compare_sizes(place, sizes)
    if product in SIZES:
        return _compare_sizes(place, SIZES[product])
    if product in COUNTS:
        return _compare_counts(place, product)
    return "it was not put there by `ttvd data get`"


def write_marker(item: Download, folder: Path) -> None:
    """Note in a folder that it was unpacked completely, from which archive, and the sizes of its files if few."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    listed = dict(sorted(sizes.items())) if len(sizes) <= _MOST_LISTED else {}
    with open_atomic(folder / MARKER) as file:
        file.write(json.dumps({"archive": item.file, "md5": item.md5, "sizes": listed}, indent=2).encode())


def _read_marker(item: Download, folder: Path) -> dict[str, int] | None:
    """Return the sizes of the marker; None where there is none, or that of another archive."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return dict(marker["sizes"]) if marker["md5"] == item.md5 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _compare_sizes(folder: Path, sizes: Mapping[str, int]) -> str:
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        found = path.stat().st_size
        # Headers of .npy files differ between versions of numpy, and labels may have more than one byte.
        if found < size or (found > size and path.suffix != ".npy"):
            return f"{name} has {found:,} bytes, expected {size:,}"
    return ""


def _compare_counts(folder: Path, product: str) -> str:
    for pattern, count in COUNTS[product].items():
        found = sum(1 for _ in folder.glob(pattern))
        if found != count:
            return f"there are {found:,} pictures {pattern}, expected {count:,}"
    return ""
