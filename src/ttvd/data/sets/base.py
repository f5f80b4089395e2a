"""Labelled images in memory, and the interface that they share with image folders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from ttvd.data.loading import to_floats

Split = Literal["train", "test"]
Index = Sequence[int] | slice | Tensor


class LabelledImages(Protocol):
    """Labelled images, in memory (`ImageSet`) or on disk (`ImageFolder`)."""

    @property
    def name(self) -> str:
        """Name for records and manifests."""

    @property
    def labels(self) -> Tensor:
        """Labels int64 (n,)."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes."""

    def floats(self, index: Index | None = None) -> Tensor:
        """Return images as float32 (b, c, h, w) in [0, 1]."""

    def fingerprint(self) -> str:
        """Return a hexadecimal SHA-256 that identifies the images and labels."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images in memory, one byte for each value.

    An image set is also a map-style data set: item i is (float image in [0, 1], label).

    Attributes:
        images: uint8 (n, c, h, w).
        labels: int64 (n,).
        classes: Names of the classes, where they are known; label i stands for `classes[i]`.
        name: Name of the set in records and manifests.

    Example:
        >>> images = ImageSet(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8), torch.tensor([0, 1]))
        >>> images.floats([1]).max()
        tensor(1.)
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...] | None = None
    name: str = "images"

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                f"{self.name}: images must be uint8 (n, c, h, w), got {images.dtype} {tuple(images.shape)}; "
                "ttvd.data.sets.from_arrays converts other forms"
            )
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise ValueError(
                f"{self.name}: labels must be int64 (n,), got {labels.dtype} {tuple(labels.shape)}"
            )
        if len(images) != len(labels):
            raise ValueError(
                f"{self.name}: {len(images)} images but {len(labels)} labels; "
                "they do not belong together or a file is truncated"
            )
        self._check_range()

    def _check_range(self) -> None:
        if len(self.labels) == 0:
            raise ValueError(f"{self.name}: there are no images")
        low, high = (int(bound) for bound in torch.aminmax(self.labels))
        if low < 0 or (self.classes is not None and high >= len(self.classes)):
            limit = "" if self.classes is None else f" to {len(self.classes) - 1}"
            raise ValueError(f"{self.name}: labels must be from 0{limit}, got values from {low} to {high}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return to_floats(self.pixels(position)), int(self.labels[position])

    def pixels(self, position: int) -> Tensor:
        """Return one image as uint8 (c, h, w)."""
        return self.images[position]

    def floats(self, index: Index | None = None) -> Tensor:
        """Return the images of an index, all by default, as float32 (b, c, h, w) in [0, 1]."""
        return to_floats(self.images[_to_rows(index)])

    def subset(self, index: Index) -> ImageSet:
        """Return the images of an index, in the order of the index."""
        rows = _to_rows(index)
        return ImageSet(self.images[rows], self.labels[rows], self.classes, self.name)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the shape, the pixels and the labels."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        digest.update(self.images.cpu().contiguous().numpy().data)
        digest.update(self.labels.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def _to_rows(index: Index | None) -> slice | Tensor:
    if index is None:
        return slice(None)
    return index if isinstance(index, slice | Tensor) else torch.as_tensor(index, dtype=torch.int64)


def find_folder(root: str | Path, places: Mapping[str, Sequence[str]], hint: str) -> Path:
    """Return the first folder that holds a set: one of the places below `root`, or `root` itself.

    Args:
        root: Folder that the user named.
        places: Relative folders where the set may be, each with the names of its files.
        hint: Command that downloads the set.

    Raises:
        FileNotFoundError: No folder has all files of the set.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}; `{hint}` makes it")
    partial: list[str] = []
    for place, names in places.items():
        for folder in (root / place, root):
            missing = [name for name in names if not (folder / name).is_file()]
            if not missing:
                return folder
            if len(missing) < len(names):
                partial.append(f"{folder} lacks {', '.join(missing[:3])}")
    tried = " or ".join(str(root / place) for place in places)
    reason = f" ({partial[0]})" if partial else ""
    raise FileNotFoundError(f"the set is not in {tried}{reason}; `{hint}` gets it")
