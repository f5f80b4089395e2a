"""Sites and calibration in one call, with checks of what users bring: model, images, labels and their ranges."""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ttvd.data.sets import ImageFolder, ImageSet
from ttvd.nn.normalize import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    CIFAR100_MEAN,
    CIFAR100_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalize,
)
from ttvd.nn.split import SplitModel, evaluating, split
from ttvd.nn.views import TURNS, rotate
from ttvd.source.calibration import calibrate
from ttvd.source.features import (
    Batch,
    Data,
    check_images,
    check_labels,
    find_labels,
    iterate_batches,
    to_unit,
)
from ttvd.source.sites import estimate_sites, infer_classes
from ttvd.zoo.sites import Sites

_LOG = logging.getLogger(__name__)
_TRIAL = 512  # images on which the model is tried before any work
_RESERVED = 5  # one image in five is kept for calibration
_RESERVED_LIMIT = 2_000  # images of an iterable that are kept in memory
_GOOD = 0.9  # a model that is right so often gets its images as it expects them
_GAIN = 0.1  # of accuracy, that another normalisation must bring

Start = Callable[[str, int | None], Callable[[int], None]]


def prepare(
    model: nn.Module,
    data: Data,
    held_out: Data | None = None,
    *,
    num_classes: int | None = None,
    views: int = 4,
    fraction: float = 1.0,
    trained_on: bool | None = None,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool | None = None,
) -> Sites:
    """Make the sites of a classifier, calibrated and ready for ``ttvd.TTVD(model, sites)``.

    First the model is tried on a few images. Then the sites are estimated from ``data`` (:func:`estimate_sites`) and
    calibrated on ``held_out`` (:func:`calibrate`). The model is not changed.

    Args:
        model: A classifier of images in [0, 1] that ends in a linear layer, or a ``SplitModel`` (``ttvd.split``).
        data: Labelled source images, such as training images: a pair ``(images, labels)`` of tensors, a map-style
            dataset, or an iterable of batches such as a ``DataLoader``. Images are uint8 or floating point in [0, 1],
            as the model sees them in use, without augmentation.
        held_out: Labelled source images that the model was not trained on. Unless given, one image in five of each
            class of ``data`` is used for calibration and not for the sites. (One image a class is used for both.)
        num_classes: Number of classes; found from labels and head unless given.
        views: Number of rotations of each image that get a site: 1, 2 or 4. Images that are not square have 1 or 2.
        fraction: Fraction of every class that the sites are estimated from; must be 1 for an iterable.
        trained_on: Whether the model was trained on the images of calibration; the temperatures are then made honest,
            as :func:`calibrate` says. Unless given, images of ``data`` count as trained on, and those of ``held_out``
            if 99 per cent or more are classified correctly, with a warning.
        seed: Seed of the choice of images.
        batch_size: Images per forward pass; each is forwarded ``views`` times.
        progress: Whether to show a progress bar and a summary (with rich). Unless given, they are shown on a terminal
            if rich is installed. The summary is also logged.

    Returns:
        Calibrated sites; ``accuracy`` is that of the images of calibration.

    Raises:
        ValueError: The accuracy is near chance, the head was not found, or images or labels do not fit the model. The
            message says what to write.

    Example:
        >>> images, labels = torch.eye(4).view(4, 1, 2, 2).repeat(9, 1, 1, 1), torch.arange(36) % 4
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4, bias=False))
        >>> net[1].weight = nn.Parameter(torch.eye(4))
        >>> prepare(net, (images, labels), views=1).accuracy
        1.0
    """
    (images, labels), data, held_out = _take_trial(data, held_out)
    parts = _find_parts(model, images)
    rotate(images[:1], views)  # refuses what is not square
    check_labels(labels, num_classes or parts.linear.out_features)
    known = find_labels(data)
    if known is not None:
        check_labels(known, num_classes or parts.linear.out_features)
        num_classes = num_classes or infer_classes(int(known.max()) + 1, parts)
    _check_accuracy(parts, images, labels, num_classes)
    kind = "held-out images"
    if held_out is None:
        kind = "images that the model may have been trained on"
        trained_on = True if trained_on is None else trained_on
        data, held_out = _reserve(data, known, seed)
    with _show(progress) as (start, say):
        sites = estimate_sites(
            *(parts, data),
            num_classes=num_classes,
            views=views,
            fraction=fraction,
            seed=seed,
            batch_size=batch_size,
            progress=start("sites", _count(data, fraction)),
        )
        sites = calibrate(
            *(parts, sites, held_out),
            batch_size=batch_size,
            trained_on=trained_on,
            progress=start("calibration", _count(held_out)),
        )
        summary = (
            f"{sites.num_classes} classes, {sites.dim} features, accuracy {sites.accuracy:.1%} on {kind}, "
            f"{sites.mirror_gain:+.1%} with mirrored ones"
        )
        _LOG.info(summary)
        say(summary)
    return sites


