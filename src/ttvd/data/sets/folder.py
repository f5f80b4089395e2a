"""Folders of image files with one folder for each class: ImageNet, ImageNet-C, ImageNet-R and others.

Images are decoded when they are asked for and never kept, so the memory does not grow with the set.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ttvd.data.decoding import MAX_PIXELS
from ttvd.data.loading import (
    SUFFIXES,
    ImageFiles,
    Interpolation,
    Preparation,
    Skipped,
    list_image_files,
    read_pixels,
    read_size,
    stack_images,
    to_floats,
)
from ttvd.data.sets.base import Index

CLASS_LISTS = ("classes.txt", "synset_words.txt", "synsets.txt", "LOC_synset_mapping.txt")
"""Files with one class a line, in the order of a model's outputs; the last is in Kaggle's edition of ImageNet."""
_TRAINING, _TESTING = ("train",), ("val", "validation", "test")
_CORRUPTED, _RENDERED = "ImageNet-C", "imagenet-r"
_ARCHIVES = ("", "noise", "blur", "weather", "digital", "extra")
"""Folders that the archives of ImageNet-C may have been unpacked into."""


class ImageFolder:
    """Image files in class folders, as a map-style data set: item i is (float image in [0, 1], label).

    Classes are the names of the folders in sorted order. Images come in torchvision's order, folder by folder.

    Args:
        root: Folder that holds one folder for each class.
        resize: Length of the shorter side before cropping; None for no resizing.
        crop: Side of the square that is cut from the centre; None for no cropping.
        name: Name of the set in records; the name of the folder by default.
        classes: Names of the class folders in the order of their labels; all folders, sorted, by default.
        apply_orientation: Turn images upright as their EXIF data say. By default they are ignored, as torchvision and
            timm ignore them, so that published accuracies are met.
        max_pixels: Limit on the pixels of an image, before and after resizing.

    Attributes:
        interpolation: Interpolation of the resizing; bilinear until :meth:`prepared` changes it.
        skipped: What was left out, for each reason; `ttvd.data.loading.describe_skipped` puts it into words.

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
        apply_orientation: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.root = Path(root)
        self.resize = resize
        self.crop = crop
        self.apply_orientation = apply_orientation
        self.max_pixels = max_pixels
        self.interpolation: Interpolation = "bilinear"
        self.name = name or self.root.name
        self.classes: tuple[str, ...] = tuple(classes) if classes is not None else _list_classes(self.root)
        self.skipped: Skipped = {}
        found = [self._list_class(label) for label in self.classes]
        # One array instead of a list of strings: processes that share a list copy its pages as they touch them.
        self._paths = np.array([os.fsencode(path) for paths in found for path in paths], np.bytes_)
        self.labels = torch.repeat_interleave(torch.tensor([len(paths) for paths in found]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return to_floats(self.pixels(position)), int(self.labels[position])

    def path(self, position: int) -> str:
        """Return the path of an image, relative to the root."""
        return os.fsdecode(self._paths[position])

    def pixels(self, position: int) -> Tensor:
        """Decode an image into (3, h, w): uint8, or float32 in [0, 1] if it is gray with more than 8 bits."""
        return read_pixels(
            self.root / self.path(position),
            self.resize,
            self.crop,
            self.interpolation,
            apply_orientation=self.apply_orientation,
            max_pixels=self.max_pixels,
        )

    def floats(self, index: Index | None = None) -> Tensor:
        """Decode the images of an index, all by default, into float32 (b, 3, h, w) in [0, 1]."""
        rows = torch.arange(len(self))[slice(None) if index is None else index].tolist()
        # Bytes until all are read: a quarter of the memory, and one conversion instead of one for each image.
        return to_floats(stack_images([self.pixels(row) for row in rows]))

    def subset(self, index: Index) -> ImageFolder:
        """Return the images of an index, in the order of the index, with the same classes."""
        part = object.__new__(ImageFolder)
        rows = torch.arange(len(self))[index]
        part.__dict__.update(self.__dict__, _paths=self._paths[rows.numpy()], labels=self.labels[rows])
        return part

    def prepared(
        self, resize: int | None, crop: int | None, *, interpolation: Interpolation = "bilinear"
    ) -> ImageFolder:
        """Return the same images with another preparation; `**how._asdict()` passes a `Preparation`."""
        other = object.__new__(ImageFolder)
        other.__dict__.update(self.__dict__, **Preparation(resize, crop, interpolation)._asdict())
        return other

    def check_size(self) -> None:
        """Raise an error unless all images have one size; without a crop, the header of every file is read."""
        if self.crop is not None:
            return
        first = self._read_size(0)
        for place in range(1, len(self)):
            size = self._read_size(place)
            if size != first:
                raise ValueError(
                    f"{self.root} has images of different sizes ({self.path(0)}: {first[0]} x {first[1]}, "
                    f"{self.path(place)}: {size[0]} x {size[1]}); give a crop and, if they are small, a resize, "
                    "such as --resize 256 --crop 224"
                )

    def fingerprint(self) -> str:
        """Return the SHA-256 of the paths, file sizes, labels and the preparation; the images are not read."""
        # What is usual is not part of it, so that rows from before there was a choice stay valid.
        how: tuple[object, ...] = (self.resize, self.crop, self.classes)
        how += () if self.interpolation == "bilinear" else (self.interpolation,)
        how += ("apply_orientation",) if self.apply_orientation else ()
        digest = hashlib.sha256(repr(how).encode())
        for path, label in zip(self._paths, self.labels.tolist(), strict=True):
            size = (self.root / os.fsdecode(path)).stat().st_size
            digest.update(b"%b %d %d\n" % (path, size, label))
        return digest.hexdigest()

    def _read_size(self, position: int) -> tuple[int, int]:
        return read_size(
            self.root / self.path(position),
            self.resize,
            apply_orientation=self.apply_orientation,
            max_pixels=self.max_pixels,
        )

    def _list_class(self, label: str) -> list[str]:
        folder = self.root / label
        found = list_image_files(folder) if folder.is_dir() else ImageFiles([], {})
        for reason, paths in found.skipped.items():
            self.skipped.setdefault(reason, []).extend(os.path.join(label, path) for path in paths)
        if not found.paths:
            raise ValueError(f"the class folder {folder} has no pictures ({', '.join(sorted(SUFFIXES))})")
        return [os.path.join(label, path) for path in found.paths]


@dataclass(frozen=True)
class ClassMap:
    """The output of a model that stands for each class of a set, such as ImageNet-R's 200 among ImageNet's 1,000.

    Attributes:
        columns: The model's output for each class of the set.
        outputs: Number of outputs of the model.

    Example:
        >>> classes = ClassMap.match(("n02", "n03"), ("n01", "n02", "n03"))
        >>> classes.columns
        (1, 2)
        >>> classes.restrict(torch.tensor([[5.0, 1.0, 2.0]]))
        tensor([[1., 2.]])
    """

    columns: tuple[int, ...]
    outputs: int

    @classmethod
    def match(cls, classes: Sequence[str], all_classes: Sequence[str]) -> ClassMap:
        """Find each class of a set, by its identifier, among all classes of a model in the order of its outputs.

        Args:
            classes: Classes of the set, such as the WordNet identifiers that name the folders of ImageNet-R.
            all_classes: Classes of the model: the sorted folders of ImageNet, or `read_synsets` of a file.
        """
        place = {name: column for column, name in enumerate(all_classes)}
        if len(place) != len(all_classes):
            raise ValueError("the model's classes must be distinct")
        missing = [name for name in classes if name not in place]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(classes)} classes are unknown to the model, the first is {missing[0]!r}; "
                "both sides must use the same identifiers, such as n01443537"
            )
        return cls(tuple(place[name] for name in classes), len(all_classes))

    def restrict(self, logits: Tensor) -> Tensor:
        """Keep the outputs (b, k) of the set's classes, in the order of its labels."""
        if logits.shape[-1] != self.outputs:
            raise ValueError(f"logits must have {self.outputs} columns, got {logits.shape[-1]}")
        return logits[..., torch.tensor(self.columns, device=logits.device)]

    def to_outputs(self, labels: Tensor) -> Tensor:
        """Turn labels of the set into the model's output numbers."""
        return torch.tensor(self.columns, device=labels.device)[labels]


