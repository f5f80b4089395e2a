"""Folders of pictures: one folder for each class, as in ImageNet, ImageNet-C and ImageNet-R.

Pictures are decoded when they are asked for and never kept, so that memory does not grow with the set.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttvd.data.sets.imageset import Index

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
        self.name = name or self.root.name
        self.classes: tuple[str, ...] = tuple(classes) if classes is not None else _list_classes(self.root)
        found = [_list_pictures(self.root, label) for label in self.classes]
        # One array instead of a list of strings: worker processes would copy the pages of a list as they touch it.
        self._paths = np.array([os.fsencode(path) for paths in found for path in paths], np.bytes_)
        self.labels = torch.repeat_interleave(torch.tensor([len(paths) for paths in found]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        image = read_image(self.root / self.path(position), self.resize, self.crop)
        return image, int(self.labels[position])

    def path(self, position: int) -> str:
        """Return the path of a picture, relative to the root."""
        return os.fsdecode(self._paths[position])

    def floats(self, index: Index | None = None) -> Tensor:
        """Decode pictures, all of them unless an index is given, into float32 (b, 3, h, w) in [0, 1]."""
        rows = torch.arange(len(self))[slice(None) if index is None else index].tolist()
        return torch.stack([self[row][0] for row in rows])

    def subset(self, index: Index) -> ImageFolder:
        """Return the pictures of an index, in its order, with the same classes."""
        part = object.__new__(ImageFolder)
        rows = torch.arange(len(self))[index]
        part.__dict__.update(self.__dict__, _paths=self._paths[rows.numpy()], labels=self.labels[rows])
        return part

    def fingerprint(self) -> str:
        """Return the SHA-256 of paths, sizes of the files, labels and preparation; the pictures are not read."""
        digest = hashlib.sha256(repr((self.resize, self.crop, self.classes)).encode())
        for path, label in zip(self._paths, self.labels.tolist(), strict=True):
            size = (self.root / os.fsdecode(path)).stat().st_size
            digest.update(b"%b %d %d\n" % (path, size, label))
        return digest.hexdigest()


def read_image(path: str | Path, resize: int | None = 256, crop: int | None = 224) -> Tensor:
    """Decode a picture into a float32 (3, h, w) tensor in [0, 1].

    The shorter side is resized bilinearly, then the centre is cut out: the preparation behind published accuracies.

    Raises:
        OSError: There is no such file.
        ValueError: The file is truncated or no picture, or the picture is smaller than the crop.
    """
    from PIL import Image

    with open(path, "rb") as file:
        try:
            with Image.open(file) as picture:
                pixels = _prepare(picture.convert("RGB"), resize, crop)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be used as a picture: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div_(255)


def _prepare(picture: Any, resize: int | None, crop: int | None) -> Any:
    from PIL import Image

    width, height = picture.size
    if resize is not None and min(width, height) != resize:
        short = min(width, height)
        size = (resize * width // short, resize * height // short)
        picture = picture.resize(size, Image.Resampling.BILINEAR)
        width, height = size
    if crop is not None and (width, height) != (crop, crop):
        if min(width, height) < crop:
            raise ValueError(f"it has {width} x {height} pixels, too few for a crop of {crop}; resize first")
        left, top = round((width - crop) / 2), round((height - crop) / 2)
        picture = picture.crop((left, top, left + crop, top + crop))
    return np.array(picture)


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
        for folder, _, files in sorted(os.walk(root / label, followlinks=True))
        for file in sorted(files)
        if os.path.splitext(file)[1].lower() in SUFFIXES
    ]
    if not paths:
        raise ValueError(f"the class folder {root / label} has no pictures ({', '.join(sorted(SUFFIXES))})")
    return paths