def _count(data: Data, fraction: float = 1.0) -> int | None:
    labels = find_labels(data)
    return None if labels is None else round(fraction * len(labels))


class _Part(Dataset[Any]):
    """Some samples of a map-style dataset, with their labels at hand."""

    def __init__(self, data: Any, rows: Tensor, labels: Tensor) -> None:
        self.labels, self._data, self._rows = labels[rows], data, rows.tolist()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._rows[index]]


def _take_trial(data: Data, held_out: Data | None) -> tuple[Batch, Data, Data | None]:
    """Return a batch to try the model on, and the data, still whole if they can be read only once."""
    if held_out is None:
        batch, data = _peek(_remember_labels(data))
        return batch, data, None
    batch, held_out = _peek(_remember_labels(held_out))
    return batch, _remember_labels(data), held_out


def _remember_labels(data: Data) -> Data:
    """Read the labels of a dataset once, if it has no list of them."""
    if not isinstance(data, Dataset) or isinstance(data, ImageSet | ImageFolder):
        return data
    labels = find_labels(data)
    return data if labels is None else _Part(data, torch.arange(len(labels)), labels)


def _peek(data: Data) -> tuple[Batch, Data]:
    """Return some images with labels, and the data, from which nothing is missing."""
    if (labels := find_labels(data)) is not None and len(labels):
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:_TRIAL]
        return next(iterate_batches(data, _TRIAL, indices=rows.sort().values)), data
    if labels is not None:
        raise ValueError("there are no images")
    if not isinstance(data, Iterable):
        raise ValueError(
            f"expected a pair (images, labels) of tensors, a Dataset or batches, got a {type(data).__name__}"
        )
    batches: Iterator[Any] = iter(data)
    found = next(batches, None)
    if found is None:
        raise ValueError("there are no images")
    if not isinstance(found, tuple | list) or [type(part) for part in found] != [Tensor, Tensor]:
        raise ValueError(
            f"expected batches (images, labels) of tensors, got a {type(found).__name__}. Write "
            "((batch['image'], batch['label']) for batch in loader), with the names of your batches"
        )
    first = found[0], found[1]
    return first, chain([first], batches) if batches is data else data


def _find_parts(model: nn.Module, images: Tensor) -> SplitModel:
    """Return features and head of a model, after a trial on images."""
    check_images(images)
    parts = split(model)
    like = next(parts.parameters())
    if like.dtype.itemsize < 4:
        raise ValueError(
            f"the weights are {like.dtype}, in which small steps round to nothing. Write model = model.float(), and "
            "later adapter.accelerate(precision='bfloat16') for speed"
        )
    example = to_unit(images[:4].to(like.device)).to(like.dtype)
    try:
        found = split(parts.model, example, head=parts.head_name if isinstance(model, SplitModel) else None)
    except RuntimeError as error:
        size = " x ".join(map(str, images.shape[1:]))
        raise ValueError(
            f"{type(parts.model).__name__} fails on images of {size} (channels x height x width): "
            f"{str(error).splitlines()[0]}. Give images of the size and with the channels that it was trained on; "
            "torch.nn.functional.interpolate(images, size=(h, w)) resizes them"
        ) from error
    if found.head_name != parts.head_name:
        raise ValueError(
            f"the head is {found.head_name!r}, which cannot be found without images later. Write model = "
            f"ttvd.split(model, head={found.head_name!r}), and give that to ttvd.prepare and ttvd.TTVD"
        )
    return parts


