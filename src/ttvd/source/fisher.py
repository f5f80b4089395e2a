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
from ttvd.nn.split import check_input_shape, shared_copy, unwrap_output
from ttvd.source.features import check_images, to_unit
from ttvd.zoo.tensorfile import read_tensors, write_tensors

KIND = "ttvd.fisher"
FORMAT_VERSION = 2
_REMEDY = "estimate it again with ttvd.source.estimate_fisher"

Images = Tensor | tuple[Tensor, Tensor] | ImageSet | ImageFolder | Dataset[Any] | Iterable[Any]
"""Images, a pair (images, labels), a set of this library, a map-style dataset, or an iterable of batches."""


def estimate_fisher(
    model: nn.Module, images: Images, *, samples: int = 2000, batch_size: int = 64, seed: int = 0
) -> dict[str, Tensor]:
    """Average the squared gradients of the loss at the model's own predictions over batches of source images.

    The loss is the mean cross-entropy of a batch with its most likely classes as labels. The gradients are those of
    the affine parameters of the norms. Batch norms use the statistics of the batch, as at test time (Niu et al., ICML
    2022).

    Args:
        model: The classifier; it stays as it is.
        images: Source images, uint8 or floating point in [0, 1], in one of the forms of ``Images``. Labels are not
            used.
        samples: Number of images; 2000 in the paper. They are a random choice from a tensor or dataset, and the first
            ones of an iterable.
        batch_size: Images per batch, as large as at test time; an iterable keeps its own batches.
        seed: Seed of the choice and its order.

    Returns:
        A tensor for each parameter, by the parameter's name inside an adapter, on the device of the model.

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
    for batch in _limit(_choose(images, samples, batch_size, seed), samples):
        gradients = _differentiate(net, list(parameters.values()), batch)
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total += gradient.square()
        count += 1
    if count == 0:
        raise ValueError("there are no images to estimate the Fisher information from")
    return {name: total / count for name, total in sums.items()}


def save_fisher(path: str | os.PathLike[str], fisher: Mapping[str, Tensor]) -> None:
    """Write the result of :func:`estimate_fisher` as a safetensors file, atomically."""
    write_tensors(path, fisher, kind=KIND, version=FORMAT_VERSION)


def load_fisher(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a file that :func:`save_fisher` wrote; a ValueError says what is wrong with any other file."""
    fisher, _ = read_tensors(path, kind=KIND, version=FORMAT_VERSION, remedy=_REMEDY)
    for name, value in fisher.items():
        if not value.is_floating_point() or not bool((value.isfinite() & (value >= 0)).all()):
            raise ValueError(
                f"{path} is not a valid {KIND} file: {name} must be finite and at least 0; {_REMEDY}"
            )
    return fisher


def _choose(images: Images, samples: int, batch_size: int, seed: int) -> Iterator[Any]:
    """Iterate over batches of a random choice if the images can be counted, else over the batches as they come."""
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


def _limit(batches: Iterable[Any], samples: int) -> Iterator[Tensor]:
    """Iterate over batches up to a number of images; the last batch may be cut."""
    left = samples
    for batch in batches:
        images = batch if isinstance(batch, Tensor) else batch[0]
        yield images[:left]
        left -= len(images)
        if left <= 0:
            return


def _differentiate(net: nn.Module, parameters: list[nn.Parameter], images: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the mean cross-entropy of a batch with its most likely classes as labels."""
    check_images(images)
    check_input_shape(net, images.shape)
    like = parameters[0]
    with torch.enable_grad():
        logits = unwrap_output(net(to_unit(images.to(like.device)).to(like.dtype)))
        loss = F.cross_entropy(logits, logits.detach().argmax(1))
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