def read_synsets(path: str | Path) -> tuple[str, ...]:
    """Read class identifiers in the order of a model's outputs from a text file or from a folder of class folders.

    Args:
        path: A file with one class a line, of which the first word counts, as in `synset_words.txt`; or the folder of
            ImageNet's images, whose sorted class folders give the usual order.
    """
    path = Path(path)
    if path.is_dir():
        return _list_folders(path)
    words = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(word[0] for word in words if word)


def load_imagenet(root: str | Path, split: str = "test") -> ImageFolder:
    """Load the images of `root/train` or `root/val`; without such folders, `root` itself holds the classes.

    Raises:
        FileNotFoundError: The folder is missing, while other parts of ImageNet exist.
    """
    root, places = Path(root), _TRAINING if split == "train" else _TESTING
    found = [root / place for place in places if (root / place).is_dir()]
    if not found:
        _refuse_parts(root, (*_TRAINING, *_TESTING, _CORRUPTED), [root / place for place in places])
    return ImageFolder(found[0] if found else root, name="imagenet")


def load_imagenet_c(root: str | Path, corruption: str, severity: int) -> ImageFolder:
    """Load the released images of one corruption; its folder may lie in the folder of its archive."""
    root = Path(root)
    home = root / _CORRUPTED if (root / _CORRUPTED).is_dir() else root
    folders = [home / archive / corruption / str(severity) for archive in _ARCHIVES]
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    # The released images are 224 x 224 already: resizing would blur them.
    return ImageFolder(folder, resize=None, name="imagenet-c")


