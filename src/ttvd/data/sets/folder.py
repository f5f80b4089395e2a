"""Folders of pictures: one folder for each class, as in ImageNet, ImageNet-C and ImageNet-R.

Pictures are decoded when they are asked for and never kept, so that memory does not grow with the set.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ttvd.data.sets.imageset import Index
from ttvd.data.sets.pictures import Interpolation, Preparation, read_pixels, read_size
from ttvd.data.sets.pictures import read_image as read_image

SUFFIXES = frozenset((".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))


class ImageFolder:
    """Pictures in class folders, as a map-style data set: item i is (float image in [0, 1], label).

    Classes are the names of the folders in sorted order; pictures come in torchvision's order, folder by folder.

    Args:
        root: Holds one folder for each class.
        resize: Length of the shorter side before cropping; None for no resizing.
        crop: Side of the square cut from the centre; None for no cropping.
        name: For records; the name of the folder unless given.
        classes: Names of folders in the order of their labels, sorted folders unless given.

    Attributes:
        interpolation: Of the resizing, bilinear until :meth:`prepared` says otherwise.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Path(root, "cat").mkdir()
        ...     Image.new("RGB", (300, 260)).save(Path(root, "cat", "0.png"))
        ...     image, label = ImageFolder(root)[0]
        >>> image.shape, label
        (torch.Size([3, 224, 224]), 0)
    """

    def __init__(
        self,
        root: str | Path,
        resize: int | None = 256,
        crop: int | None = 224,
        *,
        name: str | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.root = Path(root)
        self.resize = resize
        self.crop = crop
        self.interpolation: Interpolation = "bilinear"
        self.name = name or self.root.name
        self.classes: tuple[str, ...] = tuple(classes) if classes is not None else _list_classes(self.root)
        found = [_list_pictures(self.root, label) for label in self.classes]
        # One array instead of a list of strings: worker processes would copy the pages of a list as they touch it.
        self._paths = np.array([os.fsencode(path) for paths in found for path in paths], np.bytes_)
        self.labels = torch.repeat_interleave(torch.tensor([len(paths) for paths in found]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return self.pixels(position).float().div_(255), int(self.labels[position])

    def path(self, position: int) -> str:
        """Return the path of a picture, relative to the root."""
        return os.fsdecode(self._paths[position])

    def pixels(self, position: int) -> Tensor:
        """Decode a picture into bytes (3, h, w)."""
        return read_pixels(self.root / self.path(position), self.resize, self.crop, self.interpolation)

    def floats(self, index: Index | None = None) -> Tensor:
        """Decode pictures, all of them unless an index is given, into float32 (b, 3, h, w) in [0, 1]."""
        rows = torch.arange(len(self))[slice(None) if index is None else index].tolist()
        # Bytes until all are there: a fourth of the memory, and one conversion instead of one for each.
        return torch.stack([self.pixels(row) for row in rows]).float().div_(255)

    def subset(self, index: Index) -> ImageFolder:
        """Return the pictures of an index, in its order, with the same classes."""
        part = object.__new__(ImageFolder)
        rows = torch.arange(len(self))[index]
        part.__dict__.update(self.__dict__, _paths=self._paths[rows.numpy()], labels=self.labels[rows])
        return part

    def prepared(
        self, resize: int | None, crop: int | None, *, interpolation: Interpolation = "bilinear"
    ) -> ImageFolder:
        """Return the same pictures with another preparation; `**how._asdict()` passes a `Preparation` on."""
        other = object.__new__(ImageFolder)
        other.__dict__.update(self.__dict__, **Preparation(resize, crop, interpolation)._asdict())
        return other

    def check_size(self) -> None:
        """Raise unless all images have one size; without a crop, the header of every picture is read."""
        if self.crop is not None:
            return
        first = read_size(self.root / self.path(0), self.resize)
        for place in range(1, len(self)):
            size = read_size(self.root / self.path(place), self.resize)
            if size != first:
                raise ValueError(
                    f"{self.root} has images of different sizes ({self.path(0)}: {first[0]} x {first[1]}, "
                    f"{self.path(place)}: {size[0]} x {size[1]}); give a crop and, if they are small, a resize, "
                    "such as --resize 256 --crop 224"
                )

    def fingerprint(self) -> str:
        """Return the SHA-256 of paths, sizes of the files, labels and preparation; the pictures are not read."""
        # The usual interpolation is not named, so that stores from before there was a choice stay valid.
        how = (self.resize, self.crop, self.classes)
        digest = hashlib.sha256(
            repr(how if self.interpolation == "bilinear" else (*how, self.interpolation)).encode()
        )
        for path, label in zip(self._paths, self.labels.tolist(), strict=True):
            size = (self.root / os.fsdecode(path)).stat().st_size
            digest.update(b"%b %d %d\n" % (path, size, label))
        return digest.hexdigest()


def _list_classes(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    classes = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."))
    if not classes:
        raise ValueError(
            f"{root} has no class folders; expected ROOT/class/picture. ImageNet's validation pictures come flat and "
            "have to be sorted into class folders first"
        )
    return classes


def _list_pictures(root: Path, label: str) -> list[str]:
    paths = [
        os.path.relpath(os.path.join(folder, file), root)
        for folder, files in sorted(_walk(root / label))
        for file in sorted(files)
        if os.path.splitext(file)[1].lower() in SUFFIXES
    ]
    if not paths:
        raise ValueError(f"the class folder {root / label} has no pictures ({', '.join(sorted(SUFFIXES))})")
    return paths


def _walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield folders and their files; links are followed, but no folder is entered twice, nor one above `top`."""
    home = top.resolve()
    visited = {str(home), *map(str, home.parents)}
    for folder, below, files in os.walk(top, followlinks=True):
        yield folder, files
        inner = sorted((os.path.islink(path := os.path.join(folder, name)), name, path) for name in below)
        below.clear()
        for _, name, path in inner:  # of a folder and a link to it, the folder is taken
            if (real := os.path.realpath(path)) not in visited:
                visited.add(real)
                below.append(name)
