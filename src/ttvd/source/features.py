"""Streams of features of source data, whatever form the data has."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from ttvd.data.loading import prefetch
from ttvd.data.sets import ImageFolder, ImageSet
from ttvd.nn.split import evaluating, split
from ttvd.nn.views import rotate
from ttvd.source.distributed import Group
from ttvd.source.images import check_images, check_labels, to_unit

Batch = tuple[Tensor, Tensor]
Data = Batch | ImageSet | ImageFolder | Dataset[Any] | Iterable[Batch]
"""Images and labels; a set of ours; a map-style dataset of (image, label); any iterable of batches (images, labels)."""


def _as_tensors(data: Data) -> Batch | None:
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


def find_labels(data: Data) -> Tensor | None:
    """All labels, or None where only a pass over the batches can tell.

    A dataset's own list (``targets``, torchvision's name, or ``labels``) is used where it has one; otherwise its
    items are read.
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


def iterate_batches(
    data: Data, batch_size: int, *, indices: Tensor | None = None, group: Group | None = None
) -> Iterator[Batch]:
    """Batches of images and labels; of several processes each gets every n-th batch.

    Args:
        data: Source data in one of its three forms.
        batch_size: Images per batch; an iterable keeps its own batches.
        indices: Which images, for tensors and datasets; all of them unless given.
        group: Which process this is.
    """
    group = group or Group()
    if (labels := find_labels(data)) is None:
        assert isinstance(data, Iterable)
        yield from islice(data, group.rank, None, group.world)
        return
    chosen = torch.arange(len(labels)) if indices is None else indices
    parts = chosen.split(batch_size)[group.rank :: group.world]
    if isinstance(data, ImageFolder):
        # By threads: processes would need shared memory for whole batches, of which containers have little.
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
    """Features (v, b, d) and labels (b,) of each batch, on the model's device, in evaluation mode.

    Args:
        model: A ``SplitModel``, or anything that one can be made of.
        batches: Images, uint8 or floating point in [0, 1], and labels.
        views: How many turns of each image.
        num_classes: Labels must be below it.
    """
    features = split(model).features
    for images, labels in batches:
        check_images(images)
        check_labels(labels, num_classes)
        like = next(model.parameters())
        with evaluating(model):
            z = features(rotate(to_unit(images.to(like.device)).to(like.dtype), views))
        if z.ndim != 2 or not bool(z.isfinite().all()):
            raise ValueError(f"features must be finite and of shape (b, d), got shape {tuple(z.shape)}")
        yield z.view(views, len(labels), -1), labels.to(like.device)
