"""Write the corrupted version of a clean set to disk: seeded, resumable, with a manifest.

A result has one of two layouts. "cifar" is the layout of CIFAR-10-C: one .npy file for each corruption, which holds the
severities one after the other, and labels.npy. "folder" is the layout of ImageNet-C: corruption/severity/class/image.

Beside the images lie two records. `manifest.json` states the settings, the finished corruptions and the checksums; for
the folder layout, which can have millions of files, it states the checksum of `SHA256SUMS` instead. `SHA256SUMS` grows
while the export runs and tells the next run what is done; `sha256sum --check SHA256SUMS` verifies a result.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import ttvd
from ttvd.data.checks import check_choice, check_severity, hash_file
from ttvd.data.corruptions import CORRUPTIONS, EVERY, corrupt, describe, frost_source
from ttvd.data.loading import prefetch, require_pillow
from ttvd.data.sets import ImageFolder, ImageSet, LabelledImages, Split, load_set
from ttvd.files import open_atomic

Layout = Literal["cifar", "folder"]
ImageFormat = Literal["jpeg", "png"]
Progress = Callable[[str, int], None]
"""Called with the corruption that is being made and the number of images that were finished just now."""

LOCK = ".ttvd-export.lock"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
_JPEG_QUALITY = 85
"""Quality of the released ImageNet-C images (make_imagenet_c.py of hendrycks/robustness)."""
_BATCH_VALUES = 1 << 23
_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
"""Names that `ttvd.files.open_atomic` gives to unfinished files."""


@dataclass(frozen=True)
class ExportSettings:
    """The corruptions of an export, and everything that their result depends on.

    Attributes:
        corruptions: Names of the corruptions, in the order in which they are made; see `select_corruptions`.
        severities: Severities from 1 to 5, ascending.
        seed: Seed of the random fields.
        constants: Published table of constants.
        frost: Sheets of the frost; see `corrupt`.
        device: Device that computes the corruptions.

    Example:
        >>> ExportSettings(("fog",), (5,)).describe()["corruptions"]["fog"][0]["severity"]
        5
    """

    corruptions: Sequence[str] = CORRUPTIONS
    severities: Sequence[int] = (1, 2, 3, 4, 5)
    seed: int = 0
    constants: Literal["cifar", "imagenet"] = "cifar"
    frost: Literal["procedural", "pictures"] = "procedural"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in self.corruptions:
            check_choice(name, EVERY, "corruption")
        for severity in self.severities:
            check_severity(severity)
        for what, values in (("corruptions", self.corruptions), ("severities", self.severities)):
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{what} must be distinct, at least one, got {list(values)}")
        if list(self.severities) != sorted(self.severities):
            raise ValueError(f"severities must ascend, got {list(self.severities)}")
        check_choice(self.constants, ("cifar", "imagenet"), "table of constants")
        check_choice(self.frost, ("procedural", "pictures"), "kind of frost")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"the device {self.device!r} cannot be used here: {error}") from error

    def describe(self) -> dict[str, Any]:
        """Return everything that the result depends on, for the manifest."""
        return {
            "seed": self.seed,
            "severities": list(self.severities),
            "constants": self.constants,
            "frost": frost_source(self.frost),
            "corruptions": {
                name: [describe(name, severity, self.constants) for severity in self.severities]
                for name in self.corruptions
            },
        }

    def apply(self, images: Tensor, name: str, severity: int, index: Tensor) -> npt.NDArray[np.uint8]:
        """Corrupt float images with the given numbers; return bytes (b, h, w, c)."""
        changed = corrupt(
            images.to(self.device),
            name,
            severity,
            constants=self.constants,
            seed=self.seed,
            index=index,
            frost=self.frost,
        )
        levels = changed.mul_(255).round_().to(torch.uint8)
        return levels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def parse_severities(text: str) -> tuple[int, ...]:
    """Read severities with commas between them.

    Example:
        >>> parse_severities("1,5")
        (1, 5)
    """
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"expected severities from 1 to 5 with commas between them, got {text!r}") from None


def open_clean_set(
    source: str | Path | None = None,
    name: str | None = None,
    split: Split = "test",
    *,
    resize: int | None = None,
    crop: int | None = None,
) -> ImageSet | ImageFolder:
    """Open the clean set that is to be corrupted.

    Args:
        source: Folder or file of the set; None for the digits, which need no files.
        name: Name of the set, one of `ttvd.data.sets.SETS`; by default "folder" for a folder, "arrays" for a file.
        split: "test" or "train".
        resize: Length of the shorter side of image files before cropping, 0 for no resizing; by default 256 for
            ImageNet's sets and 0 for others.
        crop: Side of the square that is cut from image files, 0 for no cropping; by default 224 for ImageNet's sets and
            0 for others.

    Raises:
        ValueError: The options do not fit the set, or its images have different sizes.
    """
    if source is None and name not in (None, "digits"):
        raise ValueError(f"the set {name} needs the folder it lies in: ttvd corrupt FOLDER --set {name}")
    if source is not None and not Path(source).exists():
        raise FileNotFoundError(f"no file or folder {source}")
    guess = "digits" if source is None else "folder" if Path(source).is_dir() else "arrays"
    clean = load_set(name or guess, source or ".", split)
    if not isinstance(clean, ImageFolder):
        if resize is not None or crop is not None:
            raise ValueError(f"resize and crop are for folders of pictures, {clean.name} is an array")
        return clean
    usual = (clean.resize, clean.crop) if (name or "").startswith("imagenet") else (None, None)
    sides = [
        default if side is None else side or None for side, default in zip((resize, crop), usual, strict=True)
    ]
    clean = clean.prepared(*sides)
    clean.check_size()
    return clean


def export_set(
    source: LabelledImages,
    out: str | Path,
    settings: ExportSettings | None = None,
    *,
    layout: Layout = "cifar",
    image_format: ImageFormat = "jpeg",
    workers: int = 2,
    progress: Progress | None = None,
) -> Path:
    """Write the corrupted versions of a clean set.

    A killed run leaves only whole files. The same call continues where it stopped and gives the same result.

    Args:
        source: The clean set, an `ImageSet` or an `ImageFolder`.
        out: Folder of the result: a new one, an empty one, or that of an earlier export with the same settings, to
            which corruptions are added. Any other folder is refused, and so is a second run at the same time.
        settings: Corruptions, severities, seed and constants; the 15 corruptions at all severities by default.
        layout: "cifar" writes .npy files, "folder" writes image files.
        image_format: Format of image files: "jpeg" (quality 85) as in ImageNet-C, or "png" without loss.
        workers: Number of threads that decode and encode image files.
        progress: Called with the corruption and the number of images that were finished just now.

    Returns:
        The folder of the result.

    Example:
        >>> import tempfile, torch
        >>> from ttvd.data.sets import from_arrays
        >>> clean = from_arrays(torch.rand(3, 3, 8, 8), [0, 1, 1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     out = export_set(clean, folder, ExportSettings(("contrast",), (1, 5)))
        ...     sorted(path.name for path in out.iterdir())
        ['SHA256SUMS', 'contrast.npy', 'labels.npy', 'manifest.json']
    """
    check_choice(layout, ("cifar", "folder"), "layout")
    check_choice(image_format, ("jpeg", "png"), "format of pictures")
    settings = settings or ExportSettings()
    _check_pillow(source, settings, layout)
    described = {
        "ttvd": ttvd.__version__,
        "layout": layout,
        **({"image_format": image_format} if layout == "folder" else {}),
        "source": {"name": source.name, "images": len(source), "sha256": source.fingerprint()},
        "classes": source.classes,
        **settings.describe(),
    }
    report = progress or (lambda name, count: None)
    out = Path(out)
    with lock_folder(out):
        manifest = _Manifest(out, described)
        if layout == "cifar":
            _write_stacks(source, out, settings, manifest, report, workers)
        else:
            _write_folders(source, out, settings, manifest, report, image_format, workers)
    return out


def _check_pillow(source: LabelledImages, settings: ExportSettings, layout: Layout) -> None:
    """Raise an error before the work begins, not hours later when the first image file is reached."""
    needs = {
        "reading pictures": isinstance(source, ImageFolder),
        "writing pictures": layout == "folder",
        "jpeg_compression": "jpeg_compression" in settings.corruptions,
        "frost from pictures": settings.frost == "pictures" and "frost" in settings.corruptions,
    }
    for purpose in (purpose for purpose, needed in needs.items() if needed):
        require_pillow(purpose)


def _iterate_clean(source: LabelledImages, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield float images and their numbers in batches of about 32 MB."""
    size = max(1, _BATCH_VALUES // source.floats([0]).numel())
    batches = torch.arange(len(source)).split(size)
    if isinstance(source, ImageFolder):
        requests = ((source, index) for index in batches)
        with closing(prefetch(requests, workers=workers, ahead=2)) as images:
            yield from zip(images, batches, strict=True)
    else:
        yield from ((source.floats(index), index) for index in batches)


# The layout of CIFAR-10-C


def _write_stacks(
    source: LabelledImages,
    out: Path,
    settings: ExportSettings,
    manifest: _Manifest,
    progress: Progress,
    workers: int,
) -> None:
    """Write every missing file: bytes (n, h, w, c) for each severity, one after the other."""
    made = {MANIFEST, SUMS, "labels.npy", *(f"{name}.npy" for name in manifest.corruptions)}
    _remove_temporaries(out, made.__contains__)
    labels = np.tile(source.labels.numpy(), len(settings.severities))
    if not manifest.holds("labels.npy"):
        small = labels.astype(np.uint8) if labels.max() < 256 else labels
        with _open_npy(out / "labels.npy", small.dtype, small.shape) as writer:
            writer.write(small.tobytes())
        manifest.add({"labels.npy": writer.digest.hexdigest()})
    shape = source.floats([0]).shape[1:]
    for name in settings.corruptions:
        file = f"{name}.npy"
        if manifest.holds(file):
            progress(name, len(labels))
            continue
        with _open_npy(out / file, np.dtype(np.uint8), (len(labels), *shape[1:], shape[0])) as writer:
            for severity in settings.severities:
                for images, index in _iterate_clean(source, workers):
                    writer.write(settings.apply(images, name, severity, index).tobytes())
                    progress(name, len(index))
        manifest.add({file: writer.digest.hexdigest()})
    manifest.close(settings.corruptions, list_files=True)


class _HashingWriter:
    """Writes to a file and computes the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self.digest.update(content)


@contextmanager
def _open_npy(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[_HashingWriter]:
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)
    with open_atomic(path) as file:
        writer = _HashingWriter(file)
        writer.write(header.getvalue())
        yield writer


# The layout of ImageNet-C


def _write_folders(
    source: LabelledImages,
    out: Path,
    settings: ExportSettings,
    manifest: _Manifest,
    progress: Progress,
    image_format: ImageFormat,
    workers: int,
) -> None:
    """Write every missing image file; each batch is decoded once for all corruptions and severities."""
    names = _name_images(source, image_format)
    known, severities = frozenset(names), {str(severity) for severity in settings.severities}

    def is_made(path: str) -> bool:
        corruption, severity, name = (*path.split("/", 2), "", "")[:3]
        of_export = corruption in manifest.corruptions and severity in severities and name in known
        return path in (MANIFEST, SUMS) or of_export

    _remove_temporaries(out, is_made)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for images, index in _iterate_clean(source, workers):
            for corruption in settings.corruptions:
                for severity in settings.severities:
                    paths = [f"{corruption}/{severity}/{names[place]}" for place in index.tolist()]
                    if not all(pool.map(manifest.holds, paths)):
                        pixels = settings.apply(images, corruption, severity, index)
                        digests = pool.map(_write_image, [out / path for path in paths], pixels)
                        manifest.add(dict(zip(paths, digests, strict=True)))
                    progress(corruption, len(paths))
    manifest.close(settings.corruptions, list_files=False)


def _name_images(source: LabelledImages, image_format: ImageFormat) -> list[str]:
    """Return class/image for each image: the names of a folder are kept, others are numbered."""
    suffix = ".JPEG" if image_format == "jpeg" else ".png"
    if isinstance(source, ImageFolder):
        names = [str(PurePath(source.path(place)).with_suffix(suffix)) for place in range(len(source))]
        if len(set(names)) != len(names):
            raise ValueError(
                f"{source.root} has pictures whose names differ in their suffix only; rename them"
            )
        return names
    classes = name_class_folders(source)
    digits = len(str(len(source) - 1))
    return [
        f"{classes[label]}/{place:0{digits}d}{suffix}" for place, label in enumerate(source.labels.tolist())
    ]


def name_class_folders(source: LabelledImages) -> list[str]:
    """Return the name of a folder for each class; their sorted order is the order of the labels."""
    count = int(source.labels.max()) + 1
    names = [name.replace("/", "-") for name in source.classes or ()] or [""] * count
    if names[0] and names == sorted(set(names)):
        return names
    digits = len(str(len(names) - 1))
    return [f"{number:0{digits}d}-{name}".rstrip("-") for number, name in enumerate(names)]


def _write_image(path: Path, pixels: npt.NDArray[np.uint8]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    if path.suffix == ".png":
        image.save(buffer, "png")
    else:
        image.save(buffer, "jpeg", quality=_JPEG_QUALITY, optimize=True)
    with open_atomic(path, sync=False) as file:
        file.write(buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


# Records and the lock of the folder


class _Manifest:
    """The settings and the finished files of an export, whose folder the caller has locked.

    Args:
        folder: Folder of the export: empty, or of an earlier run.
        settings: Everything that the result depends on. A folder with other settings is refused, but corruptions may
            be added.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = json.loads(json.dumps(settings))
        self._finished: set[str] = set()
        self._compare()
        self._sums = _read_sums(folder / SUMS)
        self._write_manifest()  # first, because a folder with other files but without a manifest is refused
        self._write_sums()  # without the line that a kill may have cut off

    @property
    def corruptions(self) -> frozenset[str]:
        """Names of the corruptions of this run and of earlier ones."""
        return frozenset(self._settings["corruptions"])

    def holds(self, name: str) -> bool:
        """Whether a file is finished and unchanged."""
        path = self._folder / name
        return name in self._sums and path.is_file() and hash_file(path) == self._sums[name]

    def add(self, sums: Mapping[str, str]) -> None:
        """Record finished files."""
        self._sums |= sums
        with (self._folder / SUMS).open("a", encoding="utf-8") as file:
            file.writelines(f"{digest}  {name}\n" for name, digest in sums.items())
            file.flush()
            os.fsync(file.fileno())

    def close(self, corruptions: Iterable[str], *, list_files: bool) -> None:
        """Record that corruptions are finished.

        Args:
            corruptions: Corruptions of this run.
            list_files: Put the checksum of every file into the manifest; otherwise that of `SHA256SUMS`.
        """
        self._finished |= set(corruptions)
        self._write_sums()
        files = self._sums if list_files else {SUMS: hash_file(self._folder / SUMS)}
        self._write_manifest(files=dict(sorted(files.items())))

    def _compare(self) -> None:
        path = self._folder / MANIFEST
        if not path.is_file():
            self._refuse_other_files()
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            made, finished = dict(found["corruptions"]), set(found["finished"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged or not of an export ({error!r}); choose another folder"
            ) from error
        for key, value in self._settings.items():
            if key != "corruptions" and found.get(key) != value:
                raise ValueError(
                    f"{self._folder} holds another export: its {key} differs; choose another folder or delete this one"
                )
        self._settings["corruptions"] |= made
        self._finished = finished

    def _refuse_other_files(self) -> None:
        """Raise an error if there is a file that no export made: it might be overwritten."""
        for entry in sorted(self._folder.iterdir()):
            match = _TEMPORARY.fullmatch(entry.name)
            if entry.name != LOCK and not (match and match[1] == MANIFEST):
                raise ValueError(
                    f"{self._folder} is not empty (it has {entry.name}) and has no {MANIFEST} of an earlier run; "
                    "choose a new or an empty folder"
                )

    def _write_sums(self) -> None:
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(self._sums.items()))
        with open_atomic(self._folder / SUMS) as file:
            file.write(lines.encode())

    def _write_manifest(self, **more: Any) -> None:
        with open_atomic(self._folder / MANIFEST) as file:
            content = {**self._settings, "finished": sorted(self._finished), **more}
            file.write(json.dumps(content, indent=2).encode() + b"\n")


def _read_sums(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n") and line[64:66] == "  "]
    return {line[66:-1]: line[:64] for line in whole}


def _remove_temporaries(folder: Path, is_made: Callable[[str], bool]) -> None:
    """Delete the unfinished files of killed runs; the caller holds the lock.

    Args:
        folder: Folder of the export; folders below it are searched too.
        is_made: Whether the export makes a file of this path, relative to the folder and with slashes.
    """
    for place, _, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        for name in names:
            match = _TEMPORARY.fullmatch(name)
            if match is not None and is_made((below / match[1]).as_posix()):
                Path(place, name).unlink()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other exports out of a folder, which is made if needed.

    The system releases the lock when the process ends in any way, so a killed run blocks nobody. Windows has no such
    lock; there, other exports are not kept out.

    Raises:
        BlockingIOError: Another run holds the folder.
        NotADirectoryError: There is a file in place of the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"the result goes into a folder, but {error.filename} is a file or lies below one; choose another name"
        ) from error
    if sys.platform == "win32":
        yield
        return
    file = _acquire_lock(folder)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened it in the meantime sees in `_acquire_lock` that it is gone.
        (folder / LOCK).unlink(missing_ok=True)
        os.close(file)


def _acquire_lock(folder: Path) -> int:
    import fcntl

    path = folder / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError as error:
            os.close(file)
            raise BlockingIOError(
                f"another run is writing to {folder}; wait for it, or choose another folder"
            ) from error
        except OSError:
            os.close(file)
            raise
        os.close(file)