def load_imagenet_r(root: str | Path) -> ImageFolder:
    """Load ImageNet-R, whose classes are some of ImageNet's; see :func:`find_classes`."""
    inner = Path(root) / _RENDERED
    if not inner.is_dir():
        _refuse_parts(Path(root), (*_TRAINING, *_TESTING, _CORRUPTED), [inner])
    return ImageFolder(inner if inner.is_dir() else root, name="imagenet-r")


def find_classes(root: str | Path) -> tuple[str, ...]:
    """Find the classes of ImageNet in the order of a model's outputs: in one of `CLASS_LISTS`, or as class folders.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = Path(root, "classes.txt").write_text("n01440764 tench\\nn01443537 goldfish\\n")
        ...     find_classes(root)
        ('n01440764', 'n01443537')

    Raises:
        FileNotFoundError: There is neither such a file nor a folder of classes.
    """
    root = Path(root)
    places = [root / name for name in CLASS_LISTS if (root / name).is_file()]
    places += [root / name for name in (*_TRAINING, *_TESTING) if (root / name).is_dir()]
    for place in places:
        if classes := read_synsets(place):  # a flat folder of images has none
            return classes
    raise FileNotFoundError(
        f"the classes of ImageNet in the order of the model's outputs are not in {root}: neither as folders of train "
        f"or val, nor in a file {' or '.join(CLASS_LISTS)} with one identifier, such as n01440764, a line"
    )


def _list_classes(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    classes = _list_folders(root)
    if not classes:
        raise ValueError(
            f"{root} has no class folders; expected ROOT/class/picture. ImageNet's validation images come in one "
            "folder and must be sorted into class folders first"
        )
    return classes


def _list_folders(root: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."))


def _refuse_parts(root: Path, parts: tuple[str, ...], wanted: list[Path]) -> None:
    """Raise an error if the parts of ImageNet would be taken for classes."""
    if there := [name for name in parts if (root / name).is_dir()]:
        raise FileNotFoundError(
            f"{root} has a folder {there[0]}, so its folders are no classes, and there is no "
            f"{' or '.join(str(folder) for folder in wanted)} with a folder for each class"
        )
