"""Source data in any form: checks, choice of samples, batches, and the features that a model computes of them."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from ttvd.data.loading import prefetch
from ttvd.data.sets import ImageFolder, ImageSet
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.split import SplitModel, check_input_shape, evaluating, split
from ttvd.nn.views import rotate
from ttvd.source.distributed import Group
from ttvd.zoo.source_features import SourceFeatures

Batch = tuple[Tensor, Tensor]
Data = Batch | ImageSet | ImageFolder | Dataset[Any] | Iterable[Batch]
"""A pair (images, labels), a set of this library, a map-style dataset, or an iterable of batches (images, labels)."""

# Interpolation leaves rounding errors of this size; standardised images are off by whole units.
_TOLERANCE = 1e-4
_HELD_OUT_EVERY = 10


def is_held_out(count: int) -> Tensor:
    """Return the mask (count,) of the images that training leaves out: every tenth, the first one included.

    Temperatures are fitted on them, and training settings are compared on them.

    Example:
        >>> is_held_out(50_000).sum()
        tensor(5000)
    """
    return torch.arange(count) % _HELD_OUT_EVERY == 0


def check_images(images: Tensor) -> None:
    """Raise a ValueError unless images are (b, c, h, w), uint8 or finite floats in [0, 1]."""
    if images.ndim != 4 or images.numel() == 0:
        raise ValueError(f"expected images of shape (b, c, h, w), got {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise ValueError(f"images must be uint8 or floating point, got {images.dtype}")
    low, high = (value.item() for value in images.detach().aminmax())
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):
        remedy = (
            "Write images / 255, or give uint8 images"
            if low >= 0 and 2 < high <= 255
            else "Give images before their normalisation, and make the normalisation the first layer of the model: "
            f"model = torch.nn.Sequential(ttvd.Normalize({images.shape[1]}, mean, std), model)"
        )
        raise ValueError(
            f"images must be finite and in [0, 1], got values from {low:g} to {high:g}. {remedy}"
        )


def to_unit(images: Tensor) -> Tensor:
    """Return floating-point images in [0, 1]: uint8 images are divided by 255, floats stay as they are.

    Example:
        >>> to_unit(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist()
        [0.0, 0.20000000298023224, 1.0]
    """
    return images.float() / 255 if images.dtype == torch.uint8 else images


def check_labels(labels: Tensor, num_classes: int | None = None) -> None:
    """Raise a ValueError unless labels are integers (n,) from 0 to num_classes - 1."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers of shape (b,), got {labels.dtype} {tuple(labels.shape)}")
    if labels.numel() == 0:
        raise ValueError("there are no labels")
    low, high = (int(value.item()) for value in labels.aminmax())
    if low < 0 or (num_classes is not None and high >= num_classes):
        limit = "" if num_classes is None else f" to {num_classes - 1}"
        hint = "; if the first class is 1, give labels - 1" if low == 1 and high == num_classes else ""
        raise ValueError(f"labels must run from 0{limit}, got values from {low} to {high}{hint}")


def check_pairs(images: Tensor, labels: Tensor) -> None:
    """Raise a ValueError unless images and labels are valid and equally many."""
    check_images(images)
    check_labels(labels)
    if len(images) != len(labels):
        raise ValueError(f"got {len(images)} images and {len(labels)} labels")


def find_labels(data: Data) -> Tensor | None:
    """Return all labels, or None if only a pass over the batches can tell them.

    The list of a dataset (``targets``, torchvision's name, or ``labels``) is used if it has one; otherwise its items
    are read.
    """
    if tensors := _as_tensors(data):
        return tensors[1]
    if isinstance(data, ImageFolder):
        return data.labels
    if not isinstance(data, Dataset) or isinstance(data, IterableDataset):
        return None
    known = getattr(data, "targets", None)
    known = getattr(data, "labels", None) if known is None else known
    if known is None:
        size: int = len(data)  # type: ignore[arg-type]  # map-style datasets have a length
        known = [int(data[i][1]) for i in range(size)]
    return torch.as_tensor(known)


def _as_tensors(data: Data) -> Batch | None:
    """Return images and labels if the data hold them as two tensors."""
    if isinstance(data, ImageSet):
        return data.images, data.labels
    if not isinstance(data, tuple | list) or len(data) != 2:
        return None
    images, labels = data
    if isinstance(images, Tensor) and isinstance(labels, Tensor):
        if len(images) != len(labels):
            raise ValueError(f"got {len(images)} images and {len(labels)} labels")
        return images, labels
    return None