class _Candidate(NamedTuple):
    """A normalisation that models are often trained with."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    words: str


_CANDIDATES = (
    _Candidate(IMAGENET_MEAN, IMAGENET_STD, "images normalised by ImageNet's mean"),
    _Candidate(CIFAR10_MEAN, CIFAR10_STD, "images normalised by CIFAR-10's mean"),
    _Candidate(CIFAR100_MEAN, CIFAR100_STD, "images normalised by CIFAR-100's mean"),
    _Candidate((0.1307,), (0.3081,), "images normalised by MNIST's mean"),
    _Candidate((0.5,), (0.5,), "images in [-1, 1]"),
    _Candidate((0.0,), (1 / 255,), "images in [0, 255]"),
)


def _check_accuracy(parts: SplitModel, images: Tensor, labels: Tensor, num_classes: int | None) -> None:
    """Raise a ValueError if the model classifies images about as well as chance, or far better if normalised."""
    outputs, channels = parts.linear.out_features, images.shape[1]
    count, classes = len(labels), num_classes or outputs
    own = _measure_accuracy(parts, images, labels, num_classes)
    if own >= _GOOD:
        return
    tried = []
    for mean, std, words in _CANDIDATES:
        if len(mean) in (1, channels):
            layer = Normalize(channels, mean, std).to(next(parts.parameters()).device)
            tried.append((_measure_accuracy(parts, images, labels, num_classes, layer), mean, std, words))
    best, mean, std, words = max(tried)
    noise = 3 * math.sqrt(0.25 / count)
    if best > own + max(_GAIN, noise):
        std_text = "(1 / 255,)" if std == (1 / 255,) else str(std)
        raise ValueError(
            f"the model is right on {own:.1%} of {count} images in [0, 1], and on {best:.1%} if it gets {words}. Make "
            f"that its first layer: model = torch.nn.Sequential(ttvd.Normalize({channels}, {mean}, {std_text}), model)"
        )
    if own <= 1 / classes + 3 * math.sqrt((1 - 1 / classes) / classes / count):
        size = " x ".join(map(str, images.shape[1:]))
        raise ValueError(
            f"the model is right on {own:.1%} of {count} images, and chance is {1 / classes:.1%}. Most likely it was "
            "trained on normalised images and gets images in [0, 1]. Make the normalisation its first layer: model = "
            f"torch.nn.Sequential(ttvd.Normalize({channels}, mean, std), model). Or the images have another size "
            f"(these: {size}), another order of channels, or labels in another order than the outputs, or the "
            "trained weights were not loaded"
        )


@torch.no_grad()
def _measure_accuracy(
    parts: SplitModel,
    images: Tensor,
    labels: Tensor,
    num_classes: int | None,
    layer: nn.Module | None = None,
) -> float:
    """Return the accuracy of upright images, with or without a layer in front of the model."""
    like, outputs = next(parts.parameters()), parts.linear.out_features
    x = to_unit(images.to(like.device)).to(like.dtype)
    with evaluating(parts):
        logits = torch.cat([parts(part) for part in (x if layer is None else layer(x)).split(128)])
    # Without the number of classes, the head may have outputs for one, two or four views of each.
    strides = [outputs // num_classes] if num_classes else [v for v in TURNS if outputs % v == 0]
    right = [logits[:, ::stride].argmax(1).cpu() == labels.cpu() for stride in strides]
    return max(float(hits.float().mean()) for hits in right)


def _reserve(data: Data, labels: Tensor | None, seed: int) -> tuple[Data, Data]:
    """Return data for the sites, and one image in five for calibration, which can be read after the others."""
    generator = torch.Generator().manual_seed(seed)
    if labels is None:
        kept: list[Batch] = []
        return _set_aside(cast(Iterable[Batch], data), kept, generator), kept
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=generator)
    by_class = order[labels[order].argsort(stable=True)]
    groups = by_class.split(labels.unique(return_counts=True)[1].tolist())
    # Small classes give an image or none at random, so that all together give a fifth; the sites keep one at least.
    extra = torch.rand(len(groups), generator=generator).tolist()
    taken = [
        rows[: min(len(rows) - 1, int(len(rows) / _RESERVED + u))]
        for rows, u in zip(groups, extra, strict=True)
    ]
    rows = torch.cat(taken).sort().values
    if not len(rows):
        return data, data
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[rows] = False
    return _select(data, rest.nonzero()[:, 0], labels), _select(data, rows, labels)


def _set_aside(data: Iterable[Batch], kept: list[Batch], generator: torch.Generator) -> Iterator[Batch]:
    """Iterate over batches without one image in five, which are kept; the first of a class is not."""
    seen: set[int] = set()
    missing = _RESERVED_LIMIT
    for images, labels in data:
        chosen = torch.rand(len(labels), generator=generator) < 1 / _RESERVED
        for row, label in enumerate(labels.tolist()):
            chosen[row] &= label in seen
            seen.add(label)
        chosen &= chosen.cumsum(0) <= missing
        missing -= int(chosen.sum())
        if bool(chosen.any()):
            kept.append((images[chosen.to(images.device)], labels[chosen.to(labels.device)]))
        if not bool(chosen.all()):
            yield images[~chosen.to(images.device)], labels[~chosen.to(labels.device)]


def _select(data: Data, rows: Tensor, labels: Tensor) -> Data:
    """Return some samples of data whose labels are known."""
    if isinstance(data, ImageSet | ImageFolder):
        return data.subset(rows)
    if isinstance(data, tuple | list):
        images, targets = data
        return images[rows.to(images.device)], targets[rows.to(targets.device)]
    return _Part(data, rows, labels)


@contextmanager
def _show(progress: bool | None) -> Iterator[tuple[Start, Callable[[str], None]]]:
    """Yield a function that starts a bar, and one that prints a line; without a terminal they show nothing."""
    if progress is None:
        progress = sys.stderr.isatty() and find_spec("rich") is not None
    if not progress:
        yield lambda _, __: lambda _: None, lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:

        def start(name: str, total: int | None) -> Callable[[int], None]:
            bar = bars.add_task(name, total=total)
            return lambda count: bars.update(bar, completed=count)

        yield start, bars.console.print
