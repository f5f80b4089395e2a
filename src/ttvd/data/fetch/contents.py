"""What the folders of the official archives hold, by which one that came another way is known.

Sizes of files follow from the published shapes, numbers of pictures from the descriptions of the sets; the names are
those of the archives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ttvd.data.corruptions import CORRUPTIONS, EXTRA

_CORRUPTIONS = (*CORRUPTIONS, *EXTRA)
_MNIST_CORRUPTIONS = """
identity brightness canny_edges dotted_line fog glass_blur impulse_noise motion_blur rotate scale shear shot_noise
spatter stripe translate zigzag
"""
_CIFAR10_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_CIFAR_C = {"labels.npy": 50_000} | {f"{name}.npy": 50_000 * 32 * 32 * 3 for name in _CORRUPTIONS}
_MNIST_FILES = {
    f"{split}_{kind}.npy": count * each
    for split, count in (("train", 60_000), ("test", 10_000))
    for kind, each in (("images", 28 * 28), ("labels", 1))
}

SIZES: Final[dict[str, Mapping[str, int]]] = {
    "cifar-10-batches-bin": {f"{name}.bin": 10_000 * 3073 for name in _CIFAR10_BATCHES},
    "cifar-100-binary": {"train.bin": 50_000 * 3074, "test.bin": 10_000 * 3074},
    "CIFAR-10-C": _CIFAR_C,
    "CIFAR-100-C": _CIFAR_C,
    "mnist_c": {
        f"{name}/{file}": size for name in _MNIST_CORRUPTIONS.split() for file, size in _MNIST_FILES.items()
    },
}
"""Bytes of each file of a folder; those of .npy files without their header, for labels of one byte."""

COUNTS: Final[dict[str, Mapping[str, int]]] = {
    "imagenet-r": {"n*/*.jpg": 30_000},
    **{name: {f"{severity}/n*/*.JPEG": 50_000 for severity in range(1, 6)} for name in _CORRUPTIONS},
}
"""Numbers of pictures of each pattern in a folder."""
