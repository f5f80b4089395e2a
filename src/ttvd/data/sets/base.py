"""The value that every loader returns: labelled images in memory, and what a set on disk has in common with it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
        """Images as floats (b, c, h, w) in [0, 1]."""

    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 which identifies the images and labels."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images in memory, one byte for each value.

    It is a map-style data set too: item i is (float image in [0, 1], label).

    Attributes:
        images: uint8 (n, c, h, w).
        labels: int64 (n,).
        classes: Names of the classes, where known; label i stands for `classes[i]`.
        name: For records and manifests.

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
        return self.images[position].float().div_(255), int(self.labels[position])

    def floats(self, index: Index | None = None) -> Tensor:
        """Return images, all of them unless an index is given, as float32 (b, c, h, w) in [0, 1]."""
        return self.images[_to_rows(index)].float().div_(255)

    def subset(self, index: Index) -> ImageSet:
        """Return the images of an index, in its order."""
        rows = _to_rows(index)
        return ImageSet(self.images[rows], self.labels[rows], self.classes, self.name)

    def fingerprint(self) -> str:
        """Return the SHA-256 of shape, pixels and labels."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        digest.update(self.images.cpu().contiguous().numpy().data)
        digest.update(self.labels.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def _to_rows(index: Index | None) -> slice | Tensor:
    if index is None:
        return slice(None)
    return index if isinstance(index, slice | Tensor) else torch.as_tensor(index, dtype=torch.int64)
