"""Collection of source features: the memory that nearest-neighbour methods start with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.split import split
from ttvd.source.features import Data, find_labels, iterate_batches, stream_features
from ttvd.source.images import check_labels
from ttvd.source.sites import choose_fraction
from ttvd.zoo.source_features import SourceFeatures


def collect_features(
    model: nn.Module,
    data: Data,
    *,
    fraction: float = 1.0,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
) -> SourceFeatures:
    """Features of source samples in evaluation mode, normalised to length 1, with their labels.

    Args:
        model: A ``SplitModel``, or any classifier that :func:`ttvd.nn.split` understands.
        data: Tensors ``(images, labels)``, a map-style dataset, or an iterable of batches; images are uint8 or
            floating point in [0, 1]. Give images as the model sees them in use, without augmentation.
        fraction: Share of every class to use; 1 for an iterable.
        limit: Use at most so many samples: of tensors and datasets about the same share of every class, of an
            iterable the first ones.
        seed: Decides which samples a fraction or a limit takes.
        batch_size: Images per forward pass; an iterable keeps its own batches.

    Returns:
        The samples in the order of the data, on the CPU.

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


def choose_rows(data: Data, fraction: float, limit: int | None, seed: int, num_classes: int) -> Tensor | None:
    """Sorted numbers of the samples to use; None for an iterable, which is used as it comes."""
    labels = find_labels(data)
    if labels is None:
        if fraction != 1.0:
            raise ValueError(
                "an iterable of batches needs fraction=1: its labels are not known ahead; use limit"
            )
        return None
    check_labels(labels, num_classes)
    rows = choose_fraction(labels, fraction, seed)
    if limit is None or limit >= len(rows):
        return rows
    rows = rows[choose_fraction(labels.cpu()[rows], limit / len(rows), seed)]
    # Rounding may leave a few too many, and every class keeps at least one.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order[:limit].sort().values]
