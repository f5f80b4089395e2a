"""Fisher information: how much the source task depends on each parameter that adapts."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from ttvd.data.sets import ImageFolder, ImageSet
from ttvd.nn.norms import Statistics, apply_statistics, select_parameters
from ttvd.nn.split import shared_copy
from ttvd.source.images import check_images, to_unit
from ttvd.zoo.tensorfile import read_tensors, write_tensors

KIND = "ttvd.fisher"
FORMAT_VERSION = 1

Images = Tensor | tuple[Tensor, Tensor] | ImageSet | ImageFolder | Dataset[Any] | Iterable[Any]
"""Images; images and labels; a set of ours; a map-style dataset; any iterable of batches: with labels or without."""


def estimate_fisher(
    model: nn.Module, images: Images, *, samples: int = 2000, batch_size: int = 64, seed: int = 0
) -> dict[str, Tensor]:
    """Squared gradients of the loss at the model's own predictions, averaged over batches of source images.

    The gradient is that of the mean cross-entropy of a batch towards its most likely classes, by the affine parameters
    of the norms; batch norms use the statistics of the batch, as they will at test time (Niu et al., ICML 2022).

    Args:
        model: The classifier, left as it is.
        images: Unlabelled source images, uint8 or floating point in [0, 1], in one of the forms of ``Images``.
            Labels, where there are some, are not used.
        samples: How many images; 2000 in the paper. Of a tensor or dataset a random choice, of an iterable the first.
        batch_size: Images per batch, as large as at test time; an iterable keeps its own batches.
        seed: Decides the choice and its order.

    Returns:
        A tensor for each parameter, by its name inside an adapter, on the device of the model.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> sorted(estimate_fisher(net, torch.rand(100, 1, 2, 2)))
        ['0.bias', '0.weight']
    """
    if samples < 1 or batch_size < 1:
        raise ValueError(f"samples and batch_size must be at least 1, got {samples} and {batch_size}")
    copied = shared_copy(model, select_parameters(model, "norm"))
    net = apply_statistics(copied, Statistics.batch()).eval()
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
    count = 0
    for batch in _take(_choose(images, samples, batch_size, seed), samples):
        gradients = _differentiate(net, list(parameters.values()), batch)
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total += gradient.square()
        count += 1
    if count == 0:
        raise ValueError("there are no images to estimate the Fisher information from")
    return {name: total / count for name, total in sums.items()}


def save_fisher(path: str | os.PathLike[str], fisher: Mapping[str, Tensor]) -> None:
    """Write what :func:`estimate_fisher` found as a safetensors file, atomically."""
    write_tensors(path, fisher, kind=KIND, version=FORMAT_VERSION)


def load_fisher(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read what :func:`save_fisher` wrote; a ValueError says what is wrong with any other file."""
    return read_tensors(path, kind=KIND, version=FORMAT_VERSION)[0]


def _choose(images: Images, samples: int, batch_size: int, seed: int) -> Iterator[Any]:
    """Batches of a random choice where the images can be counted, else as they come."""
    labelled = isinstance(images, tuple) and len(images) == 2 and getattr(images[1], "ndim", 0) == 1
    data: Any = images[0] if labelled else images  # type: ignore[index]
    data = data.images if isinstance(data, ImageSet) else data
    if isinstance(data, IterableDataset) or not isinstance(data, Tensor | Dataset | ImageFolder):
        yield from data
        return
    size = len(data)  # type: ignore[arg-type]  # map-style datasets have a length
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:samples]
    for rows in order.split(batch_size):
        if isinstance(data, Tensor):
            yield data[rows.to(data.device)]
        elif isinstance(data, ImageFolder):
            yield data.floats(rows)
        else:
            yield default_collate([data[i] for i in rows.tolist()])


def _take(batches: Iterable[Any], samples: int) -> Iterator[Tensor]:
    """The first images of a stream of batches, in those batches; the last one may be cut short."""
    left = samples
    for batch in batches:
        images = batch if isinstance(batch, Tensor) else batch[0]
        yield images[:left]
        left -= len(images)
        if left <= 0:
            return


def _differentiate(net: nn.Module, parameters: list[nn.Parameter], images: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the mean cross-entropy of a batch towards its most likely classes."""
    check_images(images)
    like = parameters[0]
    with torch.enable_grad():
        logits = net(to_unit(images.to(like.device)).to(like.dtype))
        loss = F.cross_entropy(logits, logits.detach().argmax(1))
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