def choose_fraction(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Return the sorted indices of a seeded random choice that takes the same fraction of every class.

    Of n images of a class, it takes ``round(fraction * n)``, but at least one.

    Example:
        >>> len(choose_fraction(torch.arange(40) % 4, 0.1, seed=0))
        4
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    if fraction == 1.0:
        return torch.arange(len(labels))
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[labels[order].argsort(stable=True)]  # one class after the other, each in random order
    sizes = labels.unique(return_counts=True)[1].tolist()
    kept = [rows[: max(1, round(fraction * len(rows)))] for rows in by_class.split(sizes)]
    return torch.cat(kept).sort().values


def choose_rows(data: Data, fraction: float, limit: int | None, seed: int, num_classes: int) -> Tensor | None:
    """Return the sorted indices of the samples to use; None for an iterable, which is used as it comes."""
    labels = find_labels(data)
    if labels is None:
        if fraction != 1.0:
            raise ValueError(
                "an iterable of batches needs fraction=1, because its labels are not known ahead; use limit"
            )
        return None
    check_labels(labels, num_classes)
    rows = choose_fraction(labels, fraction, seed)
    if limit is None or limit >= len(rows):
        return rows
    rows = rows[choose_fraction(labels.cpu()[rows], limit / len(rows), seed)]
    # Rounding can leave a few too many, because every class keeps at least one.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order[:limit].sort().values]


def iterate_batches(
    data: Data, batch_size: int, *, indices: Tensor | None = None, group: Group | None = None
) -> Iterator[Batch]:
    """Iterate over batches of images and labels. Of n processes, each gets every n-th batch.

    Args:
        data: Source data in any form.
        batch_size: Images per batch; an iterable keeps its own batches.
        indices: Indices of the images to use, for tensors and datasets; all of them unless given.
        group: The group of processes; this process alone unless given.
    """
    group = group or Group()
    if (labels := find_labels(data)) is None:
        assert isinstance(data, Iterable)
        yield from islice(data, group.rank, None, group.world)
        return
    chosen = torch.arange(len(labels)) if indices is None else indices
    parts = chosen.split(batch_size)[group.rank :: group.world]
    if isinstance(data, ImageFolder):
        # Threads, not processes: processes need shared memory for whole batches, which containers often lack.
        with closing(prefetch((data, rows) for rows in parts)) as found:
            for rows, pictures in zip(parts, found, strict=True):
                yield pictures, labels[rows]
        return
    for rows in parts:
        if tensors := _as_tensors(data):
            yield tensors[0][rows.to(tensors[0].device)], tensors[1][rows.to(tensors[1].device)]
        else:
            assert isinstance(data, Dataset)
            images, targets = default_collate([data[i] for i in rows.tolist()])
            yield images, targets


@torch.no_grad()
def stream_features(
    model: nn.Module, batches: Iterable[Batch], views: int, num_classes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over features (v, b, d) and labels (b,) of batches, on the model's device, in evaluation mode.

    Args:
        model: A ``SplitModel``, or a classifier that :func:`ttvd.nn.split.split` understands.
        batches: Images, uint8 or floating point in [0, 1], and labels.
        views: Number of rotations of each image.
        num_classes: Number of classes; all labels must be below it.
    """
    parts = split(model)
    for images, labels in batches:
        yield compute_features(parts, images, labels, views, num_classes)


@torch.no_grad()
def compute_features(
    parts: SplitModel, images: Tensor, labels: Tensor, views: int, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return features (v, b, d) and labels (b,) of one batch, as :func:`stream_features` does."""
    check_images(images)
    check_input_shape(parts, images.shape)
    check_labels(labels, num_classes)
    like = next(parts.parameters())
    with evaluating(parts):
        z = parts.features(rotate(to_unit(images.to(like.device)).to(like.dtype), views))
    if z.ndim != 2 or not bool(z.isfinite().all()):
        raise ValueError(f"features must be finite and of shape (b, d), got shape {tuple(z.shape)}")
    return z.view(views, len(labels), -1), labels.to(like.device)


def collect_features(
    model: nn.Module,
    data: Data,
    *,
    fraction: float = 1.0,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
) -> SourceFeatures:
    """Compute the features of source samples in evaluation mode, normalised to length 1.

    Args:
        model: A ``SplitModel``, or a classifier that :func:`ttvd.nn.split.split` understands.
        data: A pair ``(images, labels)`` of tensors, a map-style dataset, or an iterable of batches. Images are uint8
            or floating point in [0, 1], as the model sees them in use, without augmentation.
        fraction: Fraction of every class to use; must be 1 for an iterable.
        limit: Largest number of samples to use: about the same fraction of every class of tensors and datasets, the
            first samples of an iterable.
        seed: Seed of the choice of samples.
        batch_size: Images per forward pass; an iterable keeps its own batches.

    Returns:
        The features in the order of the data, on the CPU.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> memory = collect_features(net, (torch.rand(9, 1, 2, 2), torch.arange(9) % 3), limit=6)
        >>> tuple(memory.features.shape), memory.labels.bincount().tolist()
        ((6, 4), [2, 2, 2])
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    num_classes = split(model).linear.out_features
    rows = choose_rows(data, fraction, limit, seed, num_classes)
    features: list[Tensor] = []
    labels: list[Tensor] = []
    missing = limit
    for z, y in stream_features(model, iterate_batches(data, batch_size, indices=rows), 1, num_classes):
        features.append(F.normalize(z[0, :missing].float(), dim=1).cpu())
        labels.append(y[:missing].long().cpu())
        missing = None if missing is None else missing - len(labels[-1])
        if missing == 0:
            break
    if not features:
        raise ValueError("there are no images to collect features from")
    return SourceFeatures(torch.cat(features), torch.cat(labels), fingerprint(model))
